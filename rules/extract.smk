"""Capture of the hidden states.

REQUIRED INPUTS:
    plan = results/plan.json
    tokens = results/tokens/shards/<shard_id>.parquet
    server = results/<run>/server.json

OUTPUTS:
    shard = results/<run>/shards/<shard_id>.safetensors
    probe = results/<run>/shards/<shard_id>.probe.safetensors
    receipts = results/<run>/shards/<shard_id>.receipts.json
"""


rule extract:
    """
    Have the server write one shard.

    What is captured depends on the capture key in <run> and on the shard id alone. So this rule refuses to make a
    shard whose files are all there: then no change of its text, of a script, of a parameter, of an image, of an age or
    of Snakemake's own settings can capture it again. To capture one again, delete it.

    A job is light: the server computes and writes. Several run at once, so that its queue never drains between shards.
    """
    input:
        plan=ancient(PLAN),
        tokens=ancient(shard_tokens),
        server=ancient(RUN / "server.json"),
        model=ancient(MODEL / "config.json"),
    output:
        shard=f"{SHARD}.safetensors",
        probe=f"{SHARD}.probe.safetensors",
        receipts=f"{SHARD}.receipts.json",
    log:
        LOGS / "{run}" / "extract" / "{shard_id}.log",
    benchmark:
        BENCHMARKS / "{run}" / "extract" / "{shard_id}.tsv"
    wildcard_constraints:
        run=ask.runs_without_present_shards(RESULTS) if workflow.is_main_process else ask.ANY_RUN,
    priority: 1
    # once more, in case the server died: the next lease starts it again
    retries: 1
    resources:
        streams=1,
    shell:
        """
        exec python scripts/extract.py \
            --config "$DRAFTSTATES_CONFIG" \
            --plan {input.plan:q} \
            --shard-id {wildcards.shard_id:q} \
            --tokens {input.tokens:q} \
            --output {output.shard:q} >{log:q} 2>&1
        """

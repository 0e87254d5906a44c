"""Capture of the hidden states.

REQUIRED INPUTS:
    plan = results/plan.json
    tokens = results/tokens/shards/<shard_id>.parquet
    server = results/<capture>/server.json
    parity = results/<capture>/parity.json, if the comparison takes less than two minutes

OUTPUTS:
    shard = results/<capture>/shards/<shard_id>.safetensors
    recaptures = results/<capture>/shards/<shard_id>.recaptures.safetensors
    receipts = results/<capture>/shards/<shard_id>.receipts.json
"""


rule extract:
    """
    Have the server write one shard.

    The captured numbers depend on the capture key in <capture> and on the shard id alone. So this
    rule never makes a shard whose files all exist: no change of the rule's text, of a script, a
    parameter, an image, a file's age or Snakemake's own settings captures it a second time. To have
    a shard captured a second time, delete it.

    A job is light: the server computes and writes. Several jobs run at once, so that the server's
    queue never drains between shards.
    """
    input:
        plan=ancient(RESULTS.plan),
        tokens=ancient(shard_tokens),
        server=ancient(CAPTURE.server),
        parity=ancient(parity_first),
        model=ancient(MODEL / "config.json"),
    output:
        shard=CAPTURE.shard("{shard_id}"),
        recaptures=CAPTURE.recaptures("{shard_id}"),
        receipts=CAPTURE.receipts("{shard_id}"),
    log:
        RESULTS.log("{capture}", "extract", "{shard_id}"),
    benchmark:
        RESULTS.benchmark("{capture}", "extract", "{shard_id}")
    wildcard_constraints:
        capture=(
            ask.captures_without_present_shards(RESULTS.root)
            if workflow.is_main_process
            else ask.ANY_CAPTURE
        ),
    priority: 1
    # A second attempt, in case the server died: the next lease restarts it.
    retries: 1
    resources:
        streams=1,
    shell:
        """
        exec python "$DRAFTSTATES_SCRIPTS/extract.py" \
            --config "$DRAFTSTATES_CONFIG" \
            --plan {input.plan:q} \
            --shard-id {wildcards.shard_id:q} \
            --tokens {input.tokens:q} \
            --output {output.shard:q} >{log:q} 2>&1
        """

"""Verification of the shards, from the disk.

REQUIRED INPUTS:
    shard, recaptures, receipts = results/<capture>/shards/<shard_id>.*

OUTPUTS:
    verified = results/<capture>/verified/<shard_id>.json
"""


rule verify:
    """
    Read a shard from the disk and check every promise of it. Only a shard that passes may enter a
    manifest.
    """
    input:
        shard=CAPTURE.shard("{shard_id}"),
        recaptures=CAPTURE.recaptures("{shard_id}"),
        receipts=CAPTURE.receipts("{shard_id}"),
        tokens=ancient(sampled_tokens),
        plan=ancient(RESULTS.plan),
    output:
        verified=CAPTURE.verified("{shard_id}"),
    log:
        RESULTS.log("{capture}", "verify", "{shard_id}"),
    benchmark:
        RESULTS.benchmark("{capture}", "verify", "{shard_id}")
    # A job's imports need one core; reading and hashing scale with cores, up to the disk's speed.
    # With four, verification fell behind capture on a machine of 16 cores.
    threads: 2
    params:
        tokens=sampled_option,
        limit=answers_limit,
        code=ask.source_digest("verify", "shards", "model"),
    shell:
        """
        exec python "$DRAFTSTATES_SCRIPTS/verify.py" \
            --plan {input.plan:q} \
            --shard-id {wildcards.shard_id:q} \
            --model "$DRAFTSTATES_MODEL" \
            --shard {input.shard:q} \
            --recaptures {input.recaptures:q} \
            --receipts {input.receipts:q} {params.tokens} \
            --threads {threads} \
            --output {output.verified:q} >{log:q} 2>&1
        """

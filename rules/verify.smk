"""Verification of the shards, from the disk.

REQUIRED INPUTS:
    shard, probe, receipts = results/<run>/shards/<shard_id>.*

OUTPUTS:
    verified = results/<run>/verified/<shard_id>.json
"""


rule verify:
    """
    Read a shard again and check every promise of it. Only what has passed may enter a manifest.
    """
    input:
        shard=f"{SHARD}.safetensors",
        probe=f"{SHARD}.probe.safetensors",
        receipts=f"{SHARD}.receipts.json",
        plan=ancient(PLAN),
    output:
        verified=RUN / "verified" / "{shard_id}.json",
    log:
        LOGS / "{run}" / "verify" / "{shard_id}.log",
    benchmark:
        BENCHMARKS / "{run}" / "verify" / "{shard_id}.tsv"
    # reading and hashing scale with cores, up to what a disk gives
    threads: 4
    params:
        code=ask.source_digest(
            "verify.py",
            "verified.py",
            "checks.py",
            "alignment.py",
            "prefixes.py",
            "probes.py",
            "plan_file.py",
            "wire.py",
            "model.py",
            "final_norm.py",
            "shards.py",
            "capture_spec.py",
            "ids.py",
        ),
    shell:
        """
        exec python scripts/verify.py \
            --plan {input.plan:q} \
            --shard-id {wildcards.shard_id:q} \
            --model "$DRAFTSTATES_MODEL" \
            --shard {input.shard:q} \
            --probe {input.probe:q} \
            --receipts {input.receipts:q} \
            --threads {threads} \
            --output {output.verified:q} >{log:q} 2>&1
        """

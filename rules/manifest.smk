"""The manifest: what there is, of what, and how it was checked.

REQUIRED INPUTS:
    plan = results/plan.json
    verified = results/<run>/verified/<shard_id>.json, of every planned shard

OUTPUTS:
    manifest = results/<run>/manifest.json
    samples = results/<run>/samples.parquet
"""


rule manifest:
    """
    List the verified shards and their samples, and close the accounts: every row of every source is kept, skipped or failed.

    The manifest of before is gone when this begins. Snakemake could bring it back after a failure, but would then take it for the new one.
    """
    input:
        plan=PLAN,
        verified=verified_files,
    output:
        manifest=RUN / "manifest.json",
        samples=RUN / "samples.parquet",
    log:
        LOGS / "{run}" / "manifest.log",
    benchmark:
        BENCHMARKS / "{run}" / "manifest.tsv"
    params:
        run_folder=subpath(output.manifest, parent=True),
        code=ask.source_digest("manifest.py", "plan_file.py", "verified.py", "shards.py", "capture_spec.py", "ids.py"),
    shell:
        """
        exec python scripts/manifest.py \
            --plan {input.plan:q} \
            --run-dir {params.run_folder:q} \
            --output {output.manifest:q} \
            --samples {output.samples:q} >{log:q} 2>&1
        """

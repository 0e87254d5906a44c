"""The manifest: the verified shards, their sources, and the results of the checks.

REQUIRED INPUTS:
    plan = results/plan.json
    verified = results/<capture>/verified/<shard_id>.json of every planned shard; with `storage`,
        the records of their compact forms, and these
    parity = results/<capture>/parity.json

OUTPUTS:
    manifest = results/<capture>/manifest.json
    samples = results/<capture>/samples.parquet
"""


rule manifest:
    """
    List the verified shards and their samples, and close the accounts.

    Every row of every source is kept, skipped or failed. The earlier manifest is removed before
    this job: if Snakemake restored it after a failure, it would take it for the new one.
    """
    input:
        plan=RESULTS.plan,
        verified=verified_files,
        stored=compact_files,
        parity=CAPTURE.parity,
    output:
        manifest=CAPTURE.manifest,
        samples=CAPTURE.samples,
    log:
        RESULTS.log("{capture}", "manifest"),
    benchmark:
        RESULTS.benchmark("{capture}", "manifest")
    params:
        capture_folder=subpath(output.manifest, parent=True),
        parity=CONFIG.checks.parity,
        form=FORM_OPTION,
        code=ask.source_digest("shards"),
    shell:
        """
        exec python "$DRAFTSTATES_SCRIPTS/manifest.py" \
            --plan {input.plan:q} \
            --capture-folder {params.capture_folder:q} \
            --parity {params.parity} {params.form} \
            --output {output.manifest:q} \
            --samples {output.samples:q} >{log:q} 2>&1
        """

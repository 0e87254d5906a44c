"""Exports: a manifest in the formats that trainers read.

REQUIRED INPUTS:
    manifest = results/<capture>/manifest.json, samples.parquet and the shards that they list

OUTPUTS:
    export = results/<capture>/exports/<trainer>/export.json, and the trainer's files beside it
"""


rule export:
    """
    Export a manifest for one trainer.

    Files that the present export holds already are linked and not written. Only export.json is a
    declared output: Snakemake removes declared outputs before a job, and the job reuses the files
    beside it.
    """
    input:
        manifest=CAPTURE.manifest,
        samples=CAPTURE.samples,
        model=ancient(MODEL / "config.json"),
    output:
        export=CAPTURE.export("{trainer}"),
    log:
        RESULTS.log("{capture}", "export", "{trainer}"),
    benchmark:
        RESULTS.benchmark("{capture}", "export", "{trainer}")
    wildcard_constraints:
        trainer="[a-z0-9_]+",
    params:
        folder=subpath(output.export, parent=True),
        options=export_arguments,
        code=ask.source_digest("exports", "shards", "model"),
    shell:
        """
        exec python "$DRAFTSTATES_SCRIPTS/export.py" \
            --manifest {input.manifest:q} \
            --trainer {wildcards.trainer:q} \
            --model "$DRAFTSTATES_MODEL" \
            --output {params.folder:q} \
            {params.options} >{log:q} 2>&1
        """

"""Exports: a manifest in the formats that trainers read.

REQUIRED INPUTS:
    manifest = results/<run>/manifest.json, samples.parquet and the shards that they list

OUTPUTS:
    export = results/<run>/exports/<trainer>/export.json, and the trainer's files beside it
"""


rule export:
    """
    Export a manifest for one trainer. What the present export holds already is linked, not written again.

    Only export.json is declared: Snakemake removes what it declares before a job, and the files beside it are to be taken over.
    """
    input:
        manifest=RUN / "manifest.json",
        samples=RUN / "samples.parquet",
        model=ancient(MODEL / "config.json"),
    output:
        export=RUN / "exports" / "{trainer}" / "export.json",
    log:
        LOGS / "{run}" / "export" / "{trainer}.log",
    benchmark:
        BENCHMARKS / "{run}" / "export" / "{trainer}.tsv"
    wildcard_constraints:
        trainer="speculators|specforge|model_optimizer|deepspec",
    params:
        folder=subpath(output.export, parent=True),
        options=export_options,
        code=ask.source_digest(
            "exports",
            "dataset.py",
            "readers.py",
            "storage.py",
            "model.py",
            "final_norm.py",
            "vocab.py",
            "shards.py",
            "capture_spec.py",
            "ids.py",
        ),
    shell:
        """
        exec python scripts/export.py \
            --manifest {input.manifest:q} \
            --trainer {wildcards.trainer:q} \
            --model "$DRAFTSTATES_MODEL" \
            --output {params.folder:q} \
            {params.options} >{log:q} 2>&1
        """

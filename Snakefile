"""Conversations to verified hidden states.

What is made, below the folder that `results` in the configuration names:

    tokens/<source>.parquet, .json      tokens and loss masks of a source, and what became of each of its rows
    plan.json, tokens/shards/           which samples go into which shard
    <run>/server.json                   what the server said of itself before it was used
    <run>/shards/                       the hidden states, a file a shard, and the receipts of their capture
    <run>/verified/                     what reading each shard again from the disk has shown
    <run>/manifest.json, samples.parquet
    <run>/exports/<trainer>/            the same for a trainer, where the configuration names some in `exports`
    report/                             statistics and marked samples of the tokens, for `snakemake --report`
    vocabulary/                         a drafter's vocabulary, where the configuration names `draft_vocab_size`

<run> is the model's name and the first 8 digits of the capture key. Rules are in the order of the data.
"""

from snakemake.utils import min_version

min_version("9.20")

# A configuration given on the command line stands alone: a key that it leaves out must not be the demo's.
if not workflow.overwrite_configfiles:

    configfile: "config.yaml"


include: "rules/common.smk"


# Only with `--software-deployment-method apptainer`; otherwise everything runs in the environment of Snakemake itself.
container: step_image()


onstart:
    hold_results()
    save_resolved(config)
    ask.start_run(config, in_containers=IN_CONTAINERS)
    say_each_minute(RESULTS, logger.info)


onsuccess:
    if PLAN.exists():
        shell("python scripts/accounting.py --plan {PLAN:q}")


rule all:
    input:
        final_files,


include: "rules/data.smk"
include: "rules/server.smk"
include: "rules/extract.smk"
include: "rules/verify.smk"
include: "rules/manifest.smk"
include: "rules/export.smk"
include: "rules/report.smk"

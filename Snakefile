"""Conversations to verified hidden states.

The workflow writes, below the folder that the key `results` names:

    answers/<source>/                   prompts and answers by the target model, where configured
    tokens/<source>.parquet, .json      tokens, loss masks and accounting of a source
    plan.json, tokens/shards/           the samples of each shard
    <capture>/server.json               versions, flags and self-test of the server
    <capture>/parity.json, parity.html  the server's self-test compared with the checkpoint
    <capture>/shards/                   hidden states, one file per shard, and their receipts
    <capture>/verified/                 the result of reading each shard from the disk
    <capture>/compact/                  with the key `storage`, the shards in place of <capture>/shards
    <capture>/manifest.json, samples.parquet
                                        the verified shards and their samples
    <capture>/exports/<trainer>/        the same for each trainer in the key `exports`
    report/index.html                   the report; `snakemake --report` contains it too
    report/tokens.html                  the report of tokens alone, by the target `tokens_report`
    vocabulary/                         a drafter's vocabulary, with the key `draft_vocab_size`

<capture> is the model's name and the first 8 digits of the capture key. The rules are in the order
of the data.
"""

import os

from snakemake.utils import min_version

min_version("9.20")

# A configuration given on the command line stands alone: the demo's keys are not mixed into it.
# Without one, the workflow reads the working directory's config.yaml, or else the demo's.
if not workflow.overwrite_configfiles:
    DEMO_CONFIG = f"{workflow.current_basedir}/config.yaml"

    configfile: "config.yaml" if os.path.exists("config.yaml") else DEMO_CONFIG


include: "rules/common.smk"


# The image counts only with `--software-deployment-method apptainer`. Otherwise all jobs run in the
# environment of Snakemake itself.
container: image_of_steps()


# the start page of `snakemake --report`
report: "rules/report/start.rst"


onstart:
    begin_run()


onsuccess:
    end_run()


onerror:
    say_failures()


# Snakemake calls the hooks of the main Snakefile alone.
if not workflow.modifier.is_main_snakefile():
    add_hook("_onstart", begin_run)
    add_hook("_onsuccess", end_run)
    add_hook("_onerror", say_failures)


rule all:
    input:
        kept_files(),
        final_files,


include: "rules/data.smk"
include: "rules/answers.smk"
include: "rules/server.smk"
include: "rules/parity.smk"


if CONFIG.storage.form is None:

    include: "rules/extract.smk"
    include: "rules/verify.smk"

else:

    include: "rules/compact.smk"


include: "rules/manifest.smk"
include: "rules/export.smk"
include: "rules/report.smk"

"""What all rules share: the checked configuration, names, input functions."""

import functools
import json
import os
import time
from pathlib import Path

from draftstates import workflow as ask
from draftstates.config import check_model, check_results, resolve, save_resolved
from draftstates.errors import UserError
from draftstates.forecast import forecast
from draftstates.plan_file import read_plan
from draftstates.progress import say_each_minute
from draftstates.tokens.template_file import read_template
from snakemake.exceptions import WorkflowError
from snakemake.logging import logger

try:
    config = resolve(config, origin=" ".join(map(str, workflow.overwrite_configfiles)) or "config.yaml")
    check_results(config)
    check_model(config)
    CHAT_TEMPLATE = read_template(Path(config["data"]["chat_template"])) if config["data"]["chat_template"] else None
except UserError as error:
    raise WorkflowError(str(error)) from None

IN_CONTAINERS = any(method.name == "APPTAINER" for method in workflow.deployment_settings.deployment_method)
ask.export_environment(config, in_containers=IN_CONTAINERS)

STARTED = time.time_ns()

RESULTS = Path(config["results"])
LOGS = RESULTS / "logs"
BENCHMARKS = RESULTS / "benchmarks"
PLAN = RESULTS / "plan.json"
RUN = RESULTS / "{run}"
SHARD = RUN / "shards" / "{shard_id}"
SHARD_TOKENS = RESULTS / "tokens" / "shards"
REPORT = RESULTS / "report"
MODEL = Path(config["model"]["path"])
SOURCES = {source["name"]: source for source in config["data"]["sources"]}


wildcard_constraints:
    source="|".join(map(re.escape, SOURCES)),
    run=ask.ANY_RUN,
    shard_id="[0-9a-f]{32}",


def step_image():
    try:
        return ask.step_image(config, apptainer=IN_CONTAINERS, code=Path(workflow.basedir))
    except UserError as error:
        raise WorkflowError(str(error)) from None


def hold_results():
    """Before anything is written there, plan.json above all."""
    try:
        ask.hold_results(RESULTS)
    except (UserError, OSError) as error:
        raise WorkflowError(str(error)) from None


def source_files(wildcards):
    return SOURCES[wildcards.source]["files"]


def tokenise_options(wildcards):
    """What decides a source's tokens, of the configuration: as text in a fixed order, so that reordered keys change nothing."""
    options = {**config["data"], "sources": SOURCES[wildcards.source], "trust_remote_code": config["model"]["trust_remote_code"]}
    options["chat_template"] = CHAT_TEMPLATE
    return json.dumps(options, sort_keys=True)


def data_digest(wildcards):
    return ask.data_digest(source_files(wildcards))


def tokenizer_digest(wildcards):
    return ask.tokenizer_digest(MODEL)


def model_digest(wildcards):
    return ask.model_digest(MODEL)


@functools.lru_cache(maxsize=1)
def plan_as_of(modified):
    try:
        plan = read_plan(PLAN)
    except UserError as error:
        raise WorkflowError(str(error)) from None
    if modified > STARTED and workflow.is_main_process:
        logger.info(forecast(plan, config["extract"]["tokens_per_second"]))
    return {"run": plan["run"], "shards": plan["shards"]}


def planned():
    """The plan, once its checkpoint has been reached in this run."""
    return plan_as_of(os.stat(checkpoints.plan.get().output.plan).st_mtime_ns)


def in_run(pattern):
    """The files of all planned shards that `pattern` names."""
    plan = planned()
    return [str(pattern).format(run=plan["run"], shard_id=shard["shard_id"]) for shard in plan["shards"]]


def verified_files(wildcards):
    return in_run(RUN / "verified" / "{shard_id}.json")


def final_files(wildcards):
    """All that a run promises. The shards too, or nobody would notice that one behind a present manifest is gone."""
    folder = RESULTS / planned()["run"]
    shards = in_run(f"{SHARD}.safetensors")
    exports = [folder / "exports" / trainer / "export.json" for trainer in config["exports"]]
    manifest = [folder / "manifest.json", folder / "samples.parquet"]
    return [*manifest, *shards, *verified_files(wildcards), *exports, *report_files(wildcards)]


def report_files(wildcards):
    """What follows from tokens alone."""
    size = config["draft_vocab_size"]
    vocabulary = [RESULTS / "vocabulary" / ask.vocabulary_name(planned(), MODEL, size)] if size else []
    return [REPORT / "statistics.html", REPORT / "samples.html", *vocabulary]


def tokens_per_second_option(wildcards):
    rate = config["extract"]["tokens_per_second"]
    return f"--tokens-per-second {rate}" if rate else ""


def export_options(wildcards):
    return ask.export_options(config, wildcards.trainer)


def shard_tokens(wildcards):
    """A shard's tokens: the plan writes them beside its declared output, so nothing but the plan can bring them back."""
    path = SHARD_TOKENS / f"{wildcards.shard_id}.parquet"
    if PLAN.exists() and not path.exists():
        raise WorkflowError(f"{path} is gone and shard {wildcards.shard_id} is still to be captured: run again with --forcerun plan")
    return path

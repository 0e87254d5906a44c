"""Parts that all rules share: the checked configuration, names, input functions."""

import functools
import json
import os
import shlex
import time
from pathlib import Path

from draftstates import workflow as ask
from draftstates.answers.key import answers_folder
from draftstates.config import check_results, resolve, save_resolved
from draftstates.errors import UserError
from draftstates.model.context import server_context
from draftstates.model.folder import check_model
from draftstates.paths import Results
from draftstates.plan.room import forecast
from draftstates.records import Plan, Prompts
from draftstates.report.failures import FailedJobs, WithoutPlaces, summary
from draftstates.report.terminal import JobsInWork, Watch, quieten, say_each_minute
from draftstates.tokens.sources import check_files, data_files, read_template
from snakemake.exceptions import WorkflowError
from snakemake.logging import logger

try:
    CONFIG = resolve(
        config, origin=" ".join(map(str, workflow.overwrite_configfiles)) or "config.yaml"
    )
    # With --snakefile and in a module, this folder is not the working directory.
    WORKFLOW = ask.code_folder(Path(str(workflow.current_basedir)).parent)
    check_results(CONFIG.results)
    check_model(CONFIG)
    DATA_FILES = {source.name: data_files(CONFIG, source.name) for source in CONFIG.data.sources}
    CHAT_TEMPLATE = read_template(CONFIG.data.chat_template) if CONFIG.data.chat_template else None
except UserError as error:
    raise WorkflowError(str(error)) from None

IN_CONTAINERS = any(
    method.name == "APPTAINER" for method in workflow.deployment_settings.deployment_method
)
ask.export_environment(CONFIG, code=WORKFLOW, in_containers=IN_CONTAINERS)

STARTED = time.time_ns()

FAILED_JOBS, JOBS = FailedJobs(), JobsInWork()
# the terminals whose last line says how the run gets on
LIVE = []
if workflow.is_main_process:
    logger.addHandler(FAILED_JOBS)
    logger.addHandler(JOBS)
    logger.addFilter(WithoutPlaces())

RESULTS = Results(CONFIG.results)
CAPTURE = RESULTS.capture("{capture}")
MODEL = CONFIG.model.path
DEMO_DATA = Path("examples", "conversations.jsonl")
# The name of the form in which shards stay on the disk; None for as captured.
FORM = CONFIG.storage.form
FORM_OPTION = f"--form {FORM}" if FORM else ""
SOURCES = {source.name: source for source in CONFIG.data.sources}
ANSWERED = sorted(name for name, source in SOURCES.items() if source.answers)

if workflow.is_main_process:
    try:
        ask.check_exports_early(CONFIG)
        ask.check_engine_arguments(CONFIG)
        ask.check_times(
            [
                *(path for paths in DATA_FILES.values() for path in paths),
                MODEL / "config.json",
            ],
            results=CONFIG.results,
        )
        ask.unlock_incomplete(CONFIG.results)
    except UserError as error:
        raise WorkflowError(str(error)) from None


wildcard_constraints:
    source="|".join(map(re.escape, SOURCES)),
    capture=ask.ANY_CAPTURE,
    shard_id="[0-9a-f]{32}",


def image_of_steps():
    try:
        return ask.step_image(CONFIG, apptainer=IN_CONTAINERS, code=WORKFLOW)
    except UserError as error:
        raise WorkflowError(str(error)) from None


def begin_run():
    """Lock the results folder before a job writes to it; make the folder of the run's servers."""
    ask.heed_term(workflow.scheduler)
    ask.retry_what_may_pass(workflow.scheduler)
    try:
        ask.hold_results(RESULTS.root)
        save_resolved(CONFIG)
        servers = ask.begin_servers(CONFIG, in_containers=IN_CONTAINERS)
    except UserError as error:
        raise WorkflowError(str(error)) from None
    except OSError as error:
        raise WorkflowError(
            f"{error.filename or RESULTS.root}: {error.strerror}; make the results folder"
            " writable and make room in it, or name another one in `results`"
        ) from None
    if not wants_all_output():
        rewrite = workflow.local_exec and not workflow.output_settings.quiet
        LIVE.extend(quieten(logger.handlers, rewrite=rewrite))
        logger.info("all output of the jobs: --printshellcmds, or the log below .snakemake/log")
    say_each_minute(Watch(RESULTS.root, servers, JOBS), logger, LIVE)


def wants_all_output():
    """Return whether the terminal shows every job: with -p, --verbose, or for the tests."""
    settings = workflow.output_settings
    everything = os.environ.get("DRAFTSTATES_OUTPUT") == "full"
    return settings.printshellcmds or settings.verbose or everything


def end_run():
    """Print the accounting, what parity did not compare, and the path of each new report."""
    end_live()
    if RESULTS.plan.exists():
        shell("python -m draftstates.commands.cli accounting --results {RESULTS.root:q}")
    for line in ask.parity_warnings(RESULTS.root):
        logger.warning(line)
    for page in (RESULTS.tokens_page, RESULTS.report_page):
        if page.exists() and page.stat().st_mtime_ns > STARTED:
            logger.info(f"report: {page}")


def end_live():
    for live in LIVE:
        live.end()


def add_hook(name, hook):
    """Have the main Snakefile's hook of this name call another one first."""
    others = getattr(workflow, name)

    def both(log):
        hook()
        others(log)

    setattr(workflow, name, both)


def named_files():
    """Return the data files that the configuration names."""
    return [path for paths in DATA_FILES.values() for path in paths]


def say_failures():
    """Repeat the errors of the failed jobs at the end of the run, where they are seen."""
    end_live()
    if failed := FAILED_JOBS.failed():
        logger.error(summary(failed, rules=[rule.name for rule in workflow.rules]))


def source_files(wildcards):
    """
    Return the files of a source.

    A source that is not tokenised yet, or has no prompts yet, needs its files, or jobs that make
    them. Data may be removed after that.
    """
    is_answered = wildcards.source in ANSWERED
    first = RESULTS.prompts if is_answered else RESULTS.tokens
    if not first(wildcards.source).exists():
        try:
            check_files(CONFIG, wildcards.source, made=is_made)
        except UserError as error:
            raise WorkflowError(str(error)) from None
    return DATA_FILES[wildcards.source]


def rows_of_source(wildcards):
    """Return the files whose rows are tokenised: the source's own, or prompts and answers."""
    if wildcards.source not in ANSWERED:
        return source_files(wildcards)
    return [RESULTS.prompts(wildcards.source), *answers_to(wildcards.source)]


def answers_to(source):
    """Return the files of the answers to a source's prompts, once the prompts are known."""
    chunks = checkpoints.prompts.get(source=source).output.chunks
    try:
        found = Prompts.read(Path(chunks)).chunks
    except UserError as error:
        raise WorkflowError(str(error)) from None
    return [answers_in(source) / f"{chunk.chunk_id}.parquet" for chunk in found]


def all_answers(wildcards):
    return [path for source in ANSWERED for path in answers_to(source)]


def prompt_options(wildcards):
    """Return the part of the configuration that decides a source's prompts."""
    options = json.loads(tokenise_options(wildcards))
    answers = SOURCES[wildcards.source].answers
    options["sources"]["answers"] = [answers.turns, answers.chunk]
    return json.dumps(options, sort_keys=True)


def is_made(path):
    """Return whether a rule of this workflow, or of one that uses it, makes a file."""
    return any(rule.is_producer(str(path)) for rule in workflow.rules)


def context_tokens(wildcards):
    return server_context(CONFIG)


def hub_options(wildcards):
    hub = SOURCES[wildcards.source].hub
    return hub.as_text() if hub else None


def tokenise_options(wildcards):
    """
    Return the part of the configuration that decides a source's tokens.

    The text has a fixed order, so that reordered keys change nothing.
    """
    options = {**CONFIG.data.plain(), "sources": SOURCES[wildcards.source].plain()}
    options["trust_remote_code"] = CONFIG.model.trust_remote_code
    options["chat_template"] = CHAT_TEMPLATE
    return json.dumps(options, sort_keys=True)


def digest_of_data(wildcards):
    return ask.data_digest(source_files(wildcards))


def digest_of_rows(wildcards):
    """Return the digest of a source's files; answers have a folder that says what they are."""
    return "" if wildcards.source in ANSWERED else digest_of_data(wildcards)


def answered_option(wildcards):
    """Return the argument that names the folder of a source's answers, if it has some."""
    if wildcards.source not in ANSWERED:
        return ""
    if not (MODEL / "config.json").exists():
        # Snakemake asks a second time before the job.
        return "not there"
    return f"--answered {shlex.quote(str(answers_in(wildcards.source)))}"


def answers_in(source):
    try:
        return RESULTS.answers(source, answers_folder(CONFIG, source))
    except UserError as error:
        raise WorkflowError(str(error)) from None


def has_its_tokens(wildcards):
    """Return whether a plan that exists has the tokens that it was made of.

    Snakemake removes the tokens of a job that fails, and does not miss them: the plan is newer than
    all that is left.
    """
    of_source = (RESULTS.tokens, RESULTS.accounting)
    there = all(path(source).exists() for source in SOURCES for path in of_source)
    return there or not RESULTS.plan.exists()


def digest_of_tokenizer(wildcards):
    return ask.present_tokenizer_digest(MODEL)


def digest_of_model(wildcards):
    return ask.present_model_digest(MODEL)


@functools.lru_cache(maxsize=1)
def plan_as_of(modified):
    try:
        plan = Plan.read(RESULTS.plan)
    except UserError as error:
        raise WorkflowError(str(error)) from None
    if modified > STARTED and workflow.is_main_process:
        logger.info(forecast(plan, CONFIG.extract.tokens_per_second))
    return plan


def planned():
    """Return the plan; wait until this run has reached its checkpoint."""
    return plan_as_of(os.stat(checkpoints.plan.get().output.plan).st_mtime_ns)


def planned_capture():
    """Return the capture folder of the plan."""
    return RESULTS.capture(planned().capture_folder)


def planned_shards(path):
    """Return the file of each planned shard that `path`, a method of the capture folder, names."""
    return [path(shard.shard_id) for shard in planned().shards]


def verified_files(wildcards):
    """Return the file that vouches for each planned shard: its verification, or its record."""
    capture = planned_capture()
    return planned_shards(capture.verified if FORM is None else in_form(capture.stored))


def compact_files(wildcards):
    """Return the compact form of each planned shard: nothing verifies one that changes later."""
    return [] if FORM is None else planned_shards(in_form(planned_capture().compact))


def is_vouched_for(wildcards):
    """Return whether receipts and verification of a shard lie beside its compact form."""
    capture = RESULTS.capture(wildcards.capture)
    record = capture.stored(wildcards.shard_id, FORM)
    return not record.exists() or wildcards.shard_id in capture.stored_ids(FORM)


def in_form(path):
    """Return a method of the capture folder with the configured form as its second argument."""
    return functools.partial(path, form=FORM)


# From this many seconds on, extraction does not wait for parity.
PARITY_SECONDS = 120


@functools.lru_cache(maxsize=1)
def parity_comes_first():
    """
    Return whether extraction waits for parity: it does where that takes less than two minutes.

    The plan exists when Snakemake asks, and with it the model.
    """
    return ask.parity_seconds(CONFIG) < PARITY_SECONDS


def parity_first(wildcards):
    """Return what extraction waits for, besides the server."""
    if not parity_comes_first():
        return []
    return RESULTS.capture(wildcards.capture).parity


def parity_threads(wildcards):
    """Return the cores of parity: all where the extraction waits, else half of them."""
    return 1024 if parity_comes_first() else max(1, (workflow.cores or 8) // 2)


def hold_option(wildcards):
    return "--hold-server" if parity_comes_first() else ""


def kept_files():
    """
    Return what a run makes before its checkpoint and keeps.

    Snakemake removes the outputs of a job that fails. The files that earlier jobs made of these
    outputs are newer than all remaining inputs, so only a target asks for such an output in the
    next run. Therefore the outputs of every rule are targets.
    """
    made = [MODEL / "config.json"] if CONFIG.model.prepare != "none" else []
    records = [RESULTS.hub_record(name) for name, source in SOURCES.items() if source.hub]
    asked = [path(name) for name in ANSWERED for path in (RESULTS.prompts, RESULTS.prompt_chunks)]
    tokens = [RESULTS.tokens("{source}"), RESULTS.accounting("{source}")]
    return [*made, *records, *asked, *expand(tokens, source=sorted(SOURCES))]


def final_files(wildcards):
    """
    Return all files that a run promises.

    The shards are among them: otherwise nobody would notice a missing shard of a present manifest.
    """
    capture = planned_capture()
    shards = planned_shards(capture.shard if FORM is None else in_form(capture.compact))
    return [
        capture.parity_page,
        *shards,
        *verified_files(wildcards),
        *captured_files(wildcards),
        *vocabulary_files(wildcards),
        RESULTS.report_page,
    ]


def captured_files(wildcards):
    """Return the manifest, and the exports that are made of it."""
    capture = planned_capture()
    exports = [capture.export(trainer) for trainer in CONFIG.exports]
    return [capture.manifest, capture.samples, *exports]


def vocabulary_files(wildcards):
    size = CONFIG.draft_vocab_size
    return [RESULTS.vocabulary(ask.vocabulary_name(planned(), MODEL, size))] if size else []


def page_options(wildcards):
    """Return the arguments that the two pages of the report share."""
    trust = ["--trust-remote-code"] if CONFIG.model.trust_remote_code else []
    size = CONFIG.draft_vocab_size
    return " ".join([*trust, *([f"--draft-vocab-size {size}"] if size else [])])


def tokens_per_second_option(wildcards):
    rate = CONFIG.extract.tokens_per_second
    return f"--tokens-per-second {rate}" if rate else ""


def export_arguments(wildcards):
    return ask.export_options(CONFIG, wildcards.trainer)


def shard_tokens(wildcards):
    """
    Return the file of a shard's tokens.

    The plan writes this file beside its declared output, so only the plan can make it.
    """
    path = RESULTS.shard_tokens(wildcards.shard_id)
    if RESULTS.plan.exists() and not path.exists():
        raise WorkflowError(
            f"{path} is gone and shard {wildcards.shard_id} is still to be captured:"
            " run again with --forcerun plan"
        )
    return path


@functools.lru_cache(maxsize=1)
def answered_shards():
    return frozenset(shard.shard_id for shard in planned().shards if shard.answered)


def sampled_tokens(wildcards):
    """Return the file that holds what the server that answered said of a shard, if one did."""
    return shard_tokens(wildcards) if wildcards.shard_id in answered_shards() else []


def sampled_option(wildcards):
    tokens = sampled_tokens(wildcards)
    return f"--tokens {shlex.quote(str(tokens))}" if tokens else ""


def answers_limit(wildcards):
    """Return the limit of a shard's answers, so that another limit verifies the shard again."""
    return CONFIG.checks.answers if wildcards.shard_id in answered_shards() else None

"""Functions for the workflow's rules.

They name the sources that decide a rule's result and the shards that exist, and set the environment
of the rules' commands. Every function is cheap, since Snakemake parses its files in every job on a
cluster.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from draftstates.config import WITH_DRAFT_VOCABULARY, Configuration
from draftstates.containers import check_image, scratch, step_environment
from draftstates.errors import NO_SECOND_ATTEMPT, UserError
from draftstates.files import NO_LOCKS, files_digest, tail
from draftstates.model import digest as content
from draftstates.model.folder import ModelFolder
from draftstates.model.lengths import prompt_length
from draftstates.paths import Results
from draftstates.records import Parity, Plan
from draftstates.server.folder import RunFolder
from draftstates.server.run import RUN_FOLDER_VARIABLE, is_over, start_run

PACKAGE = Path(__file__).parent
_IMPORT = re.compile(r"^ *from (draftstates[\w.]*) import (\([^)]*|[^\n#]*)", re.MULTILINE)
# these modules carry a result, or refuse to make one, but do not decide its content
DECIDES_NOTHING = {
    "errors.py",
    "config.py",
    "config_problems.py",
    "config_types.py",
    "containers.py",
    "paths.py",
    "extract/staging.py",
}
# the clocks of a machine and of its file server may differ by this, and most jobs take longer
_CLOCK_SECONDS = 60.0
_MOST_TOUCHED = 8
ANY_CAPTURE = "[^/]+"
_NO_IMAGE = "envs/tools.sif"
# of parity on two cores: start, bytes and operations a second
_IMPORTS_SECONDS, _READ_RATE, _COMPUTE_RATE = 15.0, 120e6, 30e9
_ASSETS = (".css", ".html", ".js")


def source_digest(*folders: str) -> str:
    """Return a hash of the code that decides a rule's result.

    A rule that has it in `params` is stale when that code changes.

    Args:
        folders: folders of the package whose modules, and the files of web pages beside them, the
            rule uses.
    """
    modules = [PACKAGE / name for name in deciding_modules(*folders)]
    assets = [
        path
        for folder in folders
        for path in sorted((PACKAGE / folder).rglob("*"))
        if path.suffix in _ASSETS
    ]
    return files_digest([*modules, *assets], root=PACKAGE)[:16]


def deciding_modules(*folders: str) -> list[str]:
    """Return the modules of folders of the package, and all modules that these import.

    They are sorted paths relative to the package. Imports of `DECIDES_NOTHING` are left out.

    Raises:
        FileNotFoundError: a folder has no modules.
    """
    pending: set[str] = set()
    for folder in folders:
        modules = {
            path.relative_to(PACKAGE).as_posix() for path in (PACKAGE / folder).rglob("*.py")
        }
        if not modules:
            raise FileNotFoundError(f"{PACKAGE / folder}: expected a folder of modules")
        pending |= modules
    found: set[str] = set()
    while pending:
        name = pending.pop()
        found.add(name)
        pending |= _imports((PACKAGE / name).read_text(encoding="utf-8")) - found - DECIDES_NOTHING
    return sorted(found)


def _imports(source: str) -> set[str]:
    """Return the modules of the package that a module imports, at its top or within a function.

    They are paths relative to the package.
    """
    found = set()
    for place, names in _IMPORT.findall(source):
        parts = place.removeprefix("draftstates").removeprefix(".").split(".")
        paths = [
            "/".join(parts),
            *(
                "/".join([*filter(None, parts), name.split(" ")[0]])
                for name in re.split(r",\s*", names.strip("( \n"))
            ),
        ]
        found |= {f"{path}.py" for path in paths if (PACKAGE / f"{path}.py").is_file()}
    return found


def present_model_digest(folder: Path) -> str:
    """Return the digest of the model's content.

    It is `not there` until the rule that makes the model has run; Snakemake asks a second time
    before the job.
    """
    model = ModelFolder(folder)
    return content.model_digest(model) if model.exists() else "not there"


def present_tokenizer_digest(folder: Path) -> str:
    """Return a hash of the files that decide the tokens of a text.

    It is `not there` while the model is missing, as in `present_model_digest`.
    """
    model = ModelFolder(folder)
    return content.tokenizer_digest(model) if model.exists() else "not there"


def data_digest(names: Iterable[Path]) -> str:
    """Return a hash of the name, size and modification time of data files; no file is read.

    Every file in a folder counts. As a parameter of a rule the hash shows two changes that
    Snakemake's own comparison of times does not: a replaced file that is older than the outputs,
    and a changed file in a folder whose own time did not change. A missing file is no error: the
    rule that needs the file refuses.
    """
    digest = hashlib.sha256()
    for name in names:
        for path in _files_of(name):
            try:
                found = os.stat(path)
                state = f"{found.st_size} {found.st_mtime_ns}"
            except OSError:
                state = "not there"
            digest.update(os.fsencode(path) + f"\0{state}\0".encode())
    return digest.hexdigest()[:16]


def _files_of(name: Path) -> Iterator[str]:
    if not os.path.isdir(name):
        yield str(name)
    for folder, folders, files in os.walk(name):
        folders.sort()
        yield from (os.path.join(folder, file) for file in sorted(files))


def check_times(names: Iterable[str | Path], *, results: Path, now: float | None = None) -> None:
    """Refuse files that are dated in the future, before anything starts.

    Snakemake fails every job that reads such a file, since the job's outputs would be older. It
    takes such an output for up to date even when its inputs change.

    Args:
        names: files and folders that the run reads, such as the data; missing ones are left out.
        results: the results folder; all its files that are inputs or outputs are checked.
        now: present time in seconds since 1970; None for the clock's time.

    Raises:
        UserError: a file is dated in the future; the message names the first file, its time, the
            present time and the command that corrects it.
    """
    now = time.time() if now is None else now
    ahead: dict[str, float] = {}
    for path in [*map(str, names), *map(str, Results(results).made_by_rules())]:
        with contextlib.suppress(OSError):
            modified = os.stat(path).st_mtime
            if modified > now + _CLOCK_SECONDS:
                ahead[path] = modified
    if not ahead:
        return
    first, modified = next(iter(ahead.items()))
    more = f" ({len(ahead) - 1} more files too)" if len(ahead) > 1 else ""
    raise UserError(
        f"{first}: expected a modification time that is not in the future, found"
        f" {_local(modified)}, now it is {_local(now)}{more}; run: {_touch(list(ahead), results)}"
    )


def _local(seconds: float) -> str:
    return time.strftime("%F %T", time.localtime(seconds))


def _touch(paths: list[str], results: Path) -> str:
    """Return the command that sets the modification time of files to the present time."""
    if len(paths) <= _MOST_TOUCHED:
        return shlex.join(["touch", *paths])
    elsewhere = [path for path in paths if not Path(path).is_relative_to(results)]
    command = ["find", *elsewhere, str(results), "-newermt", "now", "-exec", "touch", "{}", "+"]
    return shlex.join(command)


def check_exports_early(config: Configuration) -> None:
    """Refuse exports that the configured capture does not allow, before anything runs.

    The import of torch takes seconds, so it happens only if exports are configured. A model that a
    rule still has to make is compared by the plan.

    Raises:
        UserError: names the export, what was expected and what was found.
    """
    model = ModelFolder(config.model.path)
    if (config.exports or config.draft_vocab_size) and model.exists():
        from draftstates.exports import configured

        configured.check_exports(config, spec=content.configured_capture(config))


def check_engine_arguments(config: Configuration, *, cache: Path | None = None) -> None:
    """Refuse arguments that SGLang's own parser refuses, before anything runs.

    SGLang's import takes seconds, so arguments that were accepted once are not asked for again.
    Where the server is in an image, or this Python has no SGLang, the server itself refuses.

    Args:
        cache: folder of empty files, one for each accepted list of arguments; None for the user's.

    Raises:
        UserError: names the argument and what SGLang says of it.
    """
    asked = list(config.model.engine_args)
    if config.server.launcher != "external":
        asked += config.server.args
    if not asked or config.containers.sglang or importlib.util.find_spec("sglang") is None:
        return
    version = importlib.metadata.version("sglang")
    cache = cache or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "draftstates", "arguments"
    )
    accepted = cache / hashlib.sha256("\0".join([version, *asked]).encode()).hexdigest()[:32]
    if accepted.exists():
        return
    command = [sys.executable, "-m", "draftstates.capture.arguments", *asked]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().rpartition("error: ")[2] or f"status {done.returncode}"
        raise UserError(
            f"server.args, model.engine_args: SGLang {version} refuses {shlex.join(asked)}:"
            f" {reason}"
        )
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        accepted.touch()


def vocabulary_name(plan: Plan, model: Path, draft_size: int) -> str:
    """Return the name of the folder of a plan's vocabulary.

    It is a hash of the vocabulary's inputs: another plan, model or size gives another name.
    """
    # this import loads numpy, which most jobs do not need
    from draftstates.exports.vocabulary import vocabulary_key

    size = ModelFolder(model).vocab_size
    return vocabulary_key(plan, draft_size=draft_size, target_size=size)


def export_options(config: Configuration, trainer: str) -> str:
    """Return the arguments of `draftstates export` for one trainer, quoted for a shell.

    A trainer that the configuration does not name gets no arguments but the vocabulary's size.
    """
    chosen = dict(config.exports.get(trainer, {}))
    if layers := chosen.pop("residual_layers", None):
        chosen["layers"] = ",".join(map(str, layers))
    if trainer in WITH_DRAFT_VOCABULARY:
        chosen["draft_vocab_size"] = config.draft_vocab_size
    flags = [
        (f"--{name.replace('_', '-')}", str(value))
        for name, value in sorted(chosen.items())
        if value is not None
    ]
    return shlex.join(part for flag in flags for part in flag)


def captures_without_present_shards(results: Path, form: str | None = None) -> str:
    """Return a regular expression for the wildcard `capture` that excludes every complete shard.

    The captured states depend on capture key and shard id alone, and both are in the path. So no
    rule makes a shard whose files all exist, and no change of rule text, script, parameter, image
    or age captures it a second time. To capture it a second time, delete it.

    Args:
        form: name of the form in which shards stay on the disk; None for as captured.
    """
    present = sorted(
        re.escape(str(path.relative_to(results).with_suffix("")))
        for capture in Results(results).captures()
        for path in (
            map(capture.shard, capture.whole_shard_ids())
            if form is None
            else (capture.compact(shard_id, form) for shard_id in capture.stored_ids(form))
        )
    )
    return rf"(?!(?:{'|'.join(present)})\.){ANY_CAPTURE}" if present else ANY_CAPTURE


def without_present_answers(results: Path | None, sources: Iterable[str]) -> str:
    """Return a regular expression for the wildcard `source` that excludes every chunk with answers.

    The answers depend on the answers' key and the chunk alone, as the states of a shard do.

    Args:
        results: the results folder; None to exclude nothing.
        sources: names of the sources with answers.
    """
    names = "|".join(map(re.escape, sources))
    files = [] if results is None else sorted((results / "answers").glob("*/*/*.parquet"))
    present = "|".join(re.escape(str(file.relative_to(results / "answers"))) for file in files)
    return f"(?!(?:{present})$)(?:{names})" if present else names


def unlock_incomplete(results: Path) -> None:
    """Give the parts of shards that lack another part their write bit back.

    Published files have none, and Snakemake makes no file again that it cannot write.
    """
    for capture in Results(results).captures():
        for shard_id in capture.begun_shard_ids() - capture.whole_shard_ids():
            paths = (capture.shard(shard_id), capture.recaptures(shard_id))
            for path in (*paths, capture.receipts(shard_id)):
                # another user's file, or one that is gone
                with contextlib.suppress(OSError):
                    path.chmod(path.stat().st_mode | stat.S_IWUSR)


def captures_without_parity(results: Path, config: Configuration) -> str:
    """Return a regular expression for the wildcard `capture` that excludes captures whose parity
    is known: compared as the configuration asks, by the present code.

    So a server is in the graph only if a shard or the comparison is missing.
    """
    asked = parity_asked(config)
    present = [
        re.escape(capture.name)
        for capture in Results(results).captures()
        if capture.parity_page.exists() and _asked_of(capture.parity) == asked
    ]
    return rf"(?!(?:{'|'.join(present)})/){ANY_CAPTURE}" if present else ANY_CAPTURE


def parity_asked(config: Configuration) -> dict[str, str]:
    """Return what parity is asked for: the record's field `asked`.

    The code that compares is this package's and transformers', whose version is part of it. Where
    the step runs in a container, the version is that beside Snakemake, if any.
    """
    checks = config.checks
    reference = ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        reference = f"-transformers-{importlib.metadata.version('transformers')}"
    return {
        "tokens": str(checks.parity_tokens),
        "layers": "all" if checks.parity_layers is None else str(checks.parity_layers),
        "code": source_digest("verify/parity") + reference,
    }


def parity_warnings(results: Path) -> list[str]:
    """Return a line for the present plan's capture whose layers were not all compared."""
    found = Results(results)
    try:
        capture = found.capture(Plan.read(found.plan).capture.folder_name)
        parity = Parity.read(capture.parity)
    # The plan or the comparison is still missing, or its own rule says what is wrong with it.
    except UserError:
        return []
    if parity.is_whole:
        return []
    return [f"parity: {parity.result}: the other layers were not compared with the checkpoint"]


def _asked_of(path: Path) -> object:
    """Return what a result of parity was asked for; None for a file that cannot be read."""
    try:
        return json.loads(path.read_bytes())["asked"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def parity_seconds(config: Configuration) -> float:
    """Return about how long the comparison with the checkpoint takes on a small machine.

    It is a function of the model and the configuration alone, since every job of a run asks.
    """
    model, checks = ModelFolder(config.model.path), config.checks
    size = sum(file.stat().st_size for file in model.weight_files)
    size *= min(1.0, (checks.parity_layers or model.num_layers) / model.num_layers)
    tokens = prompt_length(model.text, most=checks.parity_tokens)
    # Two operations for each parameter of two bytes and each token.
    return _IMPORTS_SECONDS + size / _READ_RATE + size * tokens / _COMPUTE_RATE


def step_image(config: Configuration, *, apptainer: bool, code: Path) -> str:
    """Return the image of all steps.

    Where the steps run on the host, it is one name for all configurations, and no program opens it.

    Raises:
        UserError: a needed image, the server's included, is not named, missing, or out of date.
    """
    images = config.containers
    if images.sglang and config.server.launcher != "external":
        check_image("sglang", images.sglang, code)
    if not apptainer:
        return _NO_IMAGE
    if not images.tools:
        raise UserError(
            "containers.tools: missing: the steps are to run in containers; `make images` builds"
            " the image and says its name"
        )
    check_image("tools", images.tools, code)
    return str(images.tools)


def code_folder(workflow: Path) -> Path:
    """Return the workflow's folder.

    Args:
        workflow: folder of the Snakefile, as Snakemake names it.

    Raises:
        UserError: the folder has no `scripts/`, such as where the rules are read from a remote
            repository.
    """
    if not (workflow / "scripts").is_dir():
        raise UserError(
            f"{workflow}: expected the workflow's folder with scripts/, found none: clone the"
            " repository, and name the path of its Snakefile"
        )
    return workflow


def export_environment(config: Configuration, *, code: Path, in_containers: bool) -> None:
    """Set the environment of the rules' commands.

    Unlike a parameter, the environment is no rerun trigger: a moved workflow makes no file stale.

    - `PATH`: first the Python that runs Snakemake, so that `python` has the same packages.
    - `PYTHONPATH`: first the package that Snakemake has imported, so that no command imports
      another one.
    - `DRAFTSTATES_SCRIPTS`: folder of the rules' scripts.
    - `DRAFTSTATES_CONFIG`: file of the resolved configuration.
    - `DRAFTSTATES_MODEL`: folder of the model.
    - `DRAFTSTATES_DEVICE`: device of a server on this machine, only where the steps run in
      containers, which cannot see the device.
    - Apptainer's variables (see `step_environment`), only where the steps run in containers.

    Args:
        config: resolved configuration.
        code: folder of the workflow.
        in_containers: whether the steps run in containers.
    """
    _put_first("PATH", Path(sys.executable).parent, default=os.defpath)
    _put_first("PYTHONPATH", PACKAGE.parent)
    os.environ["DRAFTSTATES_SCRIPTS"] = str(code / "scripts")
    os.environ["DRAFTSTATES_CONFIG"] = str(config.resolved_path)
    os.environ["DRAFTSTATES_MODEL"] = str(config.model.path)
    if in_containers:
        # this import loads numpy, which takes time
        from draftstates.server.command import DEVICE_VARIABLE, on_gpu

        os.environ[DEVICE_VARIABLE] = "cuda" if on_gpu(config.server) else "cpu"
        os.environ.update(step_environment(config, code=code, work=Path.cwd()))


def _put_first(variable: str, folder: Path, *, default: str = "") -> None:
    """Put a folder at the beginning of a search path in the environment."""
    others = os.environ.get(variable, default).split(os.pathsep)
    folders = dict.fromkeys([str(folder), *filter(None, others)])
    os.environ[variable] = os.pathsep.join(folders)


def hold_results(results: Path) -> None:
    """Hold the results folder until this process ends.

    Without this, the jobs of two runs in different working directories would read one plan. On a
    file system without locks, no run holds the folder.

    Raises:
        UserError: another run holds it.
    """
    results.mkdir(parents=True, exist_ok=True)
    # the lock is never closed: the kernel drops it when the process ends
    lock = os.open(Results(results).lock, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        other = os.pread(lock, 4096, 0).decode(errors="replace").strip()
        raise UserError(
            f"{results}: another run works there ({other}): wait until it ends, or name another"
            " folder in `results`"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    os.ftruncate(lock, 0)
    os.pwrite(
        lock,
        f"process {os.getpid()} on {socket.gethostname()}, started in {Path.cwd()}\n".encode(),
        0,
    )


def begin_servers(config: Configuration, *, in_containers: bool) -> RunFolder:
    """Make the folder of this run's servers, which end with this process.

    Where this process is itself part of a run that is not over, the servers are those of that run.
    The servers are started on request, outside of all steps, which may run in containers or on
    other nodes.
    """
    if in_containers:
        scratch(config).mkdir(parents=True, exist_ok=True, mode=0o700)
    present = os.environ.get(RUN_FOLDER_VARIABLE)
    if present and not is_over(RunFolder(Path(present))):
        return RunFolder(Path(present))
    return start_run(config.state_folder)


def heed_term(scheduler: Any) -> None:
    """Have TERM end Snakemake also while it decides about thousands of ready jobs.

    Snakemake's own handler takes the scheduler's lock in the main thread. If that thread holds the
    lock already, as it does for much of the time with thousands of ready jobs, it waits for itself
    for ever.

    Args:
        scheduler: Snakemake's `JobScheduler`.
    """

    def terminate(*_: object) -> None:
        threading.Thread(target=scheduler.exit_gracefully).start()

    signal.signal(signal.SIGTERM, terminate)


def retry_what_may_pass(scheduler: Any) -> None:
    """Have Snakemake make no second attempt of a job whose log says that it would end as the first.

    A profile's retries are for nodes that fail and jobs that are preempted.

    Args:
        scheduler: Snakemake's `JobScheduler`.
    """
    handle = scheduler._handle_error

    def handle_error(job: Any, **options: Any) -> None:
        # a group of jobs has no log of its own
        if any(NO_SECOND_ATTEMPT in tail(Path(log)) for log in getattr(job, "log", ())):
            job.attempt = job.restart_times + 1
        handle(job, **options)

    scheduler._handle_error = handle_error

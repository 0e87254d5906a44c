"""What the workflow's rules ask: which sources decide a rule's result, which shards are there, and the environment of its commands.

Everything here is cheap: Snakemake parses its files again for every job on a cluster.
"""

import errno
import fcntl
import hashlib
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from draftstates.config import resolved_path, state_folder
from draftstates.containers import check_image, files_digest, scratch, step_environment
from draftstates.errors import UserError
from draftstates.server.processes import adopt_ownership, owner
from draftstates.server.slurm import run as slurm
from draftstates.server.starter import launch_starter
from draftstates.server.state import State

PACKAGE = Path(__file__).parent
SHARD_PARTS = (".safetensors", ".probe.safetensors", ".receipts.json")
ANY_RUN = "[^/]+"
_WITH_VOCABULARY = ("speculators", "specforge")  # the others draft with the model's own, or make theirs
_NO_IMAGE = "envs/tools.sif"
_TOKENIZER_FILES = ("tokenizer*", "*.jinja", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model", "*.py")
_TOKENIZER_FILES += ("*.tiktoken", "additional_chat_templates/*.jinja")
_TOKENIZER_FILES += ("config.json", "generation_config.json")  # they name end tokens, which are targets, and the tokenizer's class


def source_digest(*parts: str) -> str:
    """Hash of the package's source files that decide a rule's result: a rule with it in `params` is stale when they change.

    Args:
        parts: modules or folders of modules, relative to the package, such as `ids.py` or `tokens`.
    """
    paths = [PACKAGE / part for part in parts]
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    return files_digest(files, root=PACKAGE)[:16]


def model_digest(folder: Path) -> str:
    """The model's content; `not there` until the rule that makes it has run (Snakemake asks again before the job)."""
    if not (folder / "config.json").exists():
        return "not there"
    from draftstates import model  # most jobs never ask

    return model.digest(folder)


def tokenizer_digest(folder: Path) -> str:
    """Hash of the files that decide what text becomes which tokens; like `model_digest` where there is no model yet."""
    if not (folder / "config.json").exists():
        return "not there"
    return files_digest(sorted({file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern)}), root=folder)[:16]


def data_digest(names: Iterable[str]) -> str:
    """Hash of the name, size and modification time of data files, and of every file in folders among them; none is read.

    As a parameter it shows what Snakemake's own look at times does not: a file that is older than the outputs and yet not the one that
    they were made of, and a file in a folder whose own time stayed. What is not there is left to the rule that needs it.
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


def _files_of(name: str) -> Iterator[str]:
    if not os.path.isdir(name):
        yield name
    for folder, folders, files in os.walk(name):
        folders.sort()
        yield from (os.path.join(folder, file) for file in sorted(files))


def vocabulary_name(plan: Mapping[str, Any], model: Path, draft_size: int) -> str:
    """Name of the folder of a plan's vocabulary: of its content, so that another plan, model or size gives another."""
    from draftstates import vocab  # numpy, which most jobs never need

    return vocab.vocabulary_key(plan, draft_size=draft_size, target_size=vocab.model_vocab_size(model))


def export_options(config: Mapping[str, Any], trainer: str) -> str:
    """Arguments of `scripts/export.py` for one trainer, quoted for a shell; few for one that the configuration does not name."""
    chosen = dict(config["exports"].get(trainer, {}))
    if layers := chosen.pop("residual_layers", None):
        chosen["layers"] = ",".join(map(str, layers))
    if trainer in _WITH_VOCABULARY:
        chosen["draft_vocab_size"] = config["draft_vocab_size"]
    flags = [(f"--{name.replace('_', '-')}", str(value)) for name, value in sorted(chosen.items()) if value is not None]
    return shlex.join(part for flag in flags for part in flag)


def runs_without_present_shards(results: Path) -> str:
    """Regular expression for the wildcard `run` that refuses every shard whose files are all there.

    What is captured depends on capture key and shard id alone, and both are in the path. So no rule makes a shard that is
    there, and no change of rule text, script, parameter, image or age can have it made again; deleting it does.
    """
    present = sorted(re.escape(f"{run}/shards/{name}") for run, name in _present_shards(results))
    return rf"(?!(?:{'|'.join(present)})\.){ANY_RUN}" if present else ANY_RUN


def _present_shards(results: Path) -> Iterable[tuple[str, str]]:
    for folder in results.glob("*/shards"):
        if folder.parent.name == "tokens":
            continue
        names = set(os.listdir(folder))
        for name in names:
            stem = name.removesuffix(SHARD_PARTS[0])
            if stem != name and all(stem + part in names for part in SHARD_PARTS):
                yield folder.parent.name, stem


def step_image(config: dict[str, Any], *, apptainer: bool, code: Path) -> str:
    """Image of all steps; where they run on the host, one name for all configurations, which nothing opens.

    Raises:
        UserError: an image that is to be used, the server's included, is not named, not there, or out of date.
    """
    images = config["containers"]
    if images["sglang"] and config["server"]["launcher"] != "external":
        check_image("sglang", images["sglang"], code)
    if not apptainer:
        return _NO_IMAGE
    if not images["tools"]:
        raise UserError("containers.tools: missing: the steps are to run in containers; `make images` builds the image and says its name")
    check_image("tools", images["tools"], code)
    return images["tools"]


def export_environment(config: dict[str, Any], *, in_containers: bool) -> None:
    """Set what the rules' commands find in their environment. It is no trigger, unlike parameters.

    - `PATH`: the Python that runs Snakemake first, so that `python` has the package;
    - `DRAFTSTATES_CONFIG`: file of the resolved configuration; `DRAFTSTATES_MODEL`: folder of the model;
    - `DRAFTSTATES_OWNER`: this process, unless it is part of a run itself: the server ends with it;
    - where the steps are in containers, which cannot see it: `DRAFTSTATES_DEVICE`, what a server here computes on; and what Apptainer
      is to show them.
    """
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    os.environ["DRAFTSTATES_CONFIG"] = str(resolved_path(config))
    os.environ["DRAFTSTATES_MODEL"] = config["model"]["path"]
    adopt_ownership()
    if in_containers:
        from draftstates.server.command import DEVICE_VARIABLE, on_gpu  # it imports numpy, which takes a moment

        os.environ[DEVICE_VARIABLE] = "cuda" if on_gpu(config["server"]) else "cpu"
        os.environ.update(step_environment(config, Path.cwd()))


def hold_results(results: Path) -> None:
    """Hold the results folder until this process ends: jobs of two runs, each in a working directory of its own, would read one plan.

    A file system without locks is held by nobody.

    Raises:
        UserError: another run holds it.
    """
    results.mkdir(parents=True, exist_ok=True)
    lock = os.open(results / ".run.lock", os.O_RDWR | os.O_CREAT, 0o666)  # never closed: the kernel drops the lock with the process
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        other = os.pread(lock, 4096, 0).decode(errors="replace").strip()
        raise UserError(f"{results}: another run works there ({other}): wait until it ends, or name another folder in `results`") from None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}, started in {Path.cwd()}\n".encode(), 0)


def start_run(config: dict[str, Any], *, in_containers: bool) -> None:
    """Start what has to be outside of all steps, and ends with this process.

    Where the servers are Slurm jobs, the process that submits them when asked; where containers cannot start them, the one that does.
    """
    if config["server"]["launcher"] == "slurm":
        slurm.start_run(state_folder(config), owner=owner())
    if in_containers:
        scratch(config).mkdir(parents=True, exist_ok=True, mode=0o700)
        if config["server"]["launcher"] == "local":
            launch_starter(State(state_folder(config)), owner=owner())

"""Comparison of this machine with a configuration: what will be the limit, and for how long."""

import dataclasses
import math
from typing import Literal

from draftstates.config import Configuration
from draftstates.errors import UserError
from draftstates.model.folder import ModelFolder
from draftstates.model.layers import chosen_layers
from draftstates.paths import Results
from draftstates.plan.words import of_bytes, of_count, of_seconds
from draftstates.records import Plan
from draftstates.report.machine import PACKAGES, Machine
from draftstates.server.command import on_gpu
from draftstates.spec import CaptureSpec

Verdict = Literal["enough", "short", "unknown"]
# the oldest driver for each version of CUDA that torch is built for
_DRIVERS = {11: 450, 12: 525, 13: 580}
_OPEN_FILES = 4096
_OLDEST_APPTAINER = (1, 2)
# SGLang leaves at least so much of a GPU to other things than weights
_SHARE_FOR_WEIGHTS = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a configuration asks for.

    Attributes:
        spec: the capture, without the digest of the model.
        weight_bytes: bytes of the model's weights on the disk.
        tokens: tokens still to capture; None before the plan.
        bytes: bytes still to write; None before the plan.
    """

    spec: CaptureSpec
    weight_bytes: int
    tokens: int | None
    bytes: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One resource: what was found, what is needed, and what to do where that is short."""

    name: str
    verdict: Verdict
    found: str
    needed: str
    change: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """What limits the capture, in a sentence, and its seconds; None where they are unknown."""

    limit: str
    seconds: float | None


# ---- What the configuration asks for -------------------------------------------------------------


def asked(config: Configuration) -> Work:
    """Return what a configuration asks for; a plan of the same capture says how much is left.

    Raises:
        UserError: the model's folder holds no configuration of a model.
    """
    model, options = ModelFolder(config.model.path), config.capture
    spec = CaptureSpec(
        model=str(config.model.name),
        model_digest="",
        compute_dtype=options.compute_dtype,
        quantization=model.quantization,
        stored_dtype=options.stored_dtype,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        residual_layers=chosen_layers(options.residual_layers, num_layers=model.num_layers),
        final_norm=options.final_norm,
    )
    tokens, size = None, None
    if plan := _plan(config, spec):
        present = Results(config.results).capture(plan.capture_folder).shard_ids()
        missing = [shard for shard in plan.shards if shard.shard_id not in present]
        tokens, size = (
            sum(getattr(shard, name) for shard in missing) for name in ("tokens", "bytes")
        )
    return Work(
        spec=spec,
        weight_bytes=sum(file.stat().st_size for file in model.weight_files),
        tokens=tokens,
        bytes=size,
    )


def _plan(config: Configuration, spec: CaptureSpec) -> Plan | None:
    """Return the plan in the results, if it is of this capture."""
    try:
        plan = Plan.read(Results(config.results).plan)
    except UserError:
        return None
    same = (plan.capture.model, plan.capture.residual_layers, plan.capture.stored_dtype)
    return plan if same == (spec.model, spec.residual_layers, spec.stored_dtype) else None


# ---- The comparison ------------------------------------------------------------------------------


def compare(machine: Machine, config: Configuration, work: Work) -> list[Check]:
    """Hold a machine to what a configuration asks for."""
    here = config.server.launcher == "local"
    return [
        *(_gpu_checks(machine, config, work) if here and on_gpu(config.server) else []),
        _disk(machine, config, work),
        _write(machine, work),
        _memory(machine, config, work),
        _files(machine, config),
        _software(machine, config),
        *([_slurm(machine)] if config.server.launcher == "slurm" else []),
        *([_apptainer(machine)] if config.containers.tools or config.containers.sglang else []),
    ]


def _check(name: str, enough: bool, found: str, needed: str, change: str) -> Check:
    return Check(
        name=name,
        verdict="enough" if enough else "short",
        found=found,
        needed=needed,
        change=None if enough else change,
    )


def _gpu_checks(machine: Machine, config: Configuration, work: Work) -> list[Check]:
    """Compare number, memory and driver of the GPUs, for servers that this machine starts."""
    server, gpus = config.server, machine.gpus
    wanted = server.tensor_parallel * server.replicas
    names = ", ".join(sorted({gpu.name for gpu in gpus}))
    number = _check(
        "GPUs",
        len(gpus) >= wanted,
        f"{len(gpus)} ({names})" if gpus else "none that nvidia-smi lists",
        f"{wanted}: {server.replicas} servers of {server.tensor_parallel}",
        "lower server.replicas or server.tensor_parallel, or take a machine with more GPUs",
    )
    if not gpus:
        return [number]
    smallest, share = min(gpu.memory for gpu in gpus), work.weight_bytes / server.tensor_parallel
    memory = _check(
        "GPU memory",
        share <= smallest * _SHARE_FOR_WEIGHTS,
        f"{of_bytes(smallest)} each",
        f"{of_bytes(share)} of weights on each, and room for prefill beside them",
        "raise server.tensor_parallel, so that each GPU holds a smaller part of the weights",
    )
    if machine.cuda is None:
        driver = Check(
            name="driver",
            verdict="short",
            found=gpus[0].driver,
            needed="a torch that is built for CUDA",
            change="install the torch of requirements.lock on a machine with CUDA",
        )
    else:
        oldest = _DRIVERS.get(int(machine.cuda.split(".")[0]))
        major = gpus[0].driver.split(".")[0]
        driver = _check(
            "driver",
            oldest is None or not major.isdigit() or int(major) >= oldest,
            gpus[0].driver,
            f"{oldest or 'any'} or newer, for CUDA {machine.cuda}",
            "update the driver, or run the server in an image for an older CUDA",
        )
    return [number, memory, driver]


def _disk(machine: Machine, config: Configuration, work: Work) -> Check:
    free, each = machine.disk_free, work.spec.token_bytes
    if work.bytes is None:
        return Check(
            name="disk",
            verdict="unknown",
            found=f"{of_bytes(free)} free",
            needed=f"{of_bytes(each)} per token: there is room for {of_count(free / each)} tokens",
            change="run `snakemake --cores all tokens_report` first, which counts the tokens",
        )
    return _check(
        "disk",
        work.bytes <= free,
        f"{of_bytes(free)} free",
        f"{of_bytes(work.bytes)} for {of_count(work.tokens or 0)} tokens",
        f"make room, or name another folder in `results` (now {config.results})",
    )


def _write(machine: Machine, work: Work) -> Check:
    rate, each = machine.write_rate, work.spec.token_bytes
    if rate is None:
        return Check(
            name="write rate",
            verdict="short",
            found="nothing could be written",
            needed=f"{of_bytes(each)} per token",
            change="name a folder in `results` that this user may write to, with room",
        )
    return Check(
        name="write rate",
        verdict="enough",
        found=f"{of_bytes(rate)}/s, synced",
        needed=f"{of_bytes(each)} per token: this disk takes {of_count(rate / each)} tokens/s",
    )


def _memory(machine: Machine, config: Configuration, work: Work) -> Check:
    server = config.server
    if server.launcher != "local":
        return Check(
            name="memory",
            verdict="enough",
            found=f"{of_bytes(machine.memory_free)} free",
            needed="little: the server runs elsewhere",
        )
    queues = server.queue_bytes * server.data_parallel_attention * server.replicas
    weights = 0 if on_gpu(server) else work.weight_bytes * server.replicas
    needed = f"{of_bytes(queues)} of server.queue_bytes for states on their way to the disk"
    if weights:
        needed += f", {of_bytes(weights)} of weights"
    return _check(
        "memory",
        queues + weights <= machine.memory_free,
        f"{of_bytes(machine.memory_free)} free",
        needed,
        "lower server.queue_bytes or server.replicas, or end other programs",
    )


def _files(machine: Machine, config: Configuration) -> Check:
    largest = machine.file_bytes
    limit = "any size" if largest is None else f"at most {of_bytes(largest)}"
    return _check(
        "ulimit",
        machine.open_files >= _OPEN_FILES
        and (largest is None or largest >= config.shards.max_bytes),
        f"{machine.open_files:,} open files, {limit} each",
        f"{_OPEN_FILES:,} open files, shards of up to {of_bytes(config.shards.max_bytes)}",
        "raise the limits: ulimit -Hn and ulimit -f, or the site's limits.conf",
    )


def _software(machine: Machine, config: Configuration) -> Check:
    server_here = config.server.launcher == "local" and not config.containers.sglang
    wanted = [name for name in PACKAGES if name != "sglang" or server_here]
    missing = [name for name in wanted if name not in machine.versions]
    return _check(
        "versions",
        not missing,
        ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
        ", ".join(wanted),
        f"install {', '.join(missing)}: `make install`",
    )


def _slurm(machine: Machine) -> Check:
    return _check(
        "Slurm",
        machine.slurm is not None,
        machine.slurm or "no sbatch",
        "sbatch, since server.launcher is slurm",
        "run on a login node, or set server.launcher: local",
    )


def _apptainer(machine: Machine) -> Check:
    said = machine.apptainer or ""
    digits = said.split()[-1].split("-")[0].split(".") if said else []
    version = tuple(int(part) for part in digits[:2] if part.isdigit())
    return _check(
        "Apptainer",
        version >= _OLDEST_APPTAINER,
        said or "none",
        "1.2 or newer, since `containers` names images",
        "install Apptainer, or leave `containers` out",
    )


def forecast(machine: Machine, config: Configuration, work: Work, checks: list[Check]) -> Forecast:
    """Return what will be the limit, and how long the capture takes."""
    short = [check for check in checks if check.verdict == "short"]
    disk = machine.write_rate / work.spec.token_bytes if machine.write_rate else math.inf
    server = config.extract.tokens_per_second or math.inf
    rate = min(disk, server)
    seconds = None if work.tokens is None or rate == math.inf else work.tokens / rate
    if short:
        said = "; ".join(f"{check.name}: {check.found}, needed {check.needed}" for check in short)
        return Forecast(limit=f"It cannot run here as configured. {said}.", seconds=None)
    if rate == math.inf:
        limit = "No rate is known: set extract.tokens_per_second."
    elif disk <= server:
        limit = f"The disk will be the limit: it takes {of_count(disk)} tokens/s"
        limit += (
            f", the server computes {of_count(server)} (extract.tokens_per_second)."
            if server < math.inf
            else "; the server's rate is unknown: set extract.tokens_per_second."
        )
    else:
        limit = (
            f"The server will be the limit: {of_count(server)} tokens/s"
            f" (extract.tokens_per_second); the disk takes {of_count(disk)}."
        )
    if seconds is None:
        return Forecast(limit=f"{limit} How many tokens there are is unknown yet.", seconds=None)
    if not work.tokens:
        return Forecast(limit="Nothing is left to capture.", seconds=0.0)
    least = "at least " if server == math.inf else ""
    return Forecast(
        limit=f"{limit} The {of_count(work.tokens)} tokens that are left take"
        f" {least}{of_seconds(seconds)}, and the start of the server.",
        seconds=seconds,
    )

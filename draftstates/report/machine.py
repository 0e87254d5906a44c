"""What this machine has: GPUs, disk, memory, limits and programs."""

import contextlib
import dataclasses
import importlib.metadata
import os
import resource
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from draftstates.plan.room import existing_folder

# what a run imports, in the environment that it runs in
PACKAGES = ("snakemake", "sglang", "torch", "transformers")
_WRITE_SECONDS, _MOST_WRITTEN, _BLOCK = 2.0, 2 << 30, 16 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU, its memory in bytes and its driver's version."""

    name: str
    memory: int
    driver: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What this machine has.

    Attributes:
        gpus: NVIDIA GPUs that nvidia-smi lists.
        cuda: version of CUDA that torch is built for; None for a torch without.
        disk_free: free bytes of the disk of the results.
        write_rate: bytes a second that one file takes there, synced; None if nothing can be
            written.
        memory_free: bytes that processes can still take.
        open_files: how many files a process may open.
        file_bytes: how large a file may become; None without a limit.
        versions: version of each package that is installed.
        slurm: what `sbatch --version` says; None without Slurm.
        apptainer: what `apptainer --version` says; None without it.
    """

    gpus: tuple[Gpu, ...]
    cuda: str | None
    disk_free: int
    write_rate: float | None
    memory_free: int
    open_files: int
    file_bytes: int | None
    versions: dict[str, str]
    slurm: str | None
    apptainer: str | None


def look(results: Path) -> Machine:
    """Look at this machine.

    Args:
        results: results folder, which need not exist; a nameless file of up to 2 GiB is written to
            its disk, for two seconds.
    """
    folder = existing_folder(results)
    free = shutil.disk_usage(folder).free
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return Machine(
        gpus=_gpus(),
        cuda=_cuda(),
        disk_free=free,
        write_rate=_write_rate(folder, most=min(_MOST_WRITTEN, free // 4)),
        memory_free=_memory_free(),
        # a process may raise its own limit up to the hard one, and SGLang does
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        file_bytes=None if limit == resource.RLIM_INFINITY else limit,
        versions=_versions(),
        slurm=_said("sbatch", "--version"),
        apptainer=_said("apptainer", "--version"),
    )


def _said(*command: str) -> str | None:
    """Return the first line that a program prints; None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if lines and not done.returncode else None


def _gpus() -> tuple[Gpu, ...]:
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version"]
    try:
        done = subprocess.run(
            [*command, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(_gpu(line) for line in done.stdout.splitlines() if line.count(",") == 2)


def _gpu(line: str) -> Gpu:
    """Return the GPU of a line of nvidia-smi: name, MiB, driver."""
    name, memory, driver = (part.strip() for part in line.split(","))
    return Gpu(name=name, memory=int(memory) << 20 if memory.isdigit() else 0, driver=driver)


def _cuda() -> str | None:
    import torch

    return torch.version.cuda


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _memory_free() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _write_rate(folder: Path, *, most: int) -> float | None:
    """Return the bytes a second that a new file in `folder` takes, with its sync at the end."""
    block = os.urandom(_BLOCK)
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".doctor.", buffering=0) as file:
            started, written = time.monotonic(), 0
            while written + _BLOCK <= most and time.monotonic() - started < _WRITE_SECONDS:
                written += file.write(block)
            os.fsync(file.fileno())
            return written / (time.monotonic() - started) if written else None
    except OSError:
        return None

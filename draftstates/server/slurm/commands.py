"""Slurm's own commands."""

import dataclasses
import getpass
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from draftstates.errors import UserError

_SECONDS = 60.0  # a busy controller answers late


@dataclasses.dataclass(frozen=True)
class QueueEntry:
    """A job as `squeue` shows it: state, why it waits, seconds until its time limit (None without one)."""

    state: str
    reason: str
    seconds_left: float | None


def submit(arguments: list[str], *, name: str, log: Path, command: list[str]) -> str:
    """Submit a job that runs `command`; returns its id.

    Raises:
        UserError: Slurm refuses it, with its words.
    """
    script = "#!/bin/bash\nexec " + " ".join("'" + word.replace("'", "'\\''") + "'" for word in command) + "\n"
    # a requeued job would come back under the name of a server that is known to have failed
    fixed = ["--parsable", "--job-name", name, "--output", str(log), "--open-mode=append", "--no-requeue", "--nodes=1", "--ntasks=1"]
    done = _run(["sbatch", *fixed, *arguments], text=script)
    if done.returncode:
        raise UserError(f"sbatch {' '.join(arguments)} failed: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout.strip().split(";")[0]


def queue(name: str) -> dict[str, QueueEntry] | None:
    """The present jobs of that name by id; None where Slurm does not answer."""
    done = _run(["squeue", "--noheader", "--user", getpass.getuser(), "--name", name, "--format", "%i|%T|%r|%L"])
    if done.returncode:
        return None
    entries = {}
    for line in done.stdout.splitlines():
        job, state, reason, left = line.strip().split("|")
        if state != "COMPLETING":
            entries[job] = QueueEntry(state, reason, seconds(left))
    return entries


def cancel(jobs: Iterable[str]) -> bool:
    """Cancel jobs; whether Slurm took it."""
    jobs = list(jobs)
    return not jobs or _run(["scancel", *jobs]).returncode == 0


def seconds(text: str) -> float | None:
    """Seconds in Slurm's [[days-]hours:]minutes:seconds; None for anything else, such as UNLIMITED."""
    found = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text)
    if not found:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)


def _run(command: list[str], *, text: str = "") -> "subprocess.CompletedProcess[str]":
    # variables of a job that this process may run in would be taken for options
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_") or key == "SLURM_CONF"}
    try:
        return subprocess.run(command, input=text, text=True, capture_output=True, env=environment, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {_SECONDS:g} s")
    except OSError as error:
        raise UserError(f"{command[0]} cannot be started on this machine: {error.strerror}; server.launcher slurm needs it") from error

"""Calls of Slurm's own commands."""

import dataclasses
import os
import re
import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path

from draftstates.errors import LastingError, UserError

# a busy controller answers late
_SECONDS = 60.0
# what Slurm may accept later
_PASSING = re.compile(
    r"no answer|unable to contact|timed? ?out|temporar|connection|socket|limit|try again",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class QueueEntry:
    """A job as `squeue` shows it.

    Attributes:
        state: such as PENDING or RUNNING.
        reason: why the job waits.
        seconds_left: seconds until its time limit; None without a time limit.
    """

    state: str
    reason: str
    seconds_left: float | None


def submit(arguments: list[str], *, name: str, log: Path, command: list[str]) -> str:
    """Submit a job that runs `command`, and return its id.

    Args:
        arguments: further arguments for sbatch.
        name: name of the job.
        log: file for the job's output.
        command: argv that the job runs.

    Raises:
        LastingError: Slurm refuses the job, as it would refuse it a second time; the message has
            Slurm's own text.
        UserError: Slurm may accept the job later.
    """
    script = f"#!/bin/bash\nexec {shlex.join(command)}\n"
    fixed = ["--parsable", "--job-name", name, "--output", str(log), "--open-mode=append"]
    # a requeued job would come back under the name of a server that is known to have failed
    fixed += ["--no-requeue", "--nodes=1", "--ntasks=1"]
    try:
        done = _run(["sbatch", *fixed, *arguments], text=script)
    except OSError as error:
        # a machine that is out of processes, or a file server, may recover
        missing = isinstance(error, FileNotFoundError | PermissionError)
        raise (LastingError if missing else UserError)(
            f"sbatch cannot be started on this machine: {error.strerror}; server.launcher slurm"
            " needs it"
        ) from error
    if done.returncode:
        said = done.stderr.strip() or f"status {done.returncode}"
        kind = UserError if _PASSING.search(said) else LastingError
        raise kind(f"sbatch {' '.join(arguments)} failed: {said}")
    return done.stdout.strip().split(";")[0]


def queue(name: str) -> dict[str, QueueEntry] | None:
    """Return the present jobs of that name by id, or None if Slurm does not answer.

    A command that cannot be started is no answer either.
    """
    # the variables that name the user may name another one
    mine = ["--user", str(os.getuid()), "--name", name]
    try:
        done = _run(["squeue", "--noheader", *mine, "--format", "%i|%T|%r|%L"])
    except OSError:
        return None
    if done.returncode:
        return None
    entries = {}
    for line in done.stdout.splitlines():
        job, state, reason, left = line.strip().split("|")
        if state != "COMPLETING":
            entries[job] = QueueEntry(state, reason, seconds(left))
    return entries


def cancel(jobs: Iterable[str]) -> bool:
    """Cancel jobs, and return whether Slurm accepted the request."""
    jobs = list(jobs)
    try:
        return not jobs or _run(["scancel", *jobs]).returncode == 0
    except OSError:
        return False


def seconds(text: str) -> float | None:
    """Return the seconds in Slurm's [[days-]hours:]minutes:seconds.

    The result is None for any other text, such as UNLIMITED.
    """
    found = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text)
    if not found:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)


def _run(command: list[str], *, text: str = "") -> "subprocess.CompletedProcess[str]":
    # if this process runs in a job, Slurm would take that job's variables for options
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("SLURM_") or key == "SLURM_CONF"
    }
    try:
        return subprocess.run(
            command, input=text, text=True, capture_output=True, env=environment, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {_SECONDS:g} s")

"""Errors of the jobs that failed in a run, collected so that the run ends with them.

Snakemake reports a failed job where it fails, which may be thousands of lines before the end.
"""

import dataclasses
import logging
import re
import signal
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from draftstates.errors import visible

_ERROR = re.compile(r"^(?:\S+: )?error: ", re.MULTILINE)
_DIED = re.compile(r"died with <Signals\.(SIG\w+)|non-zero exit status (\d+)")
_ID = re.compile(r"\b[0-9a-f]{32}\b")
_TAIL_BYTES = 65536
_MOST_LINES = 30
_MOST_PER_RULE = 3


@dataclasses.dataclass(frozen=True)
class Failure:
    """Job whose last attempt failed.

    Attributes:
        rule: its rule.
        logs: its log files.
        signal: the signal that ended its command, if it is known.
    """

    rule: str
    logs: tuple[str, ...]
    signal: signal.Signals | None

    def reason(self) -> str:
        """Return the error in the job's log; without one, what ended the job."""
        text = "".join(map(_tail, self.logs))
        if errors := list(_ERROR.finditer(text)):
            lines = text[errors[-1].start() :].strip().splitlines()
            return "\n".join(map(visible, _shortened(lines)))
        if self.signal == signal.SIGKILL:
            return "error: killed by signal 9 (SIGKILL), perhaps out of memory"
        if self.signal:
            return f"error: ended by signal {self.signal.value} ({self.signal.name})"
        if lines := text.strip().splitlines():
            return f"error: {visible(lines[-1].strip())}"
        return "error: the log is empty: the job was killed (out of memory?), or the disk is full"


class FailedJobs(logging.Handler):
    """Log handler that follows the jobs of a run by the records that Snakemake logs."""

    def __init__(self) -> None:
        super().__init__()
        self._failed: dict[int, Failure] = {}
        self._died = threading.local()

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(getattr(record, "event", None), "name", None)
        if event == "ERROR":
            # Snakemake logs how a command ended right before the error of its job
            self._died.signal = _signal_in(record.getMessage())
        elif event == "JOB_ERROR":
            self._failed[record.jobid] = Failure(
                rule=record.rule_name,
                logs=tuple(record.log),
                signal=getattr(self._died, "signal", None),
            )
            self._died.signal = None
        elif event == "JOB_FINISHED":
            # A later attempt was successful.
            self._failed.pop(record.job_id, None)

    def failed(self) -> list[Failure]:
        return list(self._failed.values())


class WithoutPlaces(logging.Filter):
    """Filter that cuts from a user's error where in the rules an input function raised it.

    Snakemake adds the places to an error of any kind; where the error is a fault of the rules, they
    stay.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "exception", None) == "InputFunctionException":
            said = record.getMessage()
            if "\n  WorkflowError:" in said:
                record.msg, record.args = said.partition("\nTraceback:\n")[0], ()
        return True


def summary(failures: Sequence[Failure], *, rules: Iterable[str]) -> str:
    """Describe failed jobs, the most important errors first.

    The order is that of the rules, which is the order of the data: an earlier error may be the
    cause of a later one. Errors of one rule that differ only in a shard id are listed once.

    Args:
        failures: the failed jobs.
        rules: names of the rules in the order of the data.
    """
    order = {name: index for index, name in enumerate(rules)}
    by_rule: dict[str, list[Failure]] = defaultdict(list)
    for failure in sorted(failures, key=lambda failure: order.get(failure.rule, len(order))):
        by_rule[failure.rule].append(failure)
    jobs = "1 job" if len(failures) == 1 else f"{len(failures)} jobs"
    return "\n".join([f"{jobs} failed:", *(_of_rule(*item) for item in by_rule.items())])


def _of_rule(rule: str, failures: list[Failure]) -> str:
    """Describe the failed jobs of one rule; an error that several jobs have comes once."""
    groups: dict[str, list[tuple[Failure, str]]] = defaultdict(list)
    for failure in failures:
        reason = failure.reason()
        groups[_ID.sub("<id>", reason)].append((failure, reason))
    parts = []
    for group in list(groups.values())[:_MOST_PER_RULE]:
        failure, reason = group[0]
        more = f", and {len(group) - 1} more with this error" if len(group) > 1 else ""
        parts.append(f"rule {rule} ({', '.join(failure.logs) or 'no log'}{more}):\n{reason}")
    if len(groups) > _MOST_PER_RULE:
        hidden = sum(map(len, list(groups.values())[_MOST_PER_RULE:]))
        parts.append(f"rule {rule}: {hidden} more jobs with other errors")
    return "\n".join(parts)


def _signal_in(message: str) -> signal.Signals | None:
    """Return the signal that ended a command; a shell reports a signal as a status above 128."""
    found = _DIED.search(message)
    try:
        if found and found[1]:
            return signal.Signals[found[1]]
        if found and int(found[2]) > 128:
            return signal.Signals(int(found[2]) - 128)
    except (KeyError, ValueError):
        pass
    return None


def _tail(path: str) -> str:
    try:
        with open(Path(path), "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _shortened(lines: list[str]) -> list[str]:
    if len(lines) <= _MOST_LINES:
        return lines
    return [*lines[:1], "[…]", *lines[-(_MOST_LINES - 2) :]]

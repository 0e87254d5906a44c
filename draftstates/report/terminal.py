"""What a terminal shows of a run: a line a minute for all shards together, and few of single jobs.

The lines of thousands of jobs are in Snakemake's log alone. How a run gets on is read from its
files.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from draftstates.errors import UserError
from draftstates.extract.progress import running
from draftstates.files import read_json
from draftstates.paths import Results
from draftstates.plan.words import of_count, of_seconds
from draftstates.report.answering import answering
from draftstates.report.status import Status, look
from draftstates.server.folder import RunFolder

_LOOK_SECONDS = 2.0
_SAY_SECONDS = 60.0
# Events of single jobs, and how Snakemake gets on by its own count.
_OF_JOBS = {"JOB_INFO", "GROUP_INFO", "JOB_STARTED", "SHELLCMD", "PROGRESS", "RESOURCES_INFO"}
_NOISE = ("Select jobs to execute", "Execute ", "DAG of jobs will be updated", "Touching output")
_FINISHED = re.compile(r"\(Rule: (\w+)\)")
# Rules with a job for each shard: one line a minute tells of them together.
_OF_SHARDS = {"answer", "extract", "verify", "compact", "all"}


class Watch:
    """The lines of a run, made from one look at its files after another.

    Args:
        results: the results folder.
        run: the folder of the run's servers.
    """

    def __init__(self, results: Path, run: RunFolder) -> None:
        self._results, self._run = results, run
        self._first: Status | None = None
        self._said, self._kind, self._last = float("-inf"), "", ""

    def line(self, now: float) -> str | None:
        """Return what is to be said now; None if that was said less than a minute ago.

        The start of a server and the first tokens are said at once, and nothing twice.

        Args:
            now: Unix time.
        """
        server = self._starting()
        kind = "server" if server else "capture"
        if now - self._said < _SAY_SECONDS and kind == self._kind:
            return None
        line = self._server_line(server, now) if server else self._capture_line()
        if not line or line == self._last:
            return None
        self._said, self._kind, self._last = now, kind, line
        return line

    def _server_line(self, server: dict[str, Any], now: float) -> str:
        seconds = of_seconds(max(0.0, now - server["starting"]))
        return f"server: starting for {seconds}; {server['servers']}; its log: {server['log']}"

    def _capture_line(self) -> str | None:
        if sources := answering(self._results):
            return "; ".join(each.line for each in sources)
        # The plan of a large run takes a moment to read: it is read only if a shard is in work.
        captures = Results(self._results).captures()
        if not any(running(capture.building) for capture in captures):
            return None
        try:
            status = look(self._results)
        except (UserError, OSError):
            return None
        if not status.running:
            return None
        self._first = self._first or status
        return capture_line(status, self._first)

    def _starting(self) -> dict[str, Any] | None:
        """Return the state of the servers while none of them is ready; None if none starts."""
        try:
            status = read_json(self._run.status)
        except (UserError, OSError):
            return None
        return status if status and status["starting"] else None


def capture_line(status: Status, first: Status) -> str:
    """Return the state of all shards together as one line.

    Args:
        status: the present state.
        first: the first state in which a shard was in work: the rate is that since then.
    """
    share = status.done_tokens / max(status.tokens, 1)
    parts = [
        f"capture: {of_count(status.done_tokens)} of {of_count(status.tokens)} tokens ({share:.0%})"
    ]
    seconds, done = status.at - first.at, status.done_tokens - first.done_tokens
    rate = done / seconds if seconds > 0 and done > 0 else status.rate
    if rate > 0:
        left = max(0, status.tokens - status.done_tokens) / rate
        parts.append(f"{rate:,.0f} tokens/s, {of_seconds(left)} left")
    servers = len({each.server for each in status.running})
    on = "1 server" if servers == 1 else f"{servers} servers"
    parts.append(
        f"{status.captured:,} of {status.planned:,} shards captured, {len(status.running):,} in"
        f" work on {on}, {len(status.failed):,} failed"
    )
    return "; ".join(parts)


def say_each_minute(results: Path, run: RunFolder, say: Callable[[str], None]) -> None:
    """Say the lines of a run from a thread of its own, which ends with the process."""

    def watch() -> None:
        seen = Watch(results, run)
        while True:
            time.sleep(_LOOK_SECONDS)
            if line := seen.line(time.time()):
                say(line)

    threading.Thread(target=watch, name="draftstates-progress", daemon=True).start()


class Quiet(logging.Filter):
    """Filter of a terminal: warnings and errors pass, and of single jobs the end of each stage."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            return True
        event = getattr(getattr(record, "event", None), "name", None)
        if event in _OF_JOBS:
            return False
        message = record.getMessage()
        if event == "JOB_FINISHED":
            found = _FINISHED.search(message)
            return bool(found) and found[1] not in _OF_SHARDS
        return not message.startswith(_NOISE)


def quieten(handlers: Iterable[logging.Handler]) -> None:
    """Filter what terminals among a logger's handlers show; files get all lines as before."""
    for handler in handlers:
        if isinstance(handler, logging.StreamHandler) and not isinstance(
            handler, logging.FileHandler
        ):
            handler.addFilter(Quiet())

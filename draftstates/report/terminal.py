"""What a terminal shows of a run: one line that says how it gets on, and few of single jobs.

The line is rewritten in place. In a file, where that is not possible, it is a line a minute. The
lines of thousands of jobs are in Snakemake's log alone. How a run gets on is read from its files.
"""

import atexit
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from draftstates.errors import UserError, counted
from draftstates.extract.progress import running
from draftstates.files import read_json
from draftstates.paths import BUILDING, Results
from draftstates.plan.words import of_count, of_seconds
from draftstates.report.answering import answering
from draftstates.report.status import Status, look
from draftstates.server.folder import RunFolder

# attribute of the records that say how a run gets on
PROGRESS = "draftstates_progress"
_LOOK_SECONDS = 2.0
_SAY_SECONDS = 60.0
# a look at a large run may take a second: looking takes at most a twentieth of a core
_PAUSE_PER_LOOK = 20
# up a line; to the line's begin and all behind it cleared
_UP, _CLEAR = "\x1b[A", "\r\x1b[J"
# of a terminal that does not know its width
_WIDE = 80
# Events of single jobs, and how Snakemake gets on by its own count.
_OF_JOBS = {"JOB_INFO", "GROUP_INFO", "JOB_STARTED", "SHELLCMD", "PROGRESS", "RESOURCES_INFO"}
_NOISE = ("Select jobs to execute", "Execute ", "DAG of jobs will be updated", "Touching output")
_FINISHED = re.compile(r"\(Rule: (\w+)\)")
# Rules with a job for each shard: one line a minute tells of them together.
_OF_SHARDS = {"answer", "extract", "verify", "compact", "all"}


class JobsInWork(logging.Handler):
    """Log handler that knows which jobs are in work, by the records that Snakemake logs."""

    def __init__(self) -> None:
        super().__init__()
        self._begun: dict[int, tuple[str, float]] = {}
        self._finished: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(getattr(record, "event", None), "name", None)
        if event == "JOB_INFO":
            self._begun[record.jobid] = (record.rule_name, record.created)
        elif event == "JOB_ERROR":
            self._begun.pop(record.jobid, None)
        elif event == "JOB_FINISHED" and (job := self._begun.pop(record.job_id, None)):
            self._finished[job[0]] += 1

    def line(self, now: float) -> str:
        """Return the jobs in work, by rule, and since when; an empty text if there are none."""
        begun = sorted(self._begun.copy().values(), key=lambda job: job[1])
        counts, since = Counter(rule for rule, _ in begun), dict(reversed(begun))
        return "; ".join(
            f"{rule}: {count:,} in work for {of_seconds(max(0.0, now - since[rule]))},"
            f" {self._finished[rule]:,} finished"
            for rule, count in counts.items()
        )


class Watch:
    """The lines of a run, made from one look at its files after another.

    Args:
        results: the results folder.
        run: the folder of the run's servers.
        jobs: says what is in work where neither a server starts nor shards are captured.
    """

    def __init__(self, results: Path, run: RunFolder, jobs: JobsInWork) -> None:
        self._results, self._run, self._jobs = results, run, jobs
        self._first: Status | None = None
        self._said: float | None = None
        self._kind, self._last = "", ""

    def present(self, now: float) -> str:
        """Return what the run does now, or an empty text.

        Args:
            now: Unix time.
        """
        return self._line_of(self._kind_now(), now)

    def line(self, now: float) -> str | None:
        """Return what is to be said now; None if that was said less than a minute ago.

        The start of a server and the first tokens are said at once, and nothing twice.

        Args:
            now: Unix time.
        """
        self._said = now if self._said is None else self._said
        kind = self._kind_now()
        if now - self._said < _SAY_SECONDS and kind in (self._kind, "jobs"):
            return None
        line = self._line_of(kind, now)
        if not line or line == self._last:
            return None
        self._said, self._kind, self._last = now, kind, line
        return line

    def _kind_now(self) -> str:
        """Return what is to be told of, by a quick look: no plan is read."""
        if self._starting():
            return "server"
        places = [*self._results.glob(f"answers/*/*/{BUILDING}")]
        places += [capture.building for capture in Results(self._results).captures()]
        return "capture" if any(map(running, places)) else "jobs"

    def _line_of(self, kind: str, now: float) -> str:
        if kind == "server" and (server := self._starting()):
            return self._server_line(server, now)
        captured = self._capture_line() if kind == "capture" else None
        return captured or self._jobs.line(now)

    def _server_line(self, server: dict[str, Any], now: float) -> str:
        seconds = of_seconds(max(0.0, now - server["starting"]))
        return f"server: starting for {seconds}; {server['servers']}; its log: {server['log']}"

    def _capture_line(self) -> str | None:
        if sources := answering(self._results):
            return "; ".join(each.line for each in sources)
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
    servers = counted(len({each.server for each in status.running}), "server")
    parts.append(
        f"{status.captured:,} of {status.planned:,} shards captured, {status.verified:,}"
        f" verified, {len(status.running):,} in work on {servers}, {len(status.failed):,} failed"
    )
    return "; ".join(parts)


class Live:
    """A terminal whose last line is rewritten; all that is written goes above it.

    Args:
        terminal: the terminal's stream, of which this one takes the place.
    """

    def __init__(self, terminal: Any) -> None:
        self._terminal, self._line, self._rows = terminal, "", 0
        self._ended, self._lock = False, threading.RLock()
        atexit.register(self.end)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)

    def write(self, text: str) -> int:
        with self._lock:
            line = self._line
            self.show("")
            written = self._terminal.write(text)
            if text.endswith("\n"):
                self.show(line)
            else:
                self._line = line
            return written

    def show(self, line: str) -> None:
        """Put a line in place of the last one; an empty one removes it."""
        with self._lock:
            if self._ended:
                return
            try:
                wide = os.get_terminal_size(self._terminal.fileno()).columns or _WIDE
                above = _UP * (self._rows - 1) + _CLEAR if self._rows else ""
                self._terminal.write(above + line)
                self._terminal.flush()
            except (OSError, ValueError):
                # the terminal was closed; the run goes on
                self._ended = True
                return
            self._line, self._rows = line, -(-len(line) // wide)

    def end(self) -> None:
        """Remove the line for good: what follows is written by others too."""
        with self._lock:
            self.show("")
            self._ended = True


def say_each_minute(watch: Watch, logger: logging.Logger, live: Sequence[Live] = ()) -> None:
    """Say the lines of a run from a thread of its own, which ends with the process.

    Args:
        watch: makes the lines.
        logger: gets a line a minute.
        live: terminals that show the present line.
    """

    def look_on() -> None:
        pause = _LOOK_SECONDS
        while True:
            time.sleep(pause)
            if line := watch.line(time.time()):
                logger.info(line, extra={PROGRESS: True})
            if live:
                begun = time.monotonic()
                present = watch.present(time.time())
                for terminal in live:
                    terminal.show(present)
                pause = max(_LOOK_SECONDS, _PAUSE_PER_LOOK * (time.monotonic() - begun))

    threading.Thread(target=look_on, name="draftstates-progress", daemon=True).start()


class Quiet(logging.Filter):
    """Filter of a terminal: warnings and errors pass, and of single jobs the end of each stage.

    Args:
        live: whether the terminal shows the present line, and needs none a minute.
    """

    def __init__(self, *, live: bool) -> None:
        super().__init__()
        self._live = live

    def filter(self, record: logging.LogRecord) -> bool:
        if hasattr(record, PROGRESS):
            return not self._live
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


def quieten(handlers: Iterable[logging.Handler], *, rewrite: bool) -> list[Live]:
    """Filter what terminals among a logger's handlers show; files get all lines as before.

    Args:
        handlers: of the logger.
        rewrite: whether a terminal's last line may be rewritten.

    Returns:
        the terminals on which a line can be rewritten.
    """
    found = []
    for handler in handlers:
        if not isinstance(handler, logging.StreamHandler) or isinstance(
            handler, logging.FileHandler
        ):
            continue
        if rewrite and handler.stream.isatty() and os.environ.get("TERM") != "dumb":
            live = Live(handler.stream)
            handler.setStream(live)
            found.append(live)
        handler.addFilter(Quiet(live=handler.stream in found))
    return found

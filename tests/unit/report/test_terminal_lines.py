"""A run says how it gets on: one line for all shards, and one while a server starts."""

import dataclasses
import io
import json
import logging
import os
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from snakemake_interface_logger_plugins.common import LogEvent
from synthetic import plan_with, planned_shard

from draftstates.extract.progress import Running
from draftstates.report import terminal
from draftstates.report.status import look
from draftstates.report.terminal import (
    JobsInWork,
    Live,
    Watch,
    capture_line,
    quieten,
    say_each_minute,
)
from draftstates.server.folder import RunFolder

SHARDS = [digit * 32 for digit in "abcd"]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Four planned shards of 100 tokens; none is captured."""
    (tmp_path / "m-12345678" / "shards").mkdir(parents=True)
    shards = [planned_shard(name, tokens=100) for name in SHARDS]
    plan_with(shards, capture_folder="m-12345678").publish(tmp_path / "plan.json")
    return tmp_path


def work(results: Path, shard_id: str, done: int, *, server: str = "http://a:1") -> None:
    folder = results / "m-12345678" / "shards" / ".building" / f"{shard_id}-1"
    folder.mkdir(parents=True, exist_ok=True)
    now = time.time()
    entry = Running(
        shard_id=shard_id, done=done, total=100, started=now - 5, updated=now, server=server
    )
    (folder / "progress.json").write_text(json.dumps(entry.__dict__))


def tell(run: RunFolder, since: float | None) -> None:
    """Write what a supervisor does of a server that starts since then, or of one that is ready."""
    run.folder.mkdir(parents=True, exist_ok=True)
    status = {"servers": "job 7 is PENDING (Priority)", "starting": since, "log": "server.log"}
    run.status.write_text(json.dumps(status))


def test_one_line_for_all_shards_has_rate_and_time_left(results: Path) -> None:
    work(results, SHARDS[0], 20)
    first = dataclasses.replace(look(results), at=1000.0)
    (results / "m-12345678" / "shards" / f"{SHARDS[1]}.safetensors").touch()
    work(results, SHARDS[0], 60)
    work(results, SHARDS[2], 40, server="http://b:1")
    later = dataclasses.replace(look(results), at=1010.0)
    # 200 tokens are done, 180 of them in ten seconds
    assert capture_line(later, first) == (
        "capture: 200 of 400 tokens (50%); 18 tokens/s, 11 s left; 1 of 4 shards captured, 0"
        " verified, 2 in work on 2 servers, 0 failed"
    )
    # at first, the rate since the extractions' own start: 20 tokens in five seconds
    assert "4 tokens/s, 1 min 35 s left" in capture_line(first, first)


def test_a_line_a_minute_and_none_twice(results: Path) -> None:
    seen = Watch(results, RunFolder(results / ".server/run-1"), JobsInWork())
    assert seen.line(0) is None, "nothing is in work"
    work(results, SHARDS[0], 20)
    first = seen.line(1)
    assert first and first.startswith("capture: 20 of 400")
    work(results, SHARDS[0], 40)
    assert seen.line(30) is None
    later = seen.line(62)
    assert later and later.startswith("capture: 40 of 400")
    (results / "m-12345678" / "shards" / ".building" / f"{SHARDS[0]}-1" / "progress.json").unlink()
    assert seen.line(200) is None


def test_the_start_of_a_server_is_said_at_once_and_each_minute(results: Path) -> None:
    run = RunFolder(results / ".server/run-1")
    seen = Watch(results, run, JobsInWork())
    tell(run, 1000)
    assert seen.line(1003) == (
        "server: starting for 3.0 s; job 7 is PENDING (Priority); its log: server.log"
    )
    assert seen.line(1030) is None
    assert (seen.line(1070) or "").startswith("server: starting for 1 min 10 s")
    tell(run, None)
    work(results, SHARDS[0], 20)
    assert (seen.line(1072) or "").startswith("capture: ")


def test_a_server_that_is_ready_or_has_ended_is_not_starting(results: Path) -> None:
    run = RunFolder(results / ".server/run-1")
    tell(run, None)
    assert Watch(results, run, JobsInWork()).line(1003) is None


def test_a_run_without_a_plan_or_a_server_says_nothing(tmp_path: Path) -> None:
    assert Watch(tmp_path, RunFolder(tmp_path / ".server/run-1"), JobsInWork()).line(1) is None


def test_the_lines_come_from_a_thread(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(terminal, "_PAUSE_PER_LOOK", 0)
    work(results, SHARDS[0], 20)
    logger, said, heard = logging.Logger("run"), [], threading.Event()
    logger.addFilter(lambda record: said.append(record.getMessage()) or heard.set())
    watch = Watch(results, RunFolder(results / ".server/run-1"), JobsInWork())
    say_each_minute(watch, logger)
    assert heard.wait(10)
    time.sleep(0.2)
    assert len(said) == 1


def log_job(jobs: logging.Handler, event: str, at: float, **said: object) -> None:
    """Give a handler a record as Snakemake makes it."""
    record = logging.makeLogRecord({"event": LogEvent[event], "created": at, **said})
    jobs.handle(record)


def test_jobs_that_write_no_progress_are_told_of_by_their_rule(tmp_path: Path) -> None:
    jobs = JobsInWork()
    assert jobs.line(1) == ""
    log_job(jobs, "JOB_INFO", 100, jobid=1, rule_name="tokenise")
    log_job(jobs, "JOB_INFO", 103, jobid=2, rule_name="verify")
    log_job(jobs, "JOB_INFO", 105, jobid=3, rule_name="verify")
    assert jobs.line(190) == (
        "tokenise: 1 in work for 1 min 30 s, 0 finished; verify: 2 in work for 1 min 27 s, 0"
        " finished"
    )
    log_job(jobs, "JOB_FINISHED", 191, job_id=2)
    log_job(jobs, "JOB_ERROR", 191, jobid=1, rule_name="tokenise", log=[])
    assert jobs.line(195) == "verify: 1 in work for 1 min 30 s, 1 finished"
    watch = Watch(tmp_path, RunFolder(tmp_path / ".server/run-1"), jobs)
    assert watch.present(195) == jobs.line(195)
    assert watch.line(195) is None, "a minute has not passed"
    assert watch.line(256) == jobs.line(256)


class Screen(io.StringIO):
    """What a terminal of 40 columns gets."""

    def __init__(self) -> None:
        super().__init__()
        self._ends = os.openpty()
        termios.tcsetwinsize(self._ends[1], (24, 40))

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._ends[1]

    def seen(self) -> str:
        """Return what was written since the last time."""
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    yield screen
    for end in screen._ends:
        os.close(end)


def test_the_line_of_a_terminal_is_rewritten_and_all_else_goes_above_it(screen: Screen) -> None:
    live, seen = Live(screen), screen.seen
    live.show("capture: 20 of 400")
    live.show("capture: 40 of 400")
    assert seen() == "capture: 20 of 400\r\x1b[Jcapture: 40 of 400"
    # as a logging handler writes, in two pieces
    live.write("rule plan is done")
    live.write("\n")
    assert seen() == "\r\x1b[Jrule plan is done\ncapture: 40 of 400"
    live.show("x" * 90)
    live.show("y")
    assert seen() == "\r\x1b[J" + "x" * 90 + "\x1b[A\x1b[A\r\x1b[Jy", "three rows of 40 columns"
    live.end()
    live.show("too late")
    live.write("the accounting\n")
    assert seen() == "\r\x1b[Jthe accounting\n"


def test_a_terminal_that_is_closed_ends_its_line_alone(screen: Screen) -> None:
    live = Live(screen)
    live.show("capture: 20 of 400")
    screen.close()
    live.show("capture: 40 of 400")
    live.end()


def test_a_terminal_shows_the_present_line_and_the_log_gets_one_a_minute(
    screen: Screen, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "_LOOK_SECONDS", 0.02)
    logger, file = logging.Logger("run"), logging.FileHandler(tmp_path / "log")
    logger.addHandler(logging.StreamHandler(screen))
    logger.addHandler(file)
    file_alone = [logging.StreamHandler(io.StringIO())]
    assert quieten(file_alone, rewrite=True) == quieten(logger.handlers, rewrite=False) == []
    live = quieten(logger.handlers, rewrite=True)
    assert len(live) == 1
    work(results, SHARDS[0], 20)
    watch = Watch(results, RunFolder(results / ".server/run-1"), JobsInWork())
    say_each_minute(watch, logger, live)
    wait_until(lambda: (tmp_path / "log").read_text().startswith("capture: 20 of 400"))
    # the terminal gets its line behind the log
    wait_until(lambda: screen.seen().startswith("capture: 20 of 400"))
    assert "\n" not in screen.seen()
    live[0].end()
    file.close()


def wait_until(done: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not done():
        assert time.monotonic() < until
        time.sleep(0.02)

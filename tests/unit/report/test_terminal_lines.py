"""A run says how it gets on: one line for all shards, and one while a server starts."""

import dataclasses
import json
import threading
import time
from pathlib import Path

import pytest
from synthetic import plan_with, planned_shard

from draftstates.extract.progress import Running
from draftstates.report import terminal
from draftstates.report.status import look
from draftstates.report.terminal import Watch, capture_line, say_each_minute
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
        "capture: 200 of 400 tokens (50%); 18 tokens/s, 11 s left; 1 of 4 shards captured, 2 in"
        " work on 2 servers, 0 failed"
    )
    # at first, the rate since the extractions' own start: 20 tokens in five seconds
    assert "4 tokens/s, 1 min 35 s left" in capture_line(first, first)


def test_a_line_a_minute_and_none_twice(results: Path) -> None:
    seen = Watch(results, RunFolder(results / ".server/run-1"))
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
    seen = Watch(results, run)
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
    assert Watch(results, run).line(1003) is None


def test_a_run_without_a_plan_or_a_server_says_nothing(tmp_path: Path) -> None:
    assert Watch(tmp_path, RunFolder(tmp_path / ".server/run-1")).line(1) is None


def test_the_lines_come_from_a_thread(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_LOOK_SECONDS", 0.02)
    work(results, SHARDS[0], 20)
    said: list[str] = []
    heard = threading.Event()
    say_each_minute(
        results, RunFolder(results / ".server/run-1"), lambda line: (said.append(line), heard.set())
    )
    assert heard.wait(10)
    time.sleep(0.2)
    assert len(said) == 1

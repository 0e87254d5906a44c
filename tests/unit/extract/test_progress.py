"""A run says what it is doing, from files alone."""

import io
import json
import time
from pathlib import Path

import pytest
from rich.console import Console
from synthetic import plan_with, planned_shard

from draftstates.errors import UserError
from draftstates.extract import progress
from draftstates.extract.progress import ProgressFile, Running, running
from draftstates.report.status import look, view

ONE, TWO, THREE, FOUR = (digit * 32 for digit in "abcd")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Four planned shards: the first verified, the second captured, the third under way, the fourth
    failed.
    """
    run = tmp_path / "m-12345678"
    for folder in (run / "shards", run / "verified", tmp_path / "logs" / run.name / "extract"):
        folder.mkdir(parents=True)
    shards = [planned_shard(name, tokens=100) for name in (ONE, TWO, THREE, FOUR)]
    plan_with(shards, capture_folder=run.name).publish(tmp_path / "plan.json")
    for name in (ONE, TWO):
        (run / "shards" / f"{name}.safetensors").touch()
        (run / "shards" / f"{name}.recaptures.safetensors").touch()
    (run / "verified" / f"{ONE}.json").touch()
    (tmp_path / "logs" / run.name / "extract" / f"{FOUR}.log").write_text(
        "waiting\nerror: 1 sample could not be captured\n  x: y\n"
    )
    folder = run / "shards" / ".building" / f"{THREE}-1"
    folder.mkdir(parents=True)
    ProgressFile(folder, shard_id=THREE, total=100, server="http://a:1")
    return tmp_path


def test_a_look_tells_captured_running_and_failed_apart(results: Path) -> None:
    status = look(results)
    assert (status.planned, status.captured, status.verified) == (4, 2, 1)
    assert [each.shard_id for each in status.running] == [THREE]
    assert status.failed == {FOUR: "error: 1 sample could not be captured"}
    assert (status.done_tokens, status.tokens) == (200, 400)


def test_a_failed_shard_that_is_captured_again_is_no_longer_failed(results: Path) -> None:
    folder = results / "m-12345678" / "shards" / ".building" / f"{FOUR}-1"
    folder.mkdir()
    ProgressFile(folder, shard_id=FOUR, total=100, server="http://a:1")
    assert look(results).failed == {}


@pytest.mark.parametrize("jump", [-86400, 86400])
def test_a_clock_that_jumps_changes_no_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    monkeypatch.setattr(progress, "_WRITE_SECONDS", 0.0)
    (folder := tmp_path / "shards" / ".building" / f"{ONE}-1").mkdir(parents=True)
    file, clock = ProgressFile(folder, shard_id=ONE, total=100, server="http://a:1"), time.time
    monkeypatch.setattr(time, "time", lambda: clock() + jump)
    time.sleep(0.01)
    file.add(10)
    (found,) = running(folder.parent)
    assert found.done == 10
    assert 1 < found.rate <= 1000


def test_the_tables_have_the_rate_of_each_server_and_the_time_left(results: Path) -> None:
    folder = results / "m-12345678" / "shards" / ".building" / f"{THREE}-1"
    now = time.time()
    entry = Running(
        shard_id=THREE, done=50, total=100, started=now - 10, updated=now, server="http://a:1"
    )
    (folder / "progress.json").write_text(json.dumps(entry.__dict__))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(view(look(results)))
    text = console.export_text()
    assert "250 of 400, 5 a second" in text
    assert "30 s" in text, "150 tokens at 5 a second"
    assert "a:1" in text
    assert "1 sample could not be captured" in text


def test_an_error_on_the_terminal_is_text_alone(results: Path) -> None:
    """Neither an escape nor what rich takes for its markup does anything."""
    log = next(results.rglob("*.log"))
    log.write_text("error: row 3: expected a role, found '\x1b[2J' [/bold] [red]x\n")
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(view(look(results)))
    text = console.export_text()
    assert "found '⟨U+001B⟩[2J' [/bold] [red]x" in text


def test_an_extraction_without_news_is_shown_as_silent(results: Path) -> None:
    folder = results / "m-12345678" / "shards" / ".building" / f"{THREE}-1"
    entry = Running(shard_id=THREE, done=50, total=100, started=0, updated=10, server="http://a:1")
    (folder / "progress.json").write_text(json.dumps(entry.__dict__))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(view(look(results)))
    assert "silent" in console.export_text()


def test_without_a_plan_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected a plan"):
        look(tmp_path)


def test_a_progress_file_that_is_cut_short_or_gone_is_passed_over(results: Path) -> None:
    building = results / "m-12345678" / "shards" / ".building"
    (building / f"{THREE}-1" / "progress.json").write_text('{"shard_id": "x"')
    assert running(building) == []

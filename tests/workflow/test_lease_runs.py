"""One server for all jobs of a run: started once, only if needed, and restarted if it dies."""

import os
import signal
from pathlib import Path

import pytest
from lease_harness import Playground, announced, ended, leased

from draftstates.server.settings import ServerSettings


def settings(play: Playground, *stub: str) -> ServerSettings:
    """Return settings of a server that a busy machine does not find idle between two jobs."""
    return play.settings(*stub, idle_seconds=60.0)


@pytest.mark.parametrize("cores", [1, 2, 8])
def test_one_start_serves_twelve_shards(play: Playground, cores: int) -> None:
    assert play.snakemake(settings(play), "--cores", str(cores), shards=12).wait() == 0, play.said()
    assert len(play.outputs()) == 12
    assert len(play.starts()) == 1


def test_nothing_stale_starts_no_server_and_two_deleted_run_two_jobs_on_one(
    play: Playground,
) -> None:
    assert play.snakemake(settings(play), "--cores", "4", shards=12).wait() == 0, play.said()
    assert play.snakemake(settings(play), "--cores", "1", shards=12).wait() == 0
    assert "Nothing to be done" in play.said()
    assert len(play.starts()) == 1
    ended(play)
    for name in ("3", "7"):
        (play.folder / f"out/{name}.txt").unlink()
    before = play.said().count("rule shard:")
    assert play.snakemake(settings(play), "--cores", "4", shards=12).wait() == 0, play.said()
    assert play.said().count("rule shard:") - before == 2
    assert len(play.starts()) == 2


def test_a_failing_shard_costs_no_other_and_the_rerun_does_it_alone(play: Playground) -> None:
    assert (
        play.snakemake(settings(play), "--cores", "4", "--keep-going", shards=6, fail="2").wait()
        == 1
    )
    assert play.outputs() == ["0", "1", "3", "4", "5"]
    assert "out/2.txt: planted" in (play.folder / "logs/2.log").read_text()
    before = play.said().count("rule shard:")
    assert play.snakemake(settings(play), "--cores", "4", shards=6).wait() == 0, play.said()
    assert play.said().count("rule shard:") - before == 1


def test_a_server_killed_in_the_middle_is_started_again_for_the_retries(play: Playground) -> None:
    run = play.snakemake(
        settings(play, "--helpers", "1"), "--cores", "2", "--retries", "1", shards=4, seconds=1.5
    )
    announced(play)
    os.kill(play.starts()[0], signal.SIGKILL)
    assert run.wait() == 0, play.said()
    assert len(play.starts()) == 2
    assert play.outputs() == ["0", "1", "2", "3"]


def test_a_server_that_cannot_start_fails_the_jobs_at_once_with_its_last_lines(
    play: Playground,
) -> None:
    run = play.snakemake(play.settings("--break", start_seconds=600.0), "--cores", "2", shards=2)
    assert run.wait(timeout=30) == 1
    log = (play.folder / "logs/0.log").read_text()
    assert "exited with status 3" in log
    assert "line 99\nno such model" in log
    assert "line 50\n" not in log
    ended(play)


def test_a_slow_start_needs_no_latency_wait(play: Playground) -> None:
    run = play.snakemake(
        play.settings("--delay", "6"), "--cores", "2", "--latency-wait", "1", shards=2
    )
    assert run.wait() == 0, play.said()


def test_runs_in_two_folders_share_nothing(tmp_path: Path) -> None:
    plays = [Playground(tmp_path / name) for name in ("a", "b")]
    for play in plays:
        play.folder.mkdir()
    try:
        runs = [
            play.snakemake(settings(play), "--cores", "2", shards=3, seconds=1.0) for play in plays
        ]
        assert [run.wait() for run in runs] == [0, 0], plays[0].said() + plays[1].said()
        pids = [set(play.starts()) for play in plays]
        assert [len(found) for found in pids] == [1, 1]
        assert [{play.servers_asked()["0"]} for play in plays] == pids
    finally:
        for play in plays:
            play.end()


@pytest.mark.parametrize(
    ("number", "whom"),
    [
        (signal.SIGINT, "group"),
        (signal.SIGINT, "single"),
        (signal.SIGTERM, "single"),
        (signal.SIGTERM, "group"),
        (signal.SIGKILL, "single"),
        (signal.SIGKILL, "group"),
        (signal.SIGHUP, "group"),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else value,
)
def test_nothing_survives_a_run_by_ten_seconds(
    play: Playground, number: signal.Signals, whom: str
) -> None:
    settings = play.settings("--helpers", "2", "--stubborn", idle_seconds=600.0)
    run = play.snakemake(settings, "--cores", "2", shards=2, seconds=3.0)
    leased(play, 2)
    # Snakemake, two jobs, supervisor, keeper, server, two helpers.
    assert len(play.survivors()) >= 8
    (os.killpg if whom == "group" else os.kill)(run.pid, number)
    # INT and TERM to Snakemake alone let it finish its running jobs.
    run.wait(timeout=20)
    ended(play)

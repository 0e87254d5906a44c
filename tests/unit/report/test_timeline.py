"""Times of a run: from benchmark files and logs, of the last run alone."""

import os
import shutil
import time
from functools import partial
from pathlib import Path

import pytest
from results_tree import make_results

from draftstates.paths import Results
from draftstates.records import Plan
from draftstates.report.timeline import timeline


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return make_results(tmp_path)


def test_jobs_and_stages_are_those_of_the_benchmark_files(plan: Plan, tmp_path: Path) -> None:
    found = timeline(Results(tmp_path), plan)
    assert found["stages"] == {
        "server": {"jobs": 1, "seconds": 40.0},
        "extract": {"jobs": 2, "seconds": 36.0},
        "verify": {"jobs": 2, "seconds": 4.0},
    }
    stages = [job["stage"] for job in found["jobs"]]
    assert stages == ["server", "extract", "extract", "verify", "verify"]
    first = next(job for job in found["jobs"] if job["stage"] == "extract")
    assert first["end"] - first["start"] == pytest.approx(18)
    assert [each["bytes"] for each in found["disk"]] == [
        plan.shards[0].bytes,
        plan.shards[0].bytes + plan.shards[1].bytes,
    ]
    assert found["earlier"] == 0


def test_a_job_that_captures_verifies_and_rewrites_a_shard_counts_as_its_capture(
    plan: Plan, tmp_path: Path
) -> None:
    results = Results(tmp_path)
    for shard in plan.shards:
        names = [
            results.benchmark(plan.capture_folder, stage, shard.shard_id)
            for stage in ("extract", "verify", "compact")
        ]
        names[2].parent.mkdir(exist_ok=True)
        names[0].rename(names[2])
        names[1].unlink()
    found = timeline(results, plan)
    assert found["stages"]["compact"] == {"jobs": 2, "seconds": 36.0}
    assert [job["stage"] for job in found["jobs"]] == ["server", "compact", "compact"]
    assert len(found["disk"]) == 2 and found["writing"]


def test_rates_hold_the_tokens_of_the_servers_log(plan: Plan, tmp_path: Path) -> None:
    """A job's log of Slurm, beside it, names no batch."""
    (Results(tmp_path).server_state / "server.slurm.log").write_text("server at http://node:1\n")
    found = timeline(Results(tmp_path), plan)
    assert {row["server"] for row in found["rates"]} == {"server"}
    tokens = sum(row["per_second"] * (row["end"] - row["start"]) for row in found["rates"])
    assert tokens == pytest.approx(sum(40 + at for at in range(0, 40, 4)), rel=0.01)
    assert max(row["queue"] for row in found["rates"]) == 2


@pytest.mark.parametrize("hours", [5.5, -8, 0])
def test_a_log_of_another_time_zone_gives_the_same_rates(
    plan: Plan, tmp_path: Path, hours: float
) -> None:
    """A container may log in UTC, whatever the host's time zone is."""
    log = Results(tmp_path).server_log
    same, written = timeline(Results(tmp_path), plan)["rates"], log.stat().st_mtime
    log.write_text("".join(map(partial(moved, seconds=3600 * hours), log.open())))
    os.utime(log, (written, written))
    assert timeline(Results(tmp_path), plan)["rates"] == same


def moved(line: str, *, seconds: float) -> str:
    """Return a line of a log whose clock differs."""
    at = time.mktime(time.strptime(line[1:20], "%Y-%m-%d %H:%M:%S")) + seconds
    return f"[{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at))}{line[20:]}"


def test_a_clock_that_goes_back_loses_no_tokens(plan: Plan, tmp_path: Path) -> None:
    log = Results(tmp_path).server_log
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*lines[:5], *(moved(line, seconds=-10) for line in lines[5:])]))
    rates = timeline(Results(tmp_path), plan)["rates"]
    assert all(row["per_second"] >= 0 and row["end"] > row["start"] for row in rates)
    tokens = sum(row["per_second"] * (row["end"] - row["start"]) for row in rates)
    assert tokens == pytest.approx(sum(40 + at for at in range(0, 40, 4)), rel=0.01)


def test_a_log_of_no_job_of_the_run_is_not_drawn(plan: Plan, tmp_path: Path) -> None:
    log = Results(tmp_path).server_log
    log.write_text("".join(moved(line, seconds=90_000) for line in log.open()))
    os.utime(log, (time.time() + 90_000,) * 2)
    rates = timeline(Results(tmp_path), plan)["rates"]
    assert {row["server"] for row in rates} == {"all servers"}


@pytest.mark.parametrize("seconds", ["nan", "inf", "-3", "-"])
def test_a_benchmark_without_a_time_is_left_out(plan: Plan, tmp_path: Path, seconds: str) -> None:
    results = Results(tmp_path)
    path = results.benchmark(plan.capture_folder, "extract", plan.shards[0].shard_id)
    path.write_text(f"s\th:m:s\n{seconds}\t0:00:18\n")
    assert timeline(results, plan)["stages"]["extract"] == {"jobs": 1, "seconds": 18.0}


def test_the_rates_of_many_servers_are_few(plan: Plan, tmp_path: Path) -> None:
    log = Results(tmp_path).server_log
    for number in range(300):
        shutil.copy2(log, log.with_name(f"server.{number}.log"))
    rates = timeline(Results(tmp_path), plan)["rates"]
    assert len({row["server"] for row in rates}) == 301 and len(rates) < 301 * 14
    tokens = sum(row["per_second"] * (row["end"] - row["start"]) for row in rates)
    assert tokens == pytest.approx(301 * sum(40 + at for at in range(0, 40, 4)), rel=0.05)


def test_without_logs_each_shard_has_its_mean_rate(plan: Plan, tmp_path: Path) -> None:
    Results(tmp_path).server_log.unlink()
    found = timeline(Results(tmp_path), plan)
    tokens = sum(row["per_second"] * (row["end"] - row["start"]) for row in found["rates"])
    assert tokens == pytest.approx(sum(shard.tokens for shard in plan.shards), rel=0.01)
    assert {row["queue"] for row in found["rates"]} == {None}


def test_the_disks_rate_holds_the_bytes_of_the_shards(plan: Plan, tmp_path: Path) -> None:
    writing = timeline(Results(tmp_path), plan)["writing"]
    written = sum(row["per_second"] * (row["end"] - row["start"]) for row in writing)
    assert written == pytest.approx(sum(shard.bytes for shard in plan.shards), rel=0.01)


def test_starts_and_restarts_are_events(plan: Plan, tmp_path: Path) -> None:
    log = Results(tmp_path).server_state / "supervisor.log"
    now, before = (time.localtime(time.time() - age) for age in (30, 5000))
    log.write_text(
        f"{time.strftime('%F %T', before)} replica 0 is started again\n"
        f"{time.strftime('%F %T', now)} replica 1 is started again\n"
    )
    events = [event["what"] for event in timeline(Results(tmp_path), plan)["events"]]
    assert events == ["start asked for", "self-test passed", "replica 1 started again"]


def test_jobs_of_earlier_runs_and_other_plans_are_left_out(plan: Plan, tmp_path: Path) -> None:
    results = Results(tmp_path)
    first = results.benchmark(plan.capture_folder, "extract", plan.shards[0].shard_id)
    os.utime(first, (time.time() - 9000,) * 2)
    other = results.benchmark(plan.capture_folder, "extract", "f" * 32)
    other.write_text(first.read_text())
    found = timeline(results, plan)
    assert found["earlier"] == 1
    extracted = [job["name"] for job in found["jobs"] if job["stage"] == "extract"]
    assert extracted == [plan.shards[1].shard_id]


def test_a_run_without_benchmark_files_has_no_times(plan: Plan, tmp_path: Path) -> None:
    results = Results(tmp_path)
    for path in results.benchmark("x").parent.rglob("*.tsv"):
        path.write_text("")
    found = timeline(results, plan)
    assert (
        found["jobs"]
        == found["rates"]
        == found["writing"]
        == found["disk"]
        == found["events"]
        == []
    )
    assert found["stages"] == {}

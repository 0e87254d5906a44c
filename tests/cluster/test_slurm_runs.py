"""Real runs of Snakemake on a real Slurm, with stub servers: losses are made up for.

No job is left behind.
"""

import os
import signal
import stat
import subprocess
from collections import Counter

import pytest
from cluster_harness import HEARTBEAT_SECONDS, Cluster
from lease_harness import ended, eventually, find, leased


def ready(cluster: Cluster, count: int) -> None:
    """Wait until so many servers are ready: one that still loads is started with the others."""
    eventually(
        lambda: cluster.log().count("is ready") >= count, within=60, what=f"{count} servers ready"
    )


def test_two_server_jobs_share_the_shards_and_both_are_cancelled_at_the_end(
    cluster: Cluster,
) -> None:
    settings = cluster.settings("--delay", "1", replicas=2)
    run = cluster.snakemake(settings, shards=4, seconds=3.0)
    leased(cluster.play, 2, within=300)
    assert len(cluster.jobs("gpu")) == 2
    (folder,) = cluster.play.folder.glob("state/run-*")
    private = [
        path
        for path in (folder, *folder.rglob("*"), *cluster.play.folder.glob("server*.log"))
        if path.name != "stop"
    ]
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in private} == {0}
    assert run.wait() == 0, cluster.play.said()
    asked = Counter(cluster.play.servers_asked().values())
    assert len(cluster.play.starts()) == 2
    assert sorted(asked) == sorted(cluster.play.starts())
    # Which shards find both ready depends on Slurm; `test_lease_replicas.py` has the choice.
    assert sum(asked.values()) == 4
    eventually(lambda: not cluster.jobs(), within=10, what="no job is left")
    assert not list(cluster.play.folder.glob("state/run-*"))


def test_nothing_stale_submits_no_server(cluster: Cluster) -> None:
    (cluster.play.folder / "out").mkdir()
    for i in range(2):
        (cluster.play.folder / f"out/{i}.txt").write_text("{}")
    assert cluster.snakemake(cluster.settings(), shards=2).wait() == 0, cluster.play.said()
    assert not (cluster.play.folder / "state").exists()


def test_a_cancelled_server_moves_its_work_to_the_other_and_is_started_again_alone(
    cluster: Cluster,
) -> None:
    settings = cluster.settings(replicas=2)
    run = cluster.snakemake(settings, "--retries", "2", shards=4, seconds=6.0)
    leased(cluster.play, 2, within=300)
    ready(cluster, 2)
    first, second = sorted(cluster.jobs("gpu"), key=int)
    subprocess.run(["scancel", first], check=True)
    assert run.wait() == 0, cluster.play.said() + cluster.log()
    assert len(cluster.play.starts()) == 3
    assert f"replica 0 has failed: server job {first}" in cluster.log()
    assert f"server job {second}" not in cluster.log()


def test_the_only_server_cancelled_in_the_middle_is_started_again_for_the_retries(
    cluster: Cluster,
) -> None:
    run = cluster.snakemake(cluster.settings(), "--retries", "2", shards=2, seconds=6.0)
    leased(cluster.play, 2, within=300)
    subprocess.run(["scancel", *cluster.jobs("gpu")], check=True)
    assert run.wait() == 0, cluster.play.said() + cluster.log()
    assert len(cluster.play.starts()) == 2


def test_a_cancelled_client_costs_its_own_shard_alone(cluster: Cluster) -> None:
    run = cluster.snakemake(cluster.settings(), "--retries", "1", shards=3, seconds=6.0)
    leased(cluster.play, 3, within=300)
    subprocess.run(["scancel", min(cluster.jobs("cpu"), key=int)], check=True)
    assert run.wait() == 0, cluster.play.said()
    assert len(cluster.play.starts()) == 1
    assert cluster.play.said().count("has been submitted with SLURM jobid") == 4


@pytest.mark.parametrize("also_the_supervisor", [False, True])
def test_no_job_is_left_after_snakemake_is_killed(
    cluster: Cluster, also_the_supervisor: bool
) -> None:
    run = cluster.snakemake(cluster.settings("--helpers", "1"), shards=2, seconds=600.0)
    leased(cluster.play, 2, within=300)
    assert len(cluster.jobs()) == 3
    # This looks as if the machine of both processes had died.
    if also_the_supervisor:
        os.kill(find(cluster.play, "server.supervisor")[0], signal.SIGKILL)
    run.kill()
    run.wait()
    eventually(lambda: not cluster.jobs(), within=HEARTBEAT_SECONDS + 10, what="no job is left")
    ended(cluster.play, within=5)


def test_no_job_is_left_after_an_interrupt(cluster: Cluster) -> None:
    run = cluster.snakemake(cluster.settings(), shards=2, seconds=600.0)
    leased(cluster.play, 2, within=300)
    os.killpg(run.pid, signal.SIGINT)
    run.wait(timeout=30)
    eventually(lambda: not cluster.jobs(), within=15, what="no job is left")


def test_a_partition_that_is_down_is_named_and_costs_no_waiting(cluster: Cluster) -> None:
    subprocess.run(["scontrol", "update", "PartitionName=gpu", "State=DOWN"], check=True)
    run = cluster.snakemake(cluster.settings(), shards=1)
    assert run.wait(timeout=90) == 1
    assert "cannot start: PartitionDown" in (cluster.play.folder / "logs/0.log").read_text()
    assert not cluster.play.starts()
    eventually(lambda: not cluster.jobs(), within=10, what="no job is left")

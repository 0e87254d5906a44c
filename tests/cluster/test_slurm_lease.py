"""The lease on server jobs, without Snakemake: assignment, replacement and end of servers."""

import os
import signal
import subprocess
import sys
import time

import pytest
from cluster_harness import HEARTBEAT_SECONDS, SBATCH, Cluster
from lease_harness import asked, eventually

from draftstates.errors import UserError
from draftstates.server.lease import lease


def with_time_limit(minutes: int) -> list[str]:
    return [argument for argument in SBATCH if not argument.startswith("--time")] + [
        f"--time={minutes}"
    ]


def test_before_its_time_limit_a_server_takes_no_more_work_and_another_takes_over(
    cluster: Cluster,
) -> None:
    settings = cluster.settings(sbatch=with_time_limit(1), slurm={"drain_seconds": 45.0})
    with lease(settings) as old:
        first = asked(old)["pid"]

        def moved() -> bool:
            with lease(settings) as address:
                return asked(address)["pid"] != first

        eventually(moved, within=40, what="a new server has taken over")
        # The old server may finish the requests that it has begun.
        assert asked(old)["pid"] == first
        assert len(cluster.jobs("gpu")) == 2
    eventually(
        lambda: len(cluster.jobs("gpu")) == 1,
        within=10,
        what="the old server, done with its work, is cancelled",
    )
    assert "has failed" not in cluster.log()


def test_a_time_limit_that_leaves_no_time_for_work_is_named(cluster: Cluster) -> None:
    settings = cluster.settings(sbatch=with_time_limit(1), slurm={"drain_seconds": 90.0})
    with (
        pytest.raises(
            UserError,
            match=r"has (60|59|58|57) s left .*it takes no work in the last 90 s: raise --time",
        ),
        lease(settings),
    ):
        pass


def test_idle_servers_end_but_not_before_as_long_as_their_start_took(cluster: Cluster) -> None:
    settings = cluster.settings("--delay", "5", idle_seconds=0.5)
    with lease(settings) as address:
        first = asked(address)["pid"]
    time.sleep(3.0)
    with lease(settings) as address:
        assert asked(address)["pid"] == first
    eventually(lambda: not cluster.jobs(), within=15, what="the idle server has ended")
    # as well as the capture, a server that answers is a job of Slurm
    with lease(settings.model_copy(update={"kind": "generate"})) as address:
        assert asked(address)["pid"] != first
        assert len(cluster.jobs()) == 1


def test_a_server_that_cannot_start_is_told_with_its_last_lines_and_without_its_key(
    cluster: Cluster,
) -> None:
    with (
        pytest.raises(
            UserError,
            match=(
                r"(?s)server job \d+ on .*exited with status 3.*line 99\nno such model api-key:"
                r" <api key>"
            ),
        ),
        lease(cluster.settings("--break", replicas=2)),
    ):
        pass
    eventually(lambda: not cluster.jobs(), within=10, what="no job is left")


def test_a_server_that_fails_its_selftest_is_given_to_nobody(cluster: Cluster) -> None:
    settings = cluster.settings(
        selftest=[sys.executable, "-c", "import sys; sys.exit('the rows differ')"]
    )
    with (
        pytest.raises(UserError, match=r"(?s)failed its self-test \(status 1\):\nthe rows differ"),
        lease(settings),
    ):
        pass
    eventually(lambda: not cluster.jobs(), within=10, what="no job is left")


def test_what_slurm_refuses_is_told_in_its_words(cluster: Cluster) -> None:
    settings = cluster.settings(sbatch=["--partition=nowhere"])
    with (
        pytest.raises(
            UserError, match=r"(?s)sbatch --partition=nowhere failed: .*invalid partition"
        ),
        lease(settings),
    ):
        pass


def test_a_server_that_dies_under_a_lease_is_in_the_error(cluster: Cluster) -> None:
    with (
        pytest.raises(
            UserError, match=r"(?s)refused.*the server was ended by SIGKILL; the last lines"
        ),
        lease(cluster.settings()) as address,
    ):
        os.kill(asked(address)["pid"], signal.SIGKILL)
        raise ConnectionError("refused")


def test_an_interface_that_a_node_does_not_have_is_named(cluster: Cluster) -> None:
    settings = cluster.settings(slurm={"interface": "ib7"})
    with (
        pytest.raises(
            UserError, match="server.slurm.interface: ib7 has no IPv4 address on .*; found .*lo"
        ),
        lease(settings),
    ):
        pass


def test_a_client_killed_without_a_word_counts_no_longer(cluster: Cluster) -> None:
    settings = cluster.settings(replicas=2)
    with lease(settings) as kept:
        client = cluster.play.client(settings, stdout=subprocess.PIPE)
        assert client.stdout is not None
        assert client.stdout.readline().startswith("leased")
        client.kill()
        client.wait()
        # One lease on each server beside the dead client's.
        with lease(settings), lease(settings):
            pass
        eventually(
            lambda: f"process {client.pid}" in cluster.log(),
            within=HEARTBEAT_SECONDS + 3,
            what="the dead client is noticed",
        )
        with lease(settings) as other:
            assert other.url != kept.url

"""A server job in an image: it leaves nothing of its server, however its run ends."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from container_harness import traces
from lease_harness import Playground, eventually
from test_container_endings import contained, gone
from workflow_copy import REPOSITORY

sys.path.append(str(REPOSITORY / "tests/cluster"))

from cluster_harness import HEARTBEAT_SECONDS, Cluster  # noqa: E402

SCRIPT = REPOSITORY / "tests/cluster/slurm.sh"


@pytest.fixture(scope="module")
def slurm() -> Iterator[None]:
    missing = [
        name
        for name in ("slurmctld", "slurmd", "munged")
        if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    ]
    if missing:
        pytest.skip(f"needs Slurm as tests/cluster/install.sh installs it; missing: {missing}")
    subprocess.run([SCRIPT, "start"], check=True)
    yield
    subprocess.run([SCRIPT, "stop"], check=True)


@pytest.fixture
def cluster(slurm: None, play: Playground) -> Cluster:
    # An earlier test on this Slurm may have taken the partition down.
    subprocess.run(["scontrol", "update", "PartitionName=gpu", "State=UP"], check=True)
    return Cluster(play)


def test_a_server_job_ends_with_its_run_when_snakemake_is_killed(
    cluster: Cluster, images: dict[str, Path]
) -> None:
    local = contained(cluster.play, images["sglang"], "--helpers", "1")
    fields = {name: getattr(local, name) for name in ("command", "image", "image_args", "scratch")}
    settings = cluster.settings().model_copy(update=fields)
    run = cluster.snakemake(settings, shards=1, seconds=600.0)
    log = cluster.play.folder / "logs/0.log"
    eventually(
        lambda: log.exists() and "leased" in log.read_text(),
        within=300,
        what=f"a job has a server; {cluster.play.said()}",
    )
    assert [line for line in traces(images["sglang"].name) if "runtime parent" in line]
    run.kill()
    run.wait(timeout=60)
    eventually(lambda: not cluster.jobs(), within=HEARTBEAT_SECONDS + 20, what="no job is left")
    gone(cluster.play, images["sglang"])

"""Slurm cluster of this one machine, for the session."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_harness import Cluster
from lease_harness import Playground

SCRIPT = Path(__file__).parent / "slurm.sh"
NEEDED = ("slurmctld", "slurmd", "munged")


@pytest.fixture(scope="session")
def slurm() -> Iterator[None]:
    """Start Slurm; without its packages the tests here are skipped by name."""
    missing = [
        name for name in NEEDED if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    ]
    if missing or os.geteuid() != 0:
        pytest.skip(
            "needs root and Slurm (apt-get install --no-install-recommends slurm-wlm munge);"
            f" missing: {missing or 'root'}"
        )
    subprocess.run([SCRIPT, "start"], check=True)
    yield
    subprocess.run([SCRIPT, "stop"], check=True)


@pytest.fixture
def cluster(slurm: None, play: Playground, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Yield a folder that all nodes see, here the same one; leave no job afterwards."""
    made = Cluster(play)
    monkeypatch.setenv("PYTHONPATH", play.environment()["PYTHONPATH"])
    subprocess.run(["scontrol", "update", "PartitionName=gpu", "State=UP"], check=True)
    yield made
    subprocess.run(["scancel", "--user", "root"], check=True)

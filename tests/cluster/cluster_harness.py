"""Stub servers as Slurm jobs, and what Slurm says of them."""

import dataclasses
import subprocess
from typing import Any

from lease_harness import Playground

from draftstates.server.settings import ServerSettings, SlurmSettings

HEARTBEAT_SECONDS = 8.0
SBATCH = ["--partition=gpu", "--gpus=test:1", "--mem=500M", "--time=60", "--cpus-per-task=1"]
# the plug-in looks first after so many seconds, then ten seconds later each time
FLAGS = [
    *("--executor", "slurm", "--jobs", "6", "--slurm-status-command", "squeue", "--latency-wait", "20"),
    *("--slurm-init-seconds-before-status-checks", "15", "--seconds-between-status-checks", "1"),
    *("--default-resources", "slurm_partition=cpu", "slurm_account=none", "mem_mb=500", "runtime=20"),
]


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A playground whose servers are Slurm jobs in partition gpu and whose other jobs go to partition cpu."""

    play: Playground

    def settings(self, *stub: str, sbatch: list[str] = SBATCH, slurm: dict[str, Any] | None = None, **changes: Any) -> ServerSettings:
        quick = {"heartbeat_seconds": HEARTBEAT_SECONDS, "poll_seconds": 1.0, "drain_seconds": 5.0, **(slurm or {})}
        return self.play.settings(
            *stub, launcher="slurm", slurm=SlurmSettings(sbatch=sbatch, **quick), **{"idle_seconds": 600.0, **changes}
        )

    def snakemake(self, settings: ServerSettings, *flags: str, **options: Any) -> subprocess.Popen:
        return self.play.snakemake(settings, *FLAGS, *flags, **options)

    def jobs(self, partition: str | None = None) -> dict[str, str]:
        """The present jobs: id and state, also those that are ending."""
        where = ["--partition", partition] if partition else []
        said = subprocess.run(["squeue", "--noheader", "--format=%i %T", *where], check=True, capture_output=True, text=True).stdout
        return dict(line.split() for line in said.splitlines())

    def log(self) -> str:
        """What the supervisor of the servers says."""
        return (self.play.folder / "state/supervisor.log").read_text()

"""Stub servers as Slurm jobs, and Slurm's view of them."""

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

from lease_harness import Playground

from draftstates.config import Slurm
from draftstates.server.settings import ServerSettings

HEARTBEAT_SECONDS = 8.0
SBATCH = ["--partition=gpu", "--gpus=test:1", "--mem=500M", "--time=60", "--cpus-per-task=1"]
FLAGS = [
    *(
        "--executor",
        "slurm",
        "--jobs",
        "6",
        "--slurm-status-command",
        "squeue",
        "--latency-wait",
        "20",
    ),
    *(
        "--default-resources",
        "slurm_partition=cpu",
        "slurm_account=none",
        "mem_mb=500",
        "runtime=20",
    ),
]


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Playground whose servers are Slurm jobs in partition gpu, its other jobs in partition cpu."""

    play: Playground

    def __post_init__(self) -> None:
        self.play.first = Path(__file__).with_name("elsewhere")

    def settings(
        self,
        *stub: str,
        sbatch: list[str] = SBATCH,
        slurm: dict[str, Any] | None = None,
        **changes: Any,
    ) -> ServerSettings:
        quick = {
            "heartbeat_seconds": HEARTBEAT_SECONDS,
            "poll_seconds": 1.0,
            "drain_seconds": 5.0,
            **(slurm or {}),
        }
        return self.play.settings(
            *stub,
            launcher="slurm",
            slurm=Slurm(sbatch=sbatch, **quick),
            **{"idle_seconds": 600.0, **changes},
        )

    def snakemake(self, settings: ServerSettings, *flags: str, **options: Any) -> subprocess.Popen:
        return self.play.snakemake(settings, *FLAGS, *flags, **options)

    def jobs(self, partition: str | None = None) -> dict[str, str]:
        """Return id and state of the present jobs, also of those that are ending."""
        where = ["--partition", partition] if partition else []
        said = subprocess.run(
            ["squeue", "--noheader", "--format=%i %T", *where],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        return dict(line.split() for line in said.splitlines())

    def log(self) -> str:
        """Return the output of the servers' supervisor."""
        return (self.play.folder / "state/supervisor.log").read_text()

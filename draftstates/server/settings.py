"""How a server is started, or found."""

import dataclasses
import hashlib
import json
from pathlib import Path

from draftstates.errors import UserError

LAUNCHERS = ("local", "slurm", "external")
_PATHS = ("state", "log", "image", "scratch", "api_key_file")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    """How server jobs are submitted and watched.

    Args:
        sbatch: arguments of sbatch for one server: partition, account, GPUs, memory, time limit.
        interface: network interface whose address the server binds; None for the one by which its node reaches the run's host.
        drain_seconds: so long before its time limit a job gets no more work, and another one is submitted.
        queue_seconds: longest wait for a job to start.
        heartbeat_seconds: who has not been heard of for so long counts as dead.
        poll_seconds: between two looks at the queue.
    """

    sbatch: list[str] = dataclasses.field(default_factory=list)
    interface: str | None = None
    drain_seconds: float = 1800.0
    queue_seconds: float = 86400.0
    heartbeat_seconds: float = 120.0
    poll_seconds: float = 15.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What a lease needs to know about its server.

    Args:
        launcher: `local` starts processes on this machine, `slurm` jobs of their own, `external` names a server that runs already.
        state: folder of locks and address: for `local` on a disk of this node (`flock` does not reach other nodes), for `slurm` on
            one that all nodes share.
        log: the servers' output; with several replicas, one file each (`server.0.log`, ...).
        command: argv of one server. Placeholders: `{host}` and `{port}` to bind; `{key_config}`, a YAML file that says
            `api-key: ...`; `{replica}`, counted from 0; `{python}`, the Python that has the server.
        env: variables added to the environment of the server and of the self-test.
        image: container image in which `command` runs, through `apptainer exec` with `image_args`.
        scratch: folder for what the container writes to /tmp and to its home folder.
        url, api_key_file: address (external); the file holds the key alone.
        selftest: argv, run once a server is up and before anyone gets its address; `{address}` is the file to read it
            from, `{python}` this Python. A non-zero exit status refuses the server.
        replicas: servers to start; a lease is on one of them.
        gpus_each: GPUs that each of several local replicas has to itself; 0 leaves the choice to the server.
        restarts: how often a replica that fails while others serve is started again.
        start_seconds: time from the start of a server until its self-test has passed.
        idle_seconds: how long servers that nobody leases stay; with `slurm` at least as long as their start took.
        stop_seconds: time between TERM and KILL.

    Raises:
        UserError: an unknown launcher, or a launcher without what it needs.
    """

    state: Path
    log: Path
    launcher: str = "local"
    command: list[str] = dataclasses.field(default_factory=list)
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    image: Path | None = None
    image_args: list[str] = dataclasses.field(default_factory=list)
    scratch: Path | None = None
    url: str | None = None
    api_key_file: Path | None = None
    selftest: list[str] = dataclasses.field(default_factory=list)
    replicas: int = 1
    gpus_each: int = 0
    restarts: int = 2
    slurm: SlurmSettings = dataclasses.field(default_factory=SlurmSettings)
    start_seconds: float = 900.0
    idle_seconds: float = 30.0
    stop_seconds: float = 5.0

    def __post_init__(self) -> None:
        if self.launcher not in LAUNCHERS:
            raise UserError(f"server.launcher must be one of {list(LAUNCHERS)}, found {self.launcher!r}")
        if self.launcher == "external" and not self.url:
            raise UserError("server.url is missing: the launcher `external` needs the address of a server that runs already")
        if self.launcher != "external" and not self.command:
            raise UserError(f"the launcher `{self.launcher}` needs the command of a server, found none")
        if self.replicas < 1:
            raise UserError(f"server.replicas must be 1 or more, found {self.replicas}")

    @property
    def fingerprint(self) -> str:
        """32 hex digits: equal for settings that one running server can serve alike."""
        fields = json.loads(self.to_json())
        for name in ("state", "log", "start_seconds", "idle_seconds", "stop_seconds"):
            del fields[name]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]

    def log_of(self, replica: int) -> Path:
        """The log of one replica."""
        return self.log if self.replicas == 1 else self.log.with_suffix(f".{replica}{self.log.suffix}")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), default=str, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ServerSettings":
        fields = json.loads(text)
        for name in _PATHS:
            if fields.get(name) is not None:
                fields[name] = Path(fields[name])
        fields["slurm"] = SlurmSettings(**fields["slurm"])
        return cls(**fields)

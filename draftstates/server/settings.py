"""How a server is started, or found."""

import dataclasses
import hashlib
import json
from pathlib import Path

from draftstates.errors import UserError

LAUNCHERS = ("local", "external")
_PATHS = ("state", "log", "image", "api_key_file")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What a lease needs to know about its server.

    Args:
        launcher: `local` starts processes on this machine, `external` names a server that runs already.
        state: folder of locks and address, on a disk of this node (`flock` does not reach other nodes).
        log: the servers' output; with several replicas, one file each (`server.0.log`, ...).
        command: argv of one server (local). Placeholders: `{port}`; `{key_config}`, a YAML file that says `api-key: ...`;
            `{replica}`, counted from 0.
        env: variables added to the environment of the server and of the self-test.
        image: container image in which `command` runs, through `apptainer exec` with `image_args`.
        url, api_key_file: address (external); the file holds the key alone.
        selftest: argv, run once the server is up and before anyone gets the address; `{address}` is the file to read it
            from. A non-zero exit status refuses the server.
        start_seconds: time until every replica is up and the self-test has passed.
        idle_seconds: how long a server that nobody leases stays.
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
    url: str | None = None
    api_key_file: Path | None = None
    selftest: list[str] = dataclasses.field(default_factory=list)
    replicas: int = 1
    start_seconds: float = 900.0
    idle_seconds: float = 30.0
    stop_seconds: float = 5.0

    def __post_init__(self) -> None:
        if self.launcher not in LAUNCHERS:
            raise UserError(f"server.launcher must be one of {list(LAUNCHERS)}, found {self.launcher!r}")
        if self.launcher == "external" and not self.url:
            raise UserError("server.url is missing: the launcher `external` needs the address of a server that runs already")
        if self.launcher == "local" and not self.command:
            raise UserError("the launcher `local` needs the command of a server, found none")
        if self.replicas < 1:
            raise UserError(f"server.replicas must be 1 or more, found {self.replicas}")

    @property
    def fingerprint(self) -> str:
        """32 hex digits: equal for settings that one running server can serve alike."""
        fields = json.loads(self.to_json())
        for name in ("state", "log", "start_seconds", "idle_seconds", "stop_seconds"):
            del fields[name]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), default=str, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ServerSettings":
        fields = json.loads(text)
        for name in _PATHS:
            if fields.get(name) is not None:
                fields[name] = Path(fields[name])
        return cls(**fields)

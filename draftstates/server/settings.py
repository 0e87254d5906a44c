"""The settings by which a server is started, or found."""

import hashlib
import json
from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from draftstates.config import LeaseOptions

# a server that captures, with the plug-in and a self-test; or a plain one, which answers prompts
ServerKind = Literal["capture", "generate"]


class ServerSettings(LeaseOptions):
    """What a lease needs to know about its server: keys of the configuration, and what the workflow
    adds to them.

    Attributes:
        kind: what the server is for. A run has servers of one kind at a time.
        state: folder of locks and address: for `local` on a disk of this node (`flock` does not
            reach other nodes), for `slurm` on a disk that all nodes share.
        log: the servers' output; with several replicas, one file each (`server.0.log`, ...).
        command: argv of one server. Placeholders: `{host}` and `{port}` to bind; `{key_config}`, a
            YAML file that holds `api-key: ...`; `{replica}`, counted from 0; `{python}`, the Python
            that has the server.
        env: variables that are added to the environment of the server and of the self-test.
        image: container image in which `command` runs, through `apptainer exec` with `image_args`.
        scratch: folder for files that the container writes to /tmp and to its home folder.
        selftest: argv of the self-test, which runs once a server answers and before a client gets
            its address; `{address}` is the file with the address, `{python}` this Python. A
            non-zero exit status refuses the server.
        gpus_each: GPUs of each local replica; 0 leaves the choice to the server.
    """

    kind: ServerKind = "capture"
    state: Path
    log: Path
    command: list[str] = []
    env: dict[str, str] = {}
    image: Path | None = None
    image_args: list[str] = []
    scratch: Path | None = None
    selftest: list[str] = []
    gpus_each: int = 0

    @model_validator(mode="after")
    def _need_a_command(self) -> Self:
        if self.launcher != "external" and not self.command:
            raise ValueError(
                f"the launcher `{self.launcher}` needs the command of a server, found none"
            )
        return self

    @property
    def fingerprint(self) -> str:
        """32 hex digits, equal for all settings that one running server satisfies."""
        others = {"state", "log", "start_seconds", "idle_seconds", "stop_seconds"}
        fields = self.model_dump(mode="json", exclude=others)
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]

    def log_of(self, replica: int) -> Path:
        """Return the path of one replica's log."""
        return (
            self.log if self.replicas == 1 else self.log.with_suffix(f".{replica}{self.log.suffix}")
        )

    def to_json(self) -> str:
        """Return the settings as JSON text."""
        return self.model_dump_json(indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the settings in a text of `to_json`."""
        # a validator of a path makes a Path, which pydantic does not accept while it reads JSON
        return cls.model_validate(json.loads(text), strict=False)

"""The run folder: the files by which a run's supervisor, server jobs and clients agree, on a file
system that all their nodes see.
"""

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

RUN_FOLDER_VARIABLE = "DRAFTSTATES_RUN_FOLDER"
_WIDTH = 20


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The paths in the run folder, which only its user may enter.

    The subfolder `servers` holds a `ServerFolder` for each server.

    Attributes:
        heartbeat: changes as long as the supervisor lives.
        host: name of the host that the supervisor runs on.
        key_config: the servers' key.
        settings: settings of the present servers.
        status: state of the servers, for clients that wait.
        leases: folder of the leases, see `leases.py`.
    """

    folder: Path

    @property
    def heartbeat(self) -> Path:
        return self.folder / "heartbeat"

    @property
    def host(self) -> Path:
        return self.folder / "host"

    @property
    def key_config(self) -> Path:
        return self.folder / "key.yaml"

    @property
    def settings(self) -> Path:
        return self.folder / "settings.json"

    @property
    def status(self) -> Path:
        return self.folder / "status"

    @property
    def leases(self) -> Path:
        return self.folder / "leases"

    def server(self, generation: str) -> "ServerFolder":
        """Return the folder of one server."""
        return ServerFolder(self.folder / "servers" / generation)

    def make(self) -> None:
        """Make the run folder and its subfolders."""
        for folder in (self.folder, self.leases, self.folder / "servers"):
            folder.mkdir(parents=True, mode=0o700)


@dataclasses.dataclass(frozen=True)
class ServerFolder:
    """The paths in the folder of one server.

    Attributes:
        address: exists once the server is ready.
        failed: exists once the server has failed.
        stop: exists once the supervisor has ended the server.
    """

    folder: Path

    @property
    def address(self) -> Path:
        return self.folder / "address.json"

    @property
    def failed(self) -> Path:
        return self.folder / "failed.json"

    @property
    def stop(self) -> Path:
        return self.folder / "stop"


def overwrite(path: Path, content: dict[str, Any]) -> None:
    """Write into an existing file.

    Readers on other nodes see new content of a known file at once, but a new file name only later.

    Raises:
        FileNotFoundError: the file does not exist any more.
    """
    with open(os.open(path, os.O_WRONLY), "w") as file:
        file.write(json.dumps(content) + "\n")


def read_overwritten(path: Path) -> dict[str, Any] | None:
    """Return the content that `overwrite` wrote, or None while it is incomplete."""
    text = path.read_text()
    return json.loads(text) if text.endswith("\n") else None


def beat(path: Path) -> None:
    """Change the content of the file `path`."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write(f"{time.time_ns():0{_WIDTH}}")


class Pulse:
    """A reader of a heartbeat, by changes and its own clock, because the nodes' clocks differ."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content = b""
        self._changed = time.monotonic()

    def silence(self) -> float:
        """Return the seconds since the last change; infinite if the file is gone."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return float("inf")
        # a file server that does not answer says nothing about the heartbeat
        except OSError:
            content = self._content
        if content != self._content:
            self._content, self._changed = content, time.monotonic()
        return time.monotonic() - self._changed

"""The run folder: the files by which a run's supervisor, server jobs and clients agree, on a file system that all their nodes see."""

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
    """Paths in the run folder, which only its user may enter.

    `heartbeat`: changes as long as the supervisor lives. `host`: where it runs. `key_config`: the servers' key. `settings`: those
    of the present servers. `status`: what the servers do, for whoever waits. `leases`: see `leases.py`; `servers`: a folder for
    each server, with `address.json` once it is ready, `failed.json` once it has failed, `stop` once it is told to end.
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
        return ServerFolder(self.folder / "servers" / generation)

    def make(self) -> None:
        for folder in (self.folder, self.leases, self.folder / "servers"):
            folder.mkdir(parents=True, mode=0o700)


@dataclasses.dataclass(frozen=True)
class ServerFolder:
    """Paths in the folder of one server."""

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
    """Write into a file that is there already: readers on other nodes see new content of a known file at once, a new name only later.

    Raises:
        FileNotFoundError: it is gone.
    """
    with open(os.open(path, os.O_WRONLY), "w") as file:
        file.write(json.dumps(content) + "\n")


def read_overwritten(path: Path) -> dict[str, Any] | None:
    """What `overwrite` has written, or None as long as that is not complete."""
    text = path.read_text()
    return json.loads(text) if text.endswith("\n") else None


def beat(path: Path) -> None:
    """Change the file `path`."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write(f"{time.time_ns():0{_WIDTH}}")


class Pulse:
    """Listens to a heartbeat: by its changes and the own clock, since the clocks of nodes differ."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content = b""
        self._changed = time.monotonic()

    def silence(self) -> float:
        """Seconds since the last change that was seen; infinite where the file is gone."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return float("inf")
        except OSError:  # a file server that does not answer is no news
            content = self._content
        if content != self._content:
            self._content, self._changed = content, time.monotonic()
        return time.monotonic() - self._changed

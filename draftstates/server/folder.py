"""The run folder: the files by which a run's supervisor, servers and clients agree.

It lies on a file system that all of them see.
"""

import contextlib
import dataclasses
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from draftstates.files import read_json, write_private
from draftstates.server.processes import Process

RUN_FOLDER_VARIABLE = "DRAFTSTATES_RUN_FOLDER"
_WIDTH = 20


class RunFolder:
    """The paths in the run folder, which only its user may enter.

    Attributes:
        owner: the process with which the run ends, and its host.
        supervisor: the last supervisor.
        heartbeat: changes as long as the supervisor lives; for processes of other machines.
        key_config: the servers' key.
        status: state of the servers, for clients that wait and for the terminal.
        leases: folder of the leases, see `leases.py`.
        lasting: folder of the errors of servers that end in the same way at every start.
        servers: folder with a `ServerFolder` for each server.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.owner = folder / "owner.json"
        self.supervisor = folder / "supervisor.json"
        self.heartbeat = folder / "heartbeat"
        self.key_config = folder / "key.yaml"
        self.status = folder / "status.json"
        self.leases = folder / "leases"
        self.lasting = folder / "lasting"
        self.servers = folder / "servers"

    def server(self, generation: str) -> "ServerFolder":
        """Return the folder of one server."""
        return ServerFolder(self.servers / generation)

    def make(self, owner: Process) -> None:
        """Make the run folder and its subfolders."""
        for folder in (self.folder, self.leases, self.lasting, self.servers):
            folder.mkdir(parents=True, mode=0o700)
        named = {**dataclasses.asdict(owner), "host": socket.gethostname()}
        write_private(self.owner, named)

    def read_owner(self) -> tuple[Process, str]:
        """Return the owner and the name of its host.

        Raises:
            FileNotFoundError: the run folder is gone.
        """
        found = read_json(self.owner)
        if found is None:
            raise FileNotFoundError(self.owner)
        host = found.pop("host")
        return Process(**found), host


class ServerFolder:
    """The paths in the folder of one server.

    Attributes:
        generation: identifies the server in its run.
        settings: settings of the server, for a server job.
        candidate: address for the self-test, which no client has yet.
        address: exists while clients may be given the server.
        failed: exists once the server has failed.
        stop: exists once the supervisor has ended the server.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.generation = folder.name
        self.settings = folder / "settings.json"
        self.candidate = folder / "candidate.json"
        self.address = folder / "address.json"
        self.failed = folder / "failed.json"
        self.stop = folder / "stop"
        self.selftest_log = folder / "selftest.log"


def is_there(path: Path, *, unknown: bool) -> bool:
    """Return whether a path exists, or `unknown` while a file server does not answer."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except OSError:
        return unknown
    return True


def overwrite(path: Path, content: dict[str, Any]) -> None:
    """Write the content of an existing file.

    Readers on other nodes see new content of a known file at once, but a new file name only later.

    Raises:
        FileNotFoundError: the file does not exist any more.
    """
    # a longer text that a full disk has cut off would stay behind this one
    with open(os.open(path, os.O_WRONLY | os.O_TRUNC), "w") as file:
        file.write(json.dumps(content) + "\n")


def read_overwritten(path: Path) -> dict[str, Any] | None:
    """Return the content that `overwrite` wrote, or None while it is incomplete."""
    text = path.read_text()
    return json.loads(text) if text.endswith("\n") else None


def beat(path: Path) -> None:
    """Change the content of the file `path`."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write(f"{time.time_ns():0{_WIDTH}}")


def say(text: str) -> None:
    """Print a line of the log of a supervisor or a server job."""
    # a full disk stops no decision
    with contextlib.suppress(OSError):
        print(f"{time.strftime('%F %T')} {text}", flush=True)


class Pulse:
    """The life of a process: by its number on this machine, elsewhere by its heartbeat.

    A heartbeat is read by changes and by this process's clock, because the nodes' clocks differ.

    Args:
        process: the process.
        heartbeat: file of the heartbeat, which is read for a process of another machine.
    """

    def __init__(self, process: Process, heartbeat: Path) -> None:
        self._process = process
        self._path = heartbeat
        self._content: bytes | None = None
        self._changed = time.monotonic()

    def has_stopped(self, limit: float) -> bool:
        """Return whether the process has ended, or has not been heard of for `limit` seconds."""
        if self._process.is_here:
            return not self._process.is_alive()
        return self.silence() > limit

    def silence(self) -> float:
        """Return the seconds since the last change; infinite once the file is gone."""
        content = self._content
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            # before the first beat there is no file yet
            if self._content is not None:
                return float("inf")
        # a file server that does not answer says nothing about the heartbeat
        except OSError:
            pass
        if content != self._content:
            self._content, self._changed = content, time.monotonic()
        return time.monotonic() - self._changed


def leave_error(run: RunFolder, place: ServerFolder, error: str, *, lasting: bool = False) -> None:
    """Write the error of a server for the supervisor and the clients."""
    # A run that ends removes its owner's name first, then ends its servers and removes the folder.
    # From then on nobody would read the error.
    if run.owner.exists():
        with contextlib.suppress(FileNotFoundError):
            write_private(place.failed, {"error": error, "lasting": lasting})

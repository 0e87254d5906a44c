"""Leases as files: a client asks for a server, and the supervisor answers.

The lease with the id X has three files: `X.json` (the client and the settings of the server that it
asks for), `X.beat` (the client's heartbeat) and `X.grant` (made empty by the client, and filled by
the supervisor).
"""

import contextlib
import dataclasses
import json
import os
import socket
import time
import uuid
from pathlib import Path
from typing import Any

from draftstates.errors import UserError
from draftstates.files import write_private
from draftstates.server.folder import Pulse, beat, overwrite, read_overwritten, say
from draftstates.server.processes import Process
from draftstates.server.settings import ServerSettings

# in the order of removal: a lease without the first file does not count
_SUFFIXES = (".json", ".beat", ".grant")
_REFUSED = "refused"


class Request:
    """A lease as its client sees it.

    Args:
        folder: folder of the leases.
        settings: settings of the server that the client asks for.
        kept: whether a person holds the lease, for as long as that person likes.
    """

    def __init__(self, folder: Path, settings: ServerSettings, *, kept: bool = False) -> None:
        # in the order of their requests
        self._stem = folder / f"{time.time_ns()}-{uuid.uuid4().hex}"
        job = os.environ.get("SLURM_JOB_ID")
        client = f"{socket.gethostname()} process {os.getpid()}{f', job {job}' if job else ''}"
        write_private(self._path(".grant"), "")
        self.beat()
        write_private(
            self._path(".json"),
            {
                "client": client,
                "kept": kept,
                "process": dataclasses.asdict(Process.current()),
                "settings": settings.model_dump(mode="json"),
            },
        )

    def beat(self) -> None:
        """Change the heartbeat once."""
        beat(self._path(".beat"))

    def answer(self) -> dict[str, Any] | None:
        """Return the supervisor's answer, or None without an answer yet."""
        return read_overwritten(self._path(".grant"))

    def give_back(self) -> None:
        """Remove the files of the lease."""
        for suffix in _SUFFIXES:
            with contextlib.suppress(OSError):
                self._path(suffix).unlink()

    def _path(self, suffix: str) -> Path:
        return self._stem.with_suffix(suffix)


@dataclasses.dataclass
class Lease:
    """A client's lease as the supervisor sees it.

    Attributes:
        stem: path of the lease's files without their suffixes.
        client: the client in words, for the log.
        kept: whether a person holds the lease until Ctrl-C.
        process: the client.
        settings: settings of the server that the client asks for.
        pulse: the client's life.
        generation: generation of the granted server; None while the client waits.
    """

    stem: Path
    client: str
    kept: bool
    process: Process
    settings: ServerSettings
    pulse: Pulse
    generation: str | None

    @classmethod
    def read(cls, stem: Path) -> "Lease":
        """Return the lease with these files, which an earlier supervisor may have granted.

        Raises:
            FileNotFoundError: the client has just given the lease back.
            UserError: the request is not one of this draftstates.
        """
        answer = read_overwritten(stem.with_suffix(".grant"))
        path = stem.with_suffix(".json")
        text = path.read_bytes()
        try:
            asked = json.loads(text)
            process = Process(**asked["process"])
            return cls(
                stem,
                asked["client"],
                asked["kept"],
                process,
                ServerSettings.model_validate(asked["settings"], strict=False),
                Pulse(process, stem.with_suffix(".beat")),
                answer.get("generation", _REFUSED) if answer else None,
            )
        except (ValueError, KeyError, TypeError, RecursionError, UserError) as error:
            raise UserError(
                f"{path}: the supervisor of this run does not understand this request for a server"
                f" ({type(error).__name__}: {error}); run the step with the run's own draftstates"
            ) from error

    def grant(self, generation: str, content: dict[str, Any]) -> None:
        """Give the client a server."""
        self._answer({**content, "generation": generation})
        self.generation = generation

    def refuse(self, error: str) -> None:
        """Refuse the lease with an error for the client."""
        self._answer({"error": error})
        self.generation = _REFUSED

    def _answer(self, content: dict[str, Any]) -> None:
        # the client may have just given the lease back
        with contextlib.suppress(FileNotFoundError):
            overwrite(self.stem.with_suffix(".grant"), content)


class Leases:
    """All leases of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Path, Lease] = {}
        # refused leases whose requests cannot be read
        self._damaged: set[Path] = set()
        self.last_there = time.monotonic()

    def look(self) -> None:
        """Find new leases; forget leases that were given back and leases of dead clients."""
        stems = {path.with_suffix("") for path in self._folder.glob("*.json")}
        self._damaged &= stems
        for stem in sorted(stems - self._known.keys() - self._damaged):
            with contextlib.suppress(FileNotFoundError):
                try:
                    self._known[stem] = Lease.read(stem)
                except UserError as error:
                    overwrite(stem.with_suffix(".grant"), {"error": str(error)})
                    self._damaged.add(stem)
        for stem, lease in list(self._known.items()):
            if stem not in stems:
                del self._known[stem]
            elif lease.pulse.has_stopped(lease.settings.slurm.heartbeat_seconds):
                say(f"{lease.client} is gone")
                del self._known[stem]
                for suffix in _SUFFIXES:
                    stem.with_suffix(suffix).unlink(missing_ok=True)
        if self._known:
            self.last_there = time.monotonic()

    def waiting(self) -> list[Lease]:
        """Return the leases without a server."""
        return [lease for lease in self._known.values() if lease.generation is None]

    def keeper(self, generations: set[str]) -> str | None:
        """Return the client by which a person keeps one of these servers up, or None."""
        for lease in self._known.values():
            if lease.kept and lease.generation in generations:
                return lease.client
        return None

    def on(self, generation: str) -> int:
        """Return the number of leases on one server."""
        return sum(lease.generation == generation for lease in self._known.values())


def waiting_stems(folder: Path) -> list[Path]:
    """Return the paths, without suffix, of the leases that no supervisor has answered yet."""
    found = []
    for path in folder.glob("*.json"):
        # given back, or on a file server that does not answer for a moment
        with contextlib.suppress(OSError):
            if not path.with_suffix(".grant").stat().st_size:
                found.append(path.with_suffix(""))
    return found

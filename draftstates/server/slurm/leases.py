"""Leases as files: a client asks for a server, and the supervisor answers.

A lease of id X is `X.json` (what the client wants), `X.beat` (its heartbeat) and `X.grant`, which the client makes empty and the
supervisor fills.
"""

import contextlib
import dataclasses
import json
import time
import uuid
from pathlib import Path
from typing import Any

from draftstates.server.files import write_private
from draftstates.server.settings import ServerSettings
from draftstates.server.slurm.folder import Pulse, beat, overwrite, read_overwritten

_SUFFIXES = (".json", ".beat", ".grant")  # in the order of removal: without the first there is no lease


class Request:
    """A client's own lease."""

    def __init__(self, folder: Path, settings: ServerSettings, *, client: str) -> None:
        self._stem = folder / uuid.uuid4().hex
        write_private(self._path(".grant"), "")
        self.beat()
        write_private(self._path(".json"), {"client": client, "settings": json.loads(settings.to_json())})

    def beat(self) -> None:
        beat(self._path(".beat"))

    def answer(self) -> dict[str, Any] | None:
        """What the supervisor has answered, or None as long as it has not."""
        return read_overwritten(self._path(".grant"))

    def give_back(self) -> None:
        for suffix in _SUFFIXES:
            with contextlib.suppress(OSError):
                self._path(suffix).unlink()

    def _path(self, suffix: str) -> Path:
        return self._stem.with_suffix(suffix)


@dataclasses.dataclass
class Lease:
    """A client's lease as the supervisor sees it; `generation` is that of the server it was given."""

    stem: Path
    client: str
    settings: ServerSettings
    pulse: Pulse
    generation: str | None = None

    def grant(self, generation: str, content: dict[str, Any]) -> None:
        self.generation = generation
        self._answer({**content, "generation": generation})

    def refuse(self, error: str) -> None:
        self.generation = "none"
        self._answer({"error": error})

    def _answer(self, content: dict[str, Any]) -> None:
        with contextlib.suppress(FileNotFoundError):  # it has just been given back
            overwrite(self.stem.with_suffix(".grant"), content)


class Leases:
    """All leases of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Path, Lease] = {}
        self.last_there = time.monotonic()

    def look(self) -> None:
        """Find new ones; forget those given back, and those whose clients are dead."""
        stems = {path.with_suffix("") for path in self._folder.glob("*.json")}
        for stem in stems - self._known.keys():
            with contextlib.suppress(FileNotFoundError):
                asked = json.loads(stem.with_suffix(".json").read_text())
                settings = ServerSettings.from_json(json.dumps(asked["settings"]))
                self._known[stem] = Lease(stem, asked["client"], settings, Pulse(stem.with_suffix(".beat")))
        for stem, lease in list(self._known.items()):
            if stem not in stems:
                del self._known[stem]
            elif lease.pulse.silence() > lease.settings.slurm.heartbeat_seconds:
                print(f"{time.strftime('%F %T')} {lease.client} is gone", flush=True)
                for suffix in _SUFFIXES:
                    stem.with_suffix(suffix).unlink(missing_ok=True)
        if self._known:
            self.last_there = time.monotonic()

    def waiting(self) -> list[Lease]:
        return [lease for lease in self._known.values() if lease.generation is None]

    def on(self, generation: str) -> int:
        """Leases on one server."""
        return sum(lease.generation == generation for lease in self._known.values())

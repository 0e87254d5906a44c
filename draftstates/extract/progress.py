"""Progress of the running extractions, readable by everyone who sees the results folder.

Each extraction writes a small file.
"""

import dataclasses
import json
import time
from pathlib import Path

from draftstates.files import replace_text

_FILE = "progress.json"
_WRITE_SECONDS = 2.0
# longer than a sample takes; a job without news for so long is shown as silent
SILENT_SECONDS = 300.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Running:
    """One extraction under way.

    Attributes:
        done: tokens that are captured, those of prefix recaptures included.
        total: tokens to capture, those of prefix recaptures included.
        started: Unix time of the first request.
        updated: Unix time when the file was written, by a clock that nobody sets meanwhile.
        server: URL of the server that captures.
    """

    shard_id: str
    done: int
    total: int
    started: float
    updated: float
    server: str

    @property
    def rate(self) -> float:
        """Tokens per second since the first request."""
        return self.done / max(self.updated - self.started, 1e-9)


class ProgressFile:
    """Writer of one extraction's `Running` into its building folder, at most every two seconds."""

    def __init__(self, folder: Path, *, shard_id: str, total: int, server: str) -> None:
        self._file = folder / _FILE
        now = time.time()
        self._ahead = now - time.monotonic()
        self.running = Running(
            shard_id=shard_id, done=0, total=total, started=now, updated=now, server=server
        )
        self._write()

    def add(self, tokens: int) -> None:
        written = self.running.updated
        self.running = dataclasses.replace(self.running, done=self.running.done + tokens)
        if self._now() - written > _WRITE_SECONDS:
            self._write()

    def remove(self) -> None:
        """Remove the file: the job is over, and its folder stays."""
        self._file.unlink(missing_ok=True)

    def _now(self) -> float:
        return time.monotonic() + self._ahead

    def _write(self) -> None:
        self.running = dataclasses.replace(self.running, updated=self._now())
        replace_text(self._file, json.dumps(dataclasses.asdict(self.running)))


def running(building: Path) -> list[Running]:
    """Return the jobs under way in a folder of unfinished files, longest running first."""
    found = []
    for file in building.glob(f"*/{_FILE}"):
        try:
            found.append(Running(**json.loads(file.read_text())))
        except (OSError, ValueError, TypeError):
            # The extraction has just ended.
            continue
    return sorted(found, key=lambda each: each.started)

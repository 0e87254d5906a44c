"""How far the running extractions are: each writes a small file, which anyone who sees the results folder can read."""

import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from draftstates.building import BUILDING

_FILE = "progress.json"
_WRITE_SECONDS = 2.0
_SAY_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Running:
    """One extraction under way.

    Attributes:
        done, total: tokens captured and to be captured, prefixes that are captured again included.
        started, updated: Unix times: of the first request, and when this was written.
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

    def __str__(self) -> str:
        left = f"{(self.total - self.done) / self.rate:,.0f} s left" if self.done else "no sample finished yet"
        return f"shard {self.shard_id}: {self.done:,} of {self.total:,} tokens, {self.rate:,.0f} tokens/s, {left}"


class Progress:
    """Writes one extraction's `Running` into its building folder, at most every two seconds."""

    def __init__(self, folder: Path, *, shard_id: str, total: int, server: str) -> None:
        self._file = folder / _FILE
        now = time.time()
        self.running = Running(shard_id=shard_id, done=0, total=total, started=now, updated=now, server=server)
        self._write()

    def add(self, tokens: int) -> None:
        written = self.running.updated
        self.running = dataclasses.replace(self.running, done=self.running.done + tokens)
        if time.time() - written > _WRITE_SECONDS:
            self._write()

    def _write(self) -> None:
        self.running = dataclasses.replace(self.running, updated=time.time())
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(dataclasses.asdict(self.running)))
        os.replace(partial, self._file)


def running(run: Path) -> list[Running]:
    """The extractions under way in one capture's folder, longest running first."""
    found = []
    for file in (run / "shards" / BUILDING).glob(f"*/{_FILE}"):
        try:
            found.append(Running(**json.loads(file.read_text())))
        except (OSError, ValueError, TypeError):
            continue  # it ended just now
    return sorted(found, key=lambda each: each.started)


def say_each_minute(results: Path, say: Callable[[str], None]) -> None:
    """From a thread of its own, until the process ends: a line a minute for each extraction that has news."""

    def watch() -> None:
        said: dict[str, float] = {}
        while True:
            time.sleep(_SAY_SECONDS)
            for folder in results.glob("*/shards"):
                for each in running(folder.parent):
                    if said.get(each.shard_id) != each.updated:
                        said[each.shard_id] = each.updated
                        say(str(each))

    threading.Thread(target=watch, name="draftstates-progress", daemon=True).start()

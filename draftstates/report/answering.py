"""Progress of the answers by the target model, read from the results' files."""

import dataclasses
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from draftstates.errors import counted
from draftstates.extract.progress import SILENT_SECONDS, running
from draftstates.paths import BUILDING
from draftstates.plan.words import of_count, of_seconds
from draftstates.records import Prompts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answering:
    """A source whose prompts are being answered.

    Attributes:
        done: answered prompts, those of unfinished chunks included.
        total: prompts of the source.
        rate: answered prompts per second of the jobs under way.
        servers: URLs of the servers that answer.
    """

    source: str
    done: float
    total: int
    rate: float
    servers: frozenset[str]

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last answer; None where no rate is known."""
        return (self.total - self.done) / self.rate if self.rate > 0 else None

    @property
    def line(self) -> str:
        """The state as one line."""
        parts = [
            f"answers: {of_count(int(self.done))} of {of_count(self.total)} prompts of"
            f" {self.source} ({self.done / max(self.total, 1):.0%})"
        ]
        if self.seconds_left is not None:
            parts.append(f"{self.rate:,.2g} prompts/s, {of_seconds(self.seconds_left)} left")
        parts.append(f"on {counted(len(self.servers), 'server')}")
        return "; ".join(parts)


def answering(results: Path) -> list[Answering]:
    """Return the sources whose prompts are being answered, by name.

    A job without news has been killed, since one that lives writes every few seconds.
    """
    found, now = [], time.time()
    for building in sorted(results.glob(f"answers/*/*/{BUILDING}")):
        folder = building.parent
        prompts = Prompts.read(folder.parent / "prompts.json")
        chunks = {chunk.chunk_id: chunk.prompts for chunk in prompts.chunks}
        jobs = [
            job
            for job in running(building)
            if job.shard_id in chunks and now - job.updated < SILENT_SECONDS
        ]
        if not jobs:
            continue
        # a job counts conversations, of which a prompt may have several
        share = {job.shard_id: chunks[job.shard_id] / max(job.total, 1) for job in jobs}
        done = sum(count for name, count in chunks.items() if (folder / f"{name}.parquet").exists())
        found.append(
            Answering(
                source=prompts.source,
                done=done + sum(job.done * share[job.shard_id] for job in jobs),
                total=sum(chunks.values()),
                rate=sum(job.rate * share[job.shard_id] for job in jobs),
                servers=frozenset(job.server for job in jobs),
            )
        )
    return found


def as_documents(sources: list[Answering]) -> list[dict[str, Any]]:
    """Return the states for JSON."""
    return [
        {
            "source": each.source,
            "done_prompts": each.done,
            "prompts": each.total,
            "prompts_per_second": each.rate,
            "seconds_left": each.seconds_left,
            "servers": sorted(each.servers),
        }
        for each in sources
    ]


def answering_table(sources: list[Answering]) -> Table:
    """Return the states for a terminal."""
    table = Table(title="answers by the target model", show_header=False)
    for each in sources:
        table.add_row(each.line)
    return table

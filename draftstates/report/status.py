"""Status of a run, read from its files alone.

It works in another terminal, and on every node that sees the results folder.
"""

import dataclasses
import shutil
import time
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from draftstates.errors import visible
from draftstates.extract.progress import SILENT_SECONDS, Running, running
from draftstates.paths import Results
from draftstates.plan.words import of_bytes, of_seconds
from draftstates.records import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """State of a run at one time.

    Attributes:
        planned: number of planned shards.
        captured: number of captured shards.
        verified: number of verified shards.
        running: extractions under way.
        failed: by shard id, the error of each extraction that ended without its shard and was not
            started a second time.
        tokens: tokens of all planned shards.
        captured_tokens: tokens of the captured shards.
        disk_free: free bytes of the disk.
        at: Unix time.
    """

    capture_folder: str
    planned: int
    captured: int
    verified: int
    running: list[Running]
    failed: dict[str, str]
    tokens: int
    captured_tokens: int
    disk_free: int
    at: float

    @property
    def done_tokens(self) -> int:
        """Tokens captured up to now, those of unfinished shards included."""
        return self.captured_tokens + sum(each.done for each in self.running)

    @property
    def is_done(self) -> bool:
        """Return whether every planned shard is captured and verified."""
        return self.planned == self.captured == self.verified

    @property
    def rate(self) -> float:
        """Tokens per second of the extractions under way since their start."""
        return sum(each.rate for each in self.running)


def look(results: Path) -> Status:
    """Read a run's state.

    Raises:
        UserError: the plan is missing or cannot be read.
    """
    plan = Plan.read(Results(results).plan)
    capture, now = Results(results).capture(plan.capture_folder), time.time()
    present = capture.shard_ids() | capture.stored_ids()
    verified = capture.verified_ids()
    ids = {shard.shard_id: shard.tokens for shard in plan.shards}
    under_way = [
        each
        for each in running(capture.building)
        if each.shard_id in ids and each.shard_id not in present
    ]
    busy = {each.shard_id for each in under_way}
    failed = {
        name: why
        for name in ids
        if name not in present | busy and (why := _why(results, plan.capture_folder, name))
    }
    return Status(
        capture_folder=plan.capture_folder,
        planned=len(ids),
        captured=len(ids.keys() & present),
        verified=len(ids.keys() & verified),
        running=under_way,
        failed=failed,
        tokens=sum(ids.values()),
        captured_tokens=sum(tokens for name, tokens in ids.items() if name in present),
        disk_free=shutil.disk_usage(results).free,
        at=now,
    )


def _why(results: Path, capture_folder: str, shard_id: str) -> str:
    """Return the error that an extraction left in its log, or an empty text."""
    try:
        log = Results(results).log(capture_folder, "extract", shard_id)
        lines = log.read_text(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("error: ")), "")


def as_document(status: Status) -> dict[str, Any]:
    """Return a state for JSON, with its rate and the seconds left; None where no rate is known."""
    left = (status.tokens - status.done_tokens) / status.rate if status.rate > 0 else None
    return {
        **dataclasses.asdict(status),
        "done_tokens": status.done_tokens,
        "tokens_per_second": status.rate,
        "seconds_left": left,
        "done": status.is_done,
    }


def view(status: Status, before: Status | None = None) -> Group:
    """Return tables for a terminal.

    Args:
        before: an earlier state; the rate is then that of the time between the two states, not that
            since each extraction's start.
    """
    return Group(
        _totals(status, before),
        *([_running(status)] if status.running else []),
        *([_failed(status)] if status.failed else []),
    )


def _totals(status: Status, before: Status | None) -> Table:
    rate = status.rate
    if before is not None and status.at > before.at and status.done_tokens >= before.done_tokens:
        rate = (status.done_tokens - before.done_tokens) / (status.at - before.at)
    left = (status.tokens - status.done_tokens) / rate if rate > 0 else None
    shards = (
        f"{status.captured:,} captured, {status.verified:,} verified, {len(status.running):,}"
        f" running, {len(status.failed):,} failed"
    )
    table = Table(title=Text(status.capture_folder), show_header=False)
    table.add_row("shards", f"{shards}, of {status.planned:,}")
    table.add_row("tokens", f"{status.done_tokens:,} of {status.tokens:,}, {rate:,.0f} a second")
    table.add_row("time left", "-" if left is None else of_seconds(left))
    table.add_row("disk left", of_bytes(status.disk_free))
    return table


def _running(status: Status) -> Table:
    table = Table(title="running")
    for name in ("server", "shard", "tokens", "tokens/s", "news"):
        table.add_column(
            name, justify="left" if name in ("server", "shard") else "right", no_wrap=True
        )
    servers: dict[str, list[Running]] = {}
    for each in status.running:
        servers.setdefault(each.server.removeprefix("http://"), []).append(each)
    for server, extractions in sorted(servers.items()):
        for each in extractions:
            age = status.at - each.updated
            news = f"{age:,.0f} s ago" if age <= SILENT_SECONDS else "silent"
            table.add_row(
                server,
                each.shard_id[:8],
                f"{each.done:,} of {each.total:,}",
                f"{each.rate:,.0f}",
                news,
            )
        table.add_row(
            server, "all", "", f"{sum(each.rate for each in extractions):,.0f}", "", style="bold"
        )
    return table


def _failed(status: Status) -> Table:
    table = Table(title="failed and not yet retried")
    table.add_column("shard")
    table.add_column("error")
    for name, why in status.failed.items():
        table.add_row(name, Text(visible(why)))
    return table

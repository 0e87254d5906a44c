"""Room on the disk for the missing shards, the budget, and the time of a capture."""

import contextlib
import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

from draftstates.errors import UserError
from draftstates.paths import Capture
from draftstates.plan.words import of_bytes, of_seconds
from draftstates.records import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """Bytes of the shards and of the disk.

    Attributes:
        needed: bytes of the missing shards.
        present: bytes of the captured shards.
        free: free bytes of the disk.
    """

    needed: int
    present: int
    free: int


def check_room(
    shard_ids: Sequence[str], sizes: Sequence[int], *, capture_folder: Path, budget: int | None
) -> Room:
    """Compare the shards' bytes with the disk's free space and with the budget.

    Args:
        shard_ids: ids of all planned shards.
        sizes: bytes of each shard with all that belongs to it.
        capture_folder: folder whose `shards/` holds the captured shards.
        budget: bytes that all shards may take together; None for no limit but the disk.

    Raises:
        UserError: the room is too small; the message has the numbers.
    """
    captured = Capture(capture_folder).shard_ids()
    present = sum(size for name, size in zip(shard_ids, sizes, strict=True) if name in captured)
    needed, total = sum(sizes) - present, sum(sizes)
    if budget is not None and total > budget:
        raise UserError(
            f"max_bytes: the shards take {total:,} bytes ({len(sizes):,} shards), allowed are"
            f" {budget:,}"
        )
    return Room(needed=needed, present=present, free=check_free(capture_folder, needed))


def check_missing(plan: Plan, *, capture_folder: Path) -> None:
    """Compare the missing shards of a plan with the disk's free space before a server starts.

    The plan may be a day old, and the start of a server takes minutes of all its GPUs. The needed
    bytes do not include those of unfinished shards that are already on the disk.

    Raises:
        UserError: the room is too small; the message has the numbers.
    """
    capture = Capture(capture_folder)
    present = capture.shard_ids()
    needed = sum(shard.bytes for shard in plan.shards if shard.shard_id not in present)
    check_free(capture_folder, needed - _written(capture.building))


def _written(building: Path) -> int:
    """Return the bytes that the folder of unfinished shards takes on the disk."""
    blocks = 0
    for path in building.glob("*/*"):
        # a job may finish its shard at any moment
        with contextlib.suppress(OSError):
            blocks += path.stat().st_blocks
    return blocks * 512


def check_free(folder: Path, needed: int) -> int:
    """Return the free bytes on the disk of a folder, which need not exist yet.

    Raises:
        UserError: the disk has fewer free bytes than needed; the message has the numbers.
    """
    free = shutil.disk_usage(existing_folder(folder)).free
    if needed > free:
        raise UserError(
            f"{folder}: the shards that are missing take {needed:,} bytes, the disk has {free:,}"
            " free: make room, or name another folder in `results`"
        )
    return free


def existing_folder(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def hours(plan: Plan, tokens_per_second: float | None) -> float | None:
    """Return the hours that the capture of the missing shards takes, or None without a rate.

    The number of tokens in the missing shards is estimated from their share of all bytes.
    """
    if tokens_per_second is None:
        return None
    share = plan.bytes_needed / max(plan.bytes_needed + plan.bytes_present, 1)
    return plan.accounting.totals.tokens * share / tokens_per_second / 3600


def forecast(plan: Plan, tokens_per_second: float | None) -> str:
    """Return the size, the room and the hours of a plan as one line."""
    size = f"{plan.accounting.totals.tokens:,} tokens in {len(plan.shards):,} shards"
    room = (
        f"{of_bytes(plan.bytes_needed)} to write, {of_bytes(plan.bytes_present)} written,"
        f" {of_bytes(plan.disk_free)} free"
    )
    estimate = hours(plan, tokens_per_second)
    if estimate is None:
        return f"{size}; {room}"
    return f"{size}; {room}; about {of_seconds(estimate * 3600)} at {tokens_per_second:,g} tokens/s"

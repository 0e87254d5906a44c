"""Room on the disk for the missing shards, the budget, and the time of a capture."""

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from draftstates.errors import UserError, counted
from draftstates.paths import Capture
from draftstates.plan.words import of_bytes, of_seconds
from draftstates.records import Plan, PlannedShard
from draftstates.spec import OFFSET_BYTES, CaptureSpec

# float32
_SCALE_BYTES = 4
# final states that are kept whole: e4m3 changed the most likely token of 3.4 % (benchmarks)
_WHOLE_SHARE = 1 / 8
# the profiles' `streams`: jobs that capture at one time
_SHARDS_IN_WORK = 4


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
    shard_ids: Sequence[str],
    sizes: Sequence[int],
    *,
    capture_folder: Path,
    budget: int | None,
    form: str | None = None,
    work: int = 0,
) -> Room:
    """Compare the shards' bytes with the disk's free space and with the budget.

    Args:
        shard_ids: ids of all planned shards.
        sizes: bytes of each shard with all that belongs to it, as it stays on the disk.
        form: name of the form in which it stays; None for as captured.
        work: bytes of the captured files that are on the disk at one time before they are removed.
        capture_folder: folder whose `shards/` holds the captured shards.
        budget: bytes that all shards may take together; None for no limit but the disk.

    Raises:
        UserError: the room is too small; the message has the numbers.
    """
    captured = _present(Capture(capture_folder), form)
    present = sum(size for name, size in zip(shard_ids, sizes, strict=True) if name in captured)
    if captured.issuperset(shard_ids):
        work = 0
    needed, total = sum(sizes) - present + work, sum(sizes) + work
    if budget is not None and total > budget:
        raise UserError(
            f"max_bytes: the shards take {of_bytes(total)} ({len(sizes):,} shards), allowed are"
            f" {of_bytes(budget)}: allow {of_bytes(total - budget)} more"
        )
    return Room(needed=needed, present=present, free=check_free(capture_folder, needed))


def _present(capture: Capture, form: str | None) -> set[str]:
    """Return the ids of the shards whose bytes are on the disk in the form in which they stay."""
    return capture.shard_ids() if form is None else capture.stored_ids(form)


def kept_bytes(shard: PlannedShard, *, spec: CaptureSpec, form: str | None) -> int:
    """Return the most bytes that a shard's file takes in the form in which it stays."""
    if form is None:
        return shard.bytes
    states = len(spec.residual_layers) + spec.final_state
    # a code for each value, and a scale
    row = states * (spec.hidden_size + _SCALE_BYTES)
    if spec.final_state and form.endswith("top-token"):
        row += math.ceil(_WHOLE_SHARE * (spec.final_row_bytes + OFFSET_BYTES))
    rows = shard.tokens - shard.shared_tokens
    # the states of each row in another form, and two more tensors of offsets
    return shard.bytes + rows * (row - spec.row_bytes) + 2 * (shard.samples + 1) * OFFSET_BYTES


def work_bytes(sizes: Iterable[int], *, form: str | None) -> int:
    """Return the bytes of the captured files that are on the disk at one time, for any order.

    Args:
        sizes: bytes of each captured file with its prefix recaptures.
        form: name of the form in which shards stay; None where these files do.
    """
    return 0 if form is None else sum(sorted(sizes)[-_SHARDS_IN_WORK:])


def check_missing(plan: Plan, *, capture_folder: Path, form: str | None = None) -> None:
    """Compare the missing shards of a plan with the disk's free space before a server starts.

    The plan may be a day old, and the start of a server takes minutes of all its GPUs. The needed
    bytes do not include those of unfinished shards that are already on the disk.

    Args:
        form: name of the form in which shards stay on the disk; None for as captured.

    Raises:
        UserError: the room is too small; the message has the numbers.
    """
    capture = Capture(capture_folder)
    present = _present(capture, form)
    missing = [shard for shard in plan.shards if shard.shard_id not in present]
    needed = sum(kept_bytes(shard, spec=plan.capture, form=form) for shard in missing)
    needed += work_bytes((shard.bytes for shard in missing), form=form)
    # a captured file that is still to be rewritten is there already
    written = 0 if form is None else sum(_sizes(capture, missing))
    check_free(capture_folder, needed - written - _written(capture.building))


def _sizes(capture: Capture, shards: Iterable[PlannedShard]) -> Iterator[int]:
    for shard in shards:
        with contextlib.suppress(OSError):
            yield capture.shard(shard.shard_id).stat().st_size


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
            f"{folder}: the shards that are missing take {of_bytes(needed)}, the disk has"
            f" {of_bytes(free)} free: make room for {of_bytes(needed - free)} more, or name"
            " another folder in `results`"
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
    size = f"{plan.accounting.totals.tokens:,} tokens in {counted(len(plan.shards), 'shard')}"
    room = (
        f"{of_bytes(plan.bytes_needed)} to write, {of_bytes(plan.bytes_present)} written,"
        f" {of_bytes(plan.disk_free)} free"
    )
    estimate = hours(plan, tokens_per_second)
    if not estimate:
        return f"{size}; {room}"
    return f"{size}; {room}; about {of_seconds(estimate * 3600)} at {tokens_per_second:,g} tokens/s"

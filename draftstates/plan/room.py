"""Room on the disk: what is still to be captured, against what is free and what is allowed."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from draftstates.errors import UserError


def check_room(shard_ids: Sequence[str], sizes: Sequence[int], *, run: Path, budget: int | None) -> dict[str, int]:
    """Hold the shards' bytes against the disk's free space and the budget.

    Args:
        sizes: bytes of each shard with all that belongs to it.
        run: the capture's folder, whose `shards/` holds those that are there already.
        budget: bytes that all shards may take together; None for no limit but the disk.

    Returns:
        bytes_needed (of shards that are missing), bytes_present, disk_free.

    Raises:
        UserError: too little room, with the numbers.
    """
    there = {path.name.removesuffix(".safetensors") for path in (run / "shards").glob("*.safetensors")}
    present = sum(size for name, size in zip(shard_ids, sizes, strict=True) if name in there)
    needed, total = sum(sizes) - present, sum(sizes)
    if budget is not None and total > budget:
        raise UserError(f"max_bytes: the shards take {total:,} bytes ({len(sizes):,} shards), allowed are {budget:,}")
    return {"bytes_needed": needed, "bytes_present": present, "disk_free": check_free(run, needed)}


def check_free(folder: Path, needed: int) -> int:
    """Bytes that are free on the disk of a folder, which need not be there yet.

    Raises:
        UserError: fewer than needed, with the numbers.
    """
    free = shutil.disk_usage(_existing(folder)).free
    if needed > free:
        raise UserError(f"{folder}: the shards that are missing take {needed:,} bytes, the disk has {free:,} free")
    return free


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder

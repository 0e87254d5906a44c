"""Building folders, in which shards are built below the results, never under a final name.

A folder whose owner is gone is removed.
"""

import contextlib
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

# A living attempt writes more often. File locks may not reach other nodes.
_QUIET_SECONDS = 3600.0


@contextlib.contextmanager
def building_folder(building: Path, shard_id: str) -> Iterator[Path]:
    """Yield a new folder for one attempt at one shard; remove the folder when the block ends.

    A folder that a killed attempt left is removed first: nobody holds its lock.
    """
    for left in building.glob(f"{shard_id}-*"):
        if not _is_locked(left, without_lock=True):
            shutil.rmtree(left, ignore_errors=True)
    folder = building / f"{shard_id}-{uuid.uuid4().hex[:8]}"
    _make(folder)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        remove_empty(building)


def remove_empty(folder: Path) -> None:
    """Remove a folder if it is empty."""
    # Another job works in the folder, or has removed it.
    with contextlib.suppress(OSError):
        folder.rmdir()


def _make(folder: Path) -> None:
    """Make a folder and its parents, although another job may remove them at the same time."""
    while True:
        try:
            folder.mkdir(parents=True)
            return
        except FileNotFoundError:
            continue


def abandoned(building: Path) -> list[Path]:
    """Return the building folders of killed attempts.

    Nobody holds their lock, and no file in them has changed for an hour.
    """
    return [
        left
        for left in sorted(building.glob("*-*"))
        if _is_quiet(left) and not _is_locked(left, without_lock=False)
    ]


def _is_quiet(folder: Path) -> bool:
    try:
        changed = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except FileNotFoundError:
        # Another job is removing the folder.
        return False
    return time.time() - changed > _QUIET_SECONDS


def _is_locked(folder: Path, *, without_lock: bool) -> bool:
    """Return whether an attempt works in a building folder.

    Args:
        without_lock: the value to return if the lock is missing: not yet made, or just removed.
    """
    try:
        lock = os.open(folder / "lock", os.O_RDWR)
    except FileNotFoundError:
        return without_lock
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(lock)

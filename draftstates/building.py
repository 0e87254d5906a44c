"""A place to build a shard in: below the results, never under a final name, cleared when its owner is gone; and what makes names final."""

import contextlib
import fcntl
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path

BUILDING = ".building"
_QUIET_SECONDS = 3600.0  # a living attempt writes more often; file locks need not reach other nodes


@contextlib.contextmanager
def building_folder(shards_folder: Path, shard_id: str) -> Iterator[Path]:
    """A fresh folder for one attempt at one shard; it is gone when the block ends, however that goes.

    A folder that a killed attempt left behind is removed here: its lock tells that nobody works in it.
    """
    parent = shards_folder / BUILDING
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(f"{shard_id}-*"):
        if not _is_locked(left, without_lock=True):
            shutil.rmtree(left, ignore_errors=True)
    folder = parent / f"{shard_id}-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def abandoned(shards_folder: Path) -> list[Path]:
    """Building folders that killed attempts left: nobody holds their lock, and nothing in them has changed for an hour."""
    return [left for left in sorted((shards_folder / BUILDING).glob("*-*")) if _is_quiet(left) and not _is_locked(left, without_lock=False)]


def _is_quiet(folder: Path) -> bool:
    try:
        changed = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except FileNotFoundError:
        return False  # it is removed right now
    return time.time() - changed > _QUIET_SECONDS


def _is_locked(folder: Path, *, without_lock: bool) -> bool:
    """Whether somebody works in a building folder; `without_lock` where its lock is not there: not yet made, or being removed."""
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


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries (its renames) to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(source: Path, final: Path) -> None:
    """Give a complete file its final name, synced before and after."""
    descriptor = os.open(source, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(source, final)
    sync_folder(final.parent)


def publish_text(text: str, final: Path) -> None:
    """Give `final` this content, whole or not at all; its folder is made where there is none."""
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(f".{final.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    publish(partial, final)


def withdraw_manifest(run: Path, shard_ids: Collection[str], what: str) -> None:
    """Take a run's `manifest.json` away where it lists one of these shards, or cannot be read; readers take what it lists for verified.

    The rule that writes it does so again once every shard is verified.

    Args:
        run: the capture's folder; what: has become of the shards, for the log, such as "verification refused".
    """
    manifest = run / "manifest.json"
    try:
        listed = {shard["shard_id"] for shard in json.loads(manifest.read_bytes())["shards"]} & set(shard_ids)
        why = f"it lists shard {', '.join(sorted(listed))}, which {what}"
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        listed, why = set(shard_ids), f"it cannot be read ({type(error).__name__}: {error})"
    if listed:
        manifest.unlink(missing_ok=True)
        sync_folder(run)
        print(f"{manifest} was taken away: {why}; it is written again when all shards are verified", file=sys.stderr)

"""Rows that are on the disk already: copied out of verified shards of the same capture key rather than captured again.

A new shard differs from one before it by a few samples as a rule. The others are copied with their receipts; each is held to the
checksum that verification found. The new shard is verified as any other; the prefixes that are captured anew for it are of those samples
first that were not copied, which no shard before has probed.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from draftstates import ids
from draftstates.errors import UserError
from draftstates.shards import Shard, sample_checksum
from draftstates.verified import sealed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copied:
    """What was copied into a shard.

    Attributes:
        receipts: of the copied samples, by position in the shard.
        engines: versions of the engines that captured them; images: file names of the images that those ran in, None for the host.
    """

    receipts: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    engines: set[str] = dataclasses.field(default_factory=set)
    images: set[str | None] = dataclasses.field(default_factory=set)

    @property
    def rows(self) -> int:
        return sum(receipt["rows"] for receipt in self.receipts.values())


def copy_captured(shard: Path, *, run: Path, planned: Collection[str]) -> Copied:
    """Fill a laid-out shard, as far as verified shards outside the plan hold the rows of the same ids.

    Shards of the plan are not looked at: each sample is in one of them alone. What cannot be used is said on stderr and left to capture.

    Args:
        run: the capture's folder, with `shards/` and `verified/`.
        planned: ids of the planned shards.

    Returns:
        what was copied; its rows are synced.
    """
    target = Shard(shard)
    wanted: dict[tuple[str, int], list[int]] = {}
    for index in range(len(target)):
        first, end = target.rows(index)
        wanted.setdefault((ids.ids_hash(target.input_ids[first:end]), end - first), []).append(index)
    copied = Copied()
    descriptor = os.open(shard, os.O_WRONLY)
    try:
        for shard_id in _outside(run, planned):
            if not wanted:
                break
            for index, receipt, said in _matches(run, shard_id, target, wanted, descriptor):
                copied.receipts[index] = receipt
                copied.engines.update(said["engine"]["version"].split(", "))
                copied.images.update(_images(said))
        os.fsync(descriptor)  # before a server on another node opens the file
    finally:
        os.close(descriptor)
    return copied


def _outside(run: Path, planned: Collection[str]) -> list[str]:
    """Verified shards that are not in the plan."""
    folder = run / "verified"
    return sorted({path.stem for path in folder.glob("*.json")} - set(planned)) if folder.is_dir() else []


def _matches(
    run: Path, shard_id: str, target: Shard, wanted: dict[tuple[str, int], list[int]], descriptor: int
) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
    """Copy what one verified shard has of the wanted samples, and take it off `wanted`: position, receipt, what was said of its shard."""
    try:
        source, checksums, said = _open(run, shard_id, target=target)
        for number, (receipt, checksum) in enumerate(zip(said["samples"], checksums, strict=True)):
            for index in list(wanted.get((receipt["ids_hash"], receipt["rows"]), [])):
                if _copy(source, number, target, index, descriptor, checksum=checksum, receipt=receipt):
                    wanted[receipt["ids_hash"], receipt["rows"]].remove(index)
                    moved = {"sample_id": target.header.sample_ids[index], "first_row": target.rows(index)[0], "copied_from": shard_id}
                    yield index, {**receipt, **moved}, said
        for key in [key for key, left in wanted.items() if not left]:
            del wanted[key]
    except Exception as error:  # whatever a file holds that is not as verified: the rows can be captured
        print(f"nothing more is copied from shard {shard_id}: {type(error).__name__}: {error}", file=sys.stderr)


def _open(run: Path, shard_id: str, *, target: Shard) -> tuple[Shard, list[str], dict[str, Any]]:
    """A verified shard of the same capture, the checksum of each of its samples as verification found it, and its receipts.

    Raises:
        UserError: it is not what was verified, or of another capture; other errors where a file is none.
    """
    verified = json.loads((run / "verified" / f"{shard_id}.json").read_bytes())
    if sealed(verified) != verified:
        raise UserError("what verification found of it was changed since")
    source = Shard(run / "shards" / f"{shard_id}.safetensors")
    found = (source.header.metadata["capture_key"], source.header.metadata["shard_id"], source.header.size, _layout(source))
    expected = (target.header.metadata["capture_key"], shard_id, verified["bytes"], _layout(target))
    if found != expected:
        raise UserError(f"expected capture key, shard id, bytes and rows {expected}, found {found}")
    said = json.loads((run / "shards" / f"{shard_id}.receipts.json").read_bytes())
    images = _images(said)
    if not isinstance(said["engine"]["version"], str) or not isinstance(images, list) or not all(isinstance(i, str | None) for i in images):
        raise UserError(f"its receipts name engine {said['engine']} and images {images}, expected a version and a list of names")
    return source, [sample["checksum"] for sample in verified["samples"]], said


def _images(said: dict[str, Any]) -> list[str | None]:
    return said.get("images", {"server": [None]})["server"]


def _layout(shard: Shard) -> list[tuple[str, list[int]]]:
    """Dtype and shape of a row, of both states."""
    return [(dtype, list(shape[1:])) for dtype, shape, *_ in (shard.header.tensors[name] for name in shard.header.states())]


def _copy(source: Shard, number: int, target: Shard, index: int, descriptor: int, *, checksum: str, receipt: dict[str, Any]) -> bool:
    """Copy one sample's rows; False where its ids or bytes are not what they should be."""
    (begin, end), (first, stop) = source.rows(number), target.rows(index)
    if end - begin != stop - first or (source.input_ids[begin:end] != target.input_ids[first:stop]).any():
        print(f"sample {receipt['sample_id']} is not copied from {source.path}: there it has other ids", file=sys.stderr)
        return False
    rows = [_read(source.path, at + begin * width, (end - begin) * width) for at, width in source.header.states().values()]
    found = sample_checksum(*rows)
    if not found == checksum == receipt["checksum"]:
        print(
            f"sample {receipt['sample_id']} is not copied from {source.path}: expected checksum {checksum}, found {found}", file=sys.stderr
        )
        return False
    for (start, width), data in zip(target.header.states().values(), rows, strict=True):
        at, left = start + first * width, memoryview(data)
        while left:
            written = os.pwrite(descriptor, left, at)
            at, left = at + written, left[written:]
    return True


def _read(path: Path, begin: int, size: int) -> np.ndarray:
    """Bytes of a file: read rather than mapped, so that one that shrinks meanwhile, or a bad disk, is an error and not the end."""
    data = np.fromfile(path, np.uint8, count=size, offset=begin)
    if len(data) < size:
        raise OSError(f"{path} ends at byte {begin + len(data)}, {size - len(data)} bytes early")
    return data

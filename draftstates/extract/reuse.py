"""Reuse of captured rows: they are copied out of verified shards of the same capture key.

A new shard usually differs from an earlier one by a few samples. The others are copied with their
receipts. Each copied sample must have the checksum that verification found. If a sample shares rows
in the new shard, only its own rows are copied: the earlier shard has all of its rows, whether it
shared them too or not. The new shard is verified like every other shard. Its prefix recaptures
first take the samples that were not copied, since no earlier shard has recaptured a prefix of them.
"""

import dataclasses
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from draftstates import ids
from draftstates.errors import UserError
from draftstates.files import first_difference
from draftstates.paths import Capture
from draftstates.records import SampleReceipt, ShardReceipts, Verified
from draftstates.shards.layout import Shard, sample_checksum


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copied:
    """Samples that were copied into a shard.

    Attributes:
        receipts: receipts of the copied samples by position in the shard.
        engines: versions of the engines that captured them.
        images: file names of the images that the engines ran in, None for the host.
        selftests: ids of the self-test rows that the engines agreed with.
    """

    receipts: dict[int, SampleReceipt] = dataclasses.field(default_factory=dict)
    engines: set[str] = dataclasses.field(default_factory=set)
    images: set[str | None] = dataclasses.field(default_factory=set)
    selftests: set[str] = dataclasses.field(default_factory=set)

    @property
    def rows(self) -> int:
        return sum(receipt.rows for receipt in self.receipts.values())

    @property
    def tokens(self) -> int:
        """Tokens of the copied samples, whose first rows may be shared."""
        return self.rows + sum(receipt.shared_rows for receipt in self.receipts.values())


def copy_captured(shard: Path, *, capture_folder: Path, planned: Collection[str]) -> Copied:
    """Copy rows into a laid-out shard from verified shards outside the plan that have the same ids.

    Shards of the plan are skipped, since a sample is in one planned shard only. A sample that
    cannot be used is named on stderr and left to capture.

    Args:
        capture_folder: folder with `shards/` and `verified/`.
        planned: ids of the planned shards.

    Returns:
        the copied samples; their rows are synced.
    """
    target = Shard(shard)
    wanted: dict[tuple[str, int], list[int]] = {}
    for index in range(len(target)):
        key = ids.ids_hash(target.tokens(index)[0]), target.length(index)
        wanted.setdefault(key, []).append(index)
    copied = Copied()
    descriptor = os.open(shard, os.O_WRONLY)
    try:
        capture = Capture(capture_folder)
        # rows of a compact form are not as captured: they are never copied
        verified = capture.verified_ids() - (capture.stored_ids() - capture.shard_ids())
        for shard_id in sorted(verified - set(planned)):
            if not wanted:
                break
            for index, entry, receipts in _matches(
                capture_folder, shard_id, target, wanted, descriptor
            ):
                copied.receipts[index] = entry
                copied.engines.update(receipts.engine.versions)
                copied.images.update(receipts.images["server"])
                copied.selftests.update(receipts.selftests)
        # A server on another node must see the rows when it opens the file.
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return copied


def _matches(
    capture_folder: Path,
    shard_id: str,
    target: Shard,
    wanted: dict[tuple[str, int], list[int]],
    descriptor: int,
) -> Iterator[tuple[int, SampleReceipt, ShardReceipts]]:
    """Copy the wanted samples of one verified shard, and remove them from `wanted`.

    Yields:
        position and receipt of each copied sample, and the receipts of the verified shard.
    """
    try:
        source, checksums, receipts = _open(capture_folder, shard_id, target=target)
        for number, (entry, checksum) in enumerate(zip(receipts.samples, checksums, strict=True)):
            # the receipt's hash may lack cached tokens
            whole = ids.ids_hash(source.tokens(number)[0])
            key = whole, source.length(number)
            for index in list(wanted.get(key, [])):
                copied = _copy(
                    source, number, target, index, descriptor, checksum=checksum, receipt=entry
                )
                if copied:
                    wanted[key].remove(index)
                    first, end = target.rows(index)
                    moved = dataclasses.replace(
                        entry,
                        sample_id=target.header.sample_ids[index],
                        first_row=first,
                        rows=end - first,
                        shared_rows=target.segments.shared(index),
                        checksum=copied,
                        cached_tokens=0,
                        ids_hash=whole,
                        namespace=None,
                        again_rows=0,
                        again_distance=0.0,
                        copied_from=shard_id,
                    )
                    yield index, moved, receipts
        for key in [key for key, left in wanted.items() if not left]:
            del wanted[key]
    # A file differs from its verified state: its rows can be captured instead.
    except Exception as error:
        print(
            f"nothing more is copied from shard {shard_id}: {type(error).__name__}: {error}",
            file=sys.stderr,
        )


def _open(
    capture_folder: Path, shard_id: str, *, target: Shard
) -> tuple[Shard, tuple[str, ...], ShardReceipts]:
    """Open a verified shard of the same capture.

    Returns:
        the shard, the checksum of each of its samples as verification found it, and its receipts.

    Raises:
        UserError: the shard is not the verified one, or is of another capture.
        OSError: a file is missing.
    """
    capture = Capture(capture_folder)
    verified = Verified.read(capture.verified(shard_id))
    source = Shard(capture.shard(shard_id))
    expected = {
        "capture key": target.header.metadata["capture_key"],
        "shard id": shard_id,
        "bytes": verified.bytes,
        "rows": _layout(target),
    }
    found = {
        "capture key": source.header.metadata["capture_key"],
        "shard id": source.header.metadata["shard_id"],
        "bytes": source.header.size,
        "rows": _layout(source),
    }
    if difference := first_difference(expected, found):
        raise UserError(f"{source.path}: {difference}")
    receipts = ShardReceipts.read(capture.receipts(shard_id))
    if "server" not in receipts.images:
        raise UserError(
            f"its receipts name the images {receipts.images}, expected that of `server`"
        )
    return source, verified.samples.checksum, receipts


def _layout(shard: Shard) -> list[tuple[str, list[int]]]:
    """Return dtype and shape of a row, of both states."""
    return [
        (dtype, list(shape[1:]))
        for dtype, shape, *_ in (shard.header.tensors[name] for name in shard.header.states())
    ]


def _copy(
    source: Shard,
    number: int,
    target: Shard,
    index: int,
    descriptor: int,
    *,
    checksum: str,
    receipt: SampleReceipt,
) -> str | None:
    """Copy one sample's own rows.

    Returns:
        their checksum; None if the sample's ids or bytes differ from the expected ones.
    """
    if not np.array_equal(source.tokens(number)[0], target.tokens(index)[0]):
        print(
            f"sample {receipt.sample_id} is not copied from {source.path}: that shard has"
            " other ids of it",
            file=sys.stderr,
        )
        return None
    rows = [
        np.concatenate(
            [
                _read(source.path, at + first * width, count * width)
                for first, count in source.segments.of_sample(number)
            ]
        )
        for at, width in source.header.states().values()
    ]
    widths = [width for _, width in source.header.states().values()]
    there, here = source.segments.shared(number), target.segments.shared(index)
    # by number of first rows that are left out
    sums = {
        shared: sample_checksum(*_without_first(rows, widths, shared))
        for shared in {0, there, here}
    }
    if (sums[0], sums[there]) != (checksum, receipt.checksum):
        print(
            f"sample {receipt.sample_id} is not copied from {source.path}: expected checksum"
            f" {checksum}, found {sums[0]}",
            file=sys.stderr,
        )
        return None
    first, _ = target.rows(index)
    own = _without_first(rows, widths, here)
    for (start, width), data in zip(target.header.states().values(), own, strict=True):
        at, left = start + first * width, memoryview(data)
        while left:
            written = os.pwrite(descriptor, left, at)
            at, left = at + written, left[written:]
    return sums[here]


def _without_first(tensors: list[np.ndarray], widths: list[int], rows: int) -> list[np.ndarray]:
    """Return the bytes of each tensor, whose rows have these widths, without its first rows."""
    return [data[rows * width :] for data, width in zip(tensors, widths, strict=True)]


def _read(path: Path, begin: int, size: int) -> np.ndarray:
    """Return bytes of a file.

    They are read, not mapped. If a file shrinks meanwhile, or a disk is bad, reading raises an
    error and does not kill the process.
    """
    data = np.fromfile(path, np.uint8, count=size, offset=begin)
    if len(data) < size:
        raise OSError(f"{path} ends at byte {begin + len(data)}, {size - len(data)} bytes early")
    return data

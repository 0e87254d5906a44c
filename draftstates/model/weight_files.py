"""Digests of weight files by samples of every matrix: seconds for a terabyte.

The first, a middle and the last block of each matrix are read, and of each matrix in a stack of
experts. A large file's digest is kept in the user's cache, for as long as the file keeps its size,
dates and inode.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from draftstates.files import publish_json
from draftstates.model.folder import unreadable_weights

_BLOCK = 4096
# Blocks that are spread over the whole file, for large matrices.
_SPREAD = 64
# Blocks that are nearer to each other are read in one piece.
_GAP = 16 << 10
# Reads wait for the disk.
_THREADS = 16
# The samples of less are read in a moment.
_KEPT_BYTES = 16 << 30
# A file that was changed just now may be changed once more without another date.
_SETTLED_SECONDS = 10.0
_FORMAT = "v1"


def weight_digests(files: Sequence[Path]) -> list[str]:
    """Return a digest of each safetensors file.

    Raises:
        UserError: a file has another header.
    """
    kept = _Kept(files)
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(lambda file: kept.get(file) or _sampled(file), files))
    kept.put(dict(zip(files, found, strict=True)))
    return found


class _Kept:
    """Digests that the user's cache holds of large models.

    Args:
        files: the weight files of one model.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._marks = {file: _mark(file) for file in files}
        self._path, self._digests = None, {}
        if sum(file.stat().st_size for file in files) < _KEPT_BYTES:
            return
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        name = hashlib.sha256(os.fsencode(files[0].parent.resolve())).hexdigest()[:32]
        self._path = base / "draftstates" / "weights" / f"{name}.json"
        try:
            self._digests = dict(json.loads(self._path.read_text())["digests"])
        except (OSError, ValueError, TypeError, LookupError):
            self._digests = {}

    def get(self, file: Path) -> str | None:
        """Return a file's digest, if it was taken of this very content."""
        digest = self._digests.get(self._marks[file])
        return digest if isinstance(digest, str) and len(digest) == 64 else None

    def put(self, digests: dict[Path, str]) -> None:
        """Keep digests of files that have not changed since they were read."""
        found = {
            mark: digest
            for file, digest in digests.items()
            if (mark := self._marks[file]) == _mark(file) and _is_settled(file)
        }
        if self._path is None or found == self._digests:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            publish_json({"digests": found}, self._path)
        # such as a home that cannot be written: the next run reads the blocks again
        except OSError:
            pass


def _mark(file: Path) -> str:
    found = file.stat()
    parts = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
    return " ".join([_FORMAT, file.name, *map(str, parts)])


def _is_settled(file: Path) -> bool:
    found = file.stat()
    return time.time() - max(found.st_mtime, found.st_ctime) > _SETTLED_SECONDS


def _sampled(file: Path) -> str:
    """Return the digest of one file's header and sampled blocks."""
    digest, descriptor = hashlib.sha256(), os.open(file, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        prefix = os.pread(descriptor, 8, 0)
        header = os.pread(descriptor, min(int.from_bytes(prefix, "little"), size), 8)
        digest.update(prefix + header)
        for begin, end in _joined(_blocks(file, header, size)):
            digest.update(os.pread(descriptor, end - begin, begin))
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def _blocks(file: Path, header: bytes, size: int) -> Iterator[tuple[int, int]]:
    """Yield first and last byte of each sampled block; the header's hash draws the middle ones."""
    start = 8 + len(header)
    stride = (size - start) / _SPREAD
    middles = [(start + int(stride * k), start + int(stride * (k + 1))) for k in range(_SPREAD)]
    for begin, end in _matrices(file, header, start):
        yield begin, min(begin + _BLOCK, end)
        yield max(begin, end - _BLOCK), end
        middles.append((begin, end))
    draws = hashlib.shake_128(header).digest(4 * len(middles))
    for index, (begin, end) in enumerate(middles):
        draw = int.from_bytes(draws[4 * index : 4 * index + 4], "little") / 2**32
        at = begin + int(draw * max(0, end - begin - _BLOCK))
        yield at, min(at + _BLOCK, max(end, at))


def _matrices(file: Path, header: bytes, start: int) -> Iterator[tuple[int, int]]:
    """Yield first and last byte of each tensor, or of each matrix of a tensor that holds several.

    Raises:
        UserError: the header is not that of a safetensors file.
    """
    try:
        for name, entry in json.loads(header).items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            count = math.prod(entry["shape"][:-2])
            # Smaller ones are of no use alone: a convolution has a matrix for each channel.
            if count < 2 or (last - first) // count < _BLOCK:
                count = 1
            width = (last - first) // count
            for index in range(count):
                begin = start + first + index * width
                yield begin, begin + width
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise unreadable_weights(file, error) from error


def _joined(blocks: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield ascending spans that hold all blocks."""
    begin = end = 0
    for first, last in sorted(blocks):
        if first > end + _GAP:
            if end > begin:
                yield begin, end
            begin, end = first, last
        end = max(end, last)
    if end > begin:
        yield begin, end

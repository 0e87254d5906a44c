"""Content-defined boundaries of a source's shards: a change moves only the boundary beside it.

A cut falls before a sample whose hash is the smallest of all hashes within `min_bytes` of it,
counted in the bytes between the two samples. So a cut depends on no sample further away, and two
cuts are at least `min_bytes` apart. An inserted row makes at most two new shards. A removed or
edited row touches at most two old shards and makes at most two new ones, or three where it was a
shard's first row. An append changes the last shard at most. (The count of the bytes between two
samples excludes both: a sample that a new row moves beyond `min_bytes` of another has the new row
itself within `min_bytes`.)

The mean shard is twice `min_bytes`. The few pieces that are larger than `max_bytes` are cut at
their smallest hash too; with `max_bytes` of at least four times `min_bytes` they are rare.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from draftstates.errors import UserError
from draftstates.plan.words import of_bytes

# digits of the sample id, itself a hash, that a cut uses: their 60 bits fit an int64
HASH_DIGITS = 15


def segment(
    sample_ids: Sequence[str], sizes: np.ndarray, *, min_bytes: int, max_bytes: int
) -> list[tuple[int, int]]:
    """Cut a source's samples into shards.

    Args:
        sample_ids: S sample ids, in the source's order.
        sizes: bytes of each sample, int64 [S], all positive.
        min_bytes: least size of a shard. Only the one shard of a smaller source, and shards beside
            samples near `max_bytes`, are smaller.
        max_bytes: largest size of a shard. Only a shard of one larger sample is larger.

    Returns:
        Pairs (first sample, end sample) that cover all S samples in order.

    Raises:
        UserError: `max_bytes` is less than twice `min_bytes`: no cut could respect both.
    """
    if max_bytes < 2 * min_bytes:
        raise UserError(
            f"shards.max_bytes must be at least twice shards.min_bytes, found"
            f" {of_bytes(max_bytes)} and {of_bytes(min_bytes)}"
        )
    if not len(sample_ids):
        return []
    hashes = np.array([int(name[:HASH_DIGITS], 16) for name in sample_ids], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(np.asarray(sizes, dtype=np.int64))])
    edges = [0, *_local_minima(hashes, starts, min_bytes), len(hashes)]
    return [
        piece
        for first, end in zip(edges, edges[1:], strict=False)
        for piece in _split(first, end, hashes, starts, min_bytes, max_bytes)
    ]


def _local_minima(hashes: np.ndarray, starts: np.ndarray, window: int) -> list[int]:
    """Return samples whose hash is the smallest within `window` bytes, and that far from both ends.

    One pass with a stack of rising hashes compares each sample with the next smaller one on either
    side. Of equal hashes the first counts as the smaller.
    """
    at = starts.tolist()
    alone = ((starts[:-1] >= window) & (starts[-1] - starts[1:] >= window)).tolist()
    values = hashes.tolist()
    rising: list[int] = []
    for here, value in enumerate(values):
        while rising and values[rising[-1]] > value:
            larger = rising.pop()
            if at[here] - at[larger + 1] < window:
                alone[larger] = False
        if rising and at[here] - at[rising[-1] + 1] < window:
            alone[here] = False
        rising.append(here)
    return [here for here in range(1, len(values)) if alone[here]]


def _split(
    first: int, end: int, hashes: np.ndarray, starts: np.ndarray, min_bytes: int, max_bytes: int
) -> Iterator[tuple[int, int]]:
    """Cut a piece at its smallest hash, and its parts in the same way.

    The cutting ends when each part is within `max_bytes` or is one sample.
    """
    pending = [(first, end)]
    while pending:
        first, end = pending.pop()
        if starts[end] - starts[first] <= max_bytes or end - first == 1:
            yield first, end
            continue
        inner = starts[first + 1 : end]
        roomy = np.flatnonzero(
            (inner - starts[first] >= min_bytes) & (starts[end] - inner >= min_bytes)
        )
        candidates = first + 1 + (roomy if len(roomy) else np.arange(end - first - 1))
        cut = int(candidates[np.argmin(hashes[candidates])])
        pending += [(cut, end), (first, cut)]

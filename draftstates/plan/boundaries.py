"""Where a source is cut into shards: content-defined, so that a change moves the boundary beside it and no other.

A cut falls before a sample whose hash is the smallest of all that lie within `min_bytes` of it, counting the bytes between the two.
So it depends on nothing further away, and no two cuts are nearer than that. An inserted row makes at most two new shards; a removed
or edited one touches at most two old shards, and makes at most two new ones but where it was a shard's first, when it may be three;
an append changes the last shard at most. (Counting the bytes between two samples, and not those of either, is what this rests on:
whatever a new row pushes out of another's reach on its far side has that row itself within reach.)

The mean shard is twice `min_bytes`. The few pieces that come out larger than `max_bytes` are cut again at their smallest hash; with
`max_bytes` of at least four times `min_bytes` they are rare.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from draftstates.errors import UserError

HASH_DIGITS = 15  # of the sample's name, itself a hash: 60 bits fit an int64


def segment(sample_ids: Sequence[str], sizes: np.ndarray, *, min_bytes: int, max_bytes: int) -> list[tuple[int, int]]:
    """Cut a source's samples into shards.

    Args:
        sample_ids: S names, in the source's order; sizes: bytes of each, int64 [S], all positive.
        min_bytes: no shard is smaller, but for a source that is, and for what samples near `max_bytes` leave no other room for.
        max_bytes: no shard is larger, but for a sample that alone is.

    Returns:
        Pairs (first sample, end sample) that cover all S in order.

    Raises:
        UserError: `max_bytes` is less than twice `min_bytes`: no cut could keep to both.
    """
    if max_bytes < 2 * min_bytes:
        raise UserError(f"shards.max_bytes must be at least twice shards.min_bytes, found {max_bytes:,} and {min_bytes:,}")
    if not len(sample_ids):
        return []
    hashes = np.array([int(name[:HASH_DIGITS], 16) for name in sample_ids], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(np.asarray(sizes, dtype=np.int64))])
    edges = [0, *_local_minima(hashes, starts, min_bytes), len(hashes)]
    return [
        piece for first, end in zip(edges, edges[1:], strict=False) for piece in _split(first, end, hashes, starts, min_bytes, max_bytes)
    ]


def _local_minima(hashes: np.ndarray, starts: np.ndarray, window: int) -> list[int]:
    """Samples whose hash is below all others with fewer than `window` bytes between, and which lie that far from both ends.

    One pass with a stack of rising hashes: each sample meets the next smaller one on either side. Of equal hashes the first is the smaller.
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


def _split(first: int, end: int, hashes: np.ndarray, starts: np.ndarray, min_bytes: int, max_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut a piece at its smallest hash, and the parts again, until each is within `max_bytes` or one sample."""
    pending = [(first, end)]
    while pending:
        first, end = pending.pop()
        if starts[end] - starts[first] <= max_bytes or end - first == 1:
            yield first, end
            continue
        inner = starts[first + 1 : end]
        roomy = np.flatnonzero((inner - starts[first] >= min_bytes) & (starts[end] - inner >= min_bytes))
        candidates = first + 1 + (roomy if len(roomy) else np.arange(end - first - 1))
        cut = int(candidates[np.argmin(hashes[candidates])])
        pending += [(cut, end), (first, cut)]

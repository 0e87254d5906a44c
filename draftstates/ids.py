"""Content hashes: ids of samples and shards, and keyed choices."""

import hashlib
from collections.abc import Sequence

import numpy as np
import xxhash

_SAMPLE_DOMAIN = b"draftstates.sample.v1\0"
_SHARD_DOMAIN = b"draftstates.shard.v1\0"


def sample_id(input_ids: np.ndarray, loss_mask: np.ndarray) -> str:
    """Return the id of a sample: 32 hex digits of SHA-256 over its tokens.

    Args:
        input_ids: int [T].
        loss_mask: 0 or 1 [T].

    Raises:
        ValueError: the two lengths differ.
    """
    if len(input_ids) != len(loss_mask):
        raise ValueError(f"input_ids has {len(input_ids)} tokens, loss_mask {len(loss_mask)}")
    digest = hashlib.sha256(_SAMPLE_DOMAIN)
    digest.update(len(input_ids).to_bytes(8, "little"))
    digest.update(np.ascontiguousarray(input_ids, dtype="<i4").data)
    digest.update(np.ascontiguousarray(loss_mask, dtype=np.uint8).data)
    return digest.hexdigest()[:32]


def shard_id(sample_ids: Sequence[str], shared: bytes = b"") -> str:
    """Return the id of a shard: 32 hex digits of SHA-256 over its sample ids, in order.

    Args:
        shared: which rows the samples share, as `Segments.content` says it; empty where none.
    """
    digest = hashlib.sha256(_SHARD_DOMAIN + "\n".join(sample_ids).encode())
    if shared:
        digest.update(b"\0shared\0" + shared)
    return digest.hexdigest()[:32]


def ids_hash(input_ids: np.ndarray) -> str:
    """Return the hash that binds a receipt to the sent ids, int [T]: 16 hex digits (XXH3-64)."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(input_ids, dtype="<i4").data)


def keyed_fraction(name: str, *, key: str) -> float:
    """Return a number in [0, 1), for keyed choices, that depends on `name` and `key` alone."""
    digest = hashlib.sha256(f"{key}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") / 2**64

"""Checks of single samples: counts, ids, values, checksum.

Each fault is a `Finding` that names its check.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
import xxhash

from draftstates import ids
from draftstates.files import differences
from draftstates.records import SampleReceipt
from draftstates.shards.layout import Shard, ShardHeader, combined_checksum
from draftstates.spec import STORED_DTYPES, CaptureSpec

# A block is hashed and checked while it lies in the processor's cache.
_BLOCK_BYTES = 1 << 18
# Largest number of rows that a finding of one sample names.
_FAULTS_SHOWN = 3
# Bits of each stored format: as unsigned and as signed numbers, its sign, and its exponent (all
# ones: infinite or no number).
_BITS: dict[torch.dtype, tuple[torch.dtype, type, int, int]] = {
    torch.bfloat16: (torch.int16, np.uint16, 0x8000, 0x7F80),
    torch.float16: (torch.int16, np.uint16, 0x8000, 0x7C00),
    torch.float32: (torch.int32, np.uint32, 0x80000000, 0x7F800000),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """Fault: the check, the sample (None for the whole shard), expected and found values."""

    check: str
    sample_id: str | None
    detail: str

    def __str__(self) -> str:
        return (
            f"{'the shard' if self.sample_id is None else 'sample ' + self.sample_id}:"
            f" {self.check}: {self.detail}"
        )


def check_header(header: ShardHeader, *, spec: CaptureSpec, shard_id: str) -> Iterator[Finding]:
    """Compare the header of a shard, or of its recaptures file, with the plan's capture."""
    layers, hidden = spec.residual_layers, spec.hidden_size
    expected = {
        "shard_id": shard_id,
        "capture_key": spec.key,
        "final_norm": spec.final_norm,
        "residual_layers": list(layers),
        "shape of a row": {
            **({"hidden_states": (len(layers), hidden)} if layers else {}),
            **({"final_hidden_state": (hidden,)} if spec.final_state else {}),
        },
        "dtype": STORED_DTYPES[spec.stored_dtype][0],
    }
    found = {
        **{name: header.metadata[name] for name in ("shard_id", "capture_key", "final_norm")},
        "residual_layers": list(header.residual_layers),
        "shape of a row": header.row_shapes(),
        "dtype": header.dtype,
    }
    for difference in differences(expected, found):
        yield Finding(check="header", sample_id=None, detail=str(difference))


def check_layout(shard: Shard, *, samples: int, tokens: int) -> Iterator[Finding]:
    """Compare the number of a shard's samples, tokens and rows with the plan."""
    offsets = shard.offsets
    expected = {
        "samples": samples,
        "offsets": samples + 1,
        "first row": 0,
        "rows": tokens,
        "rows of states": shard.segments.rows if shard.shares_rows else tokens,
    }
    found = {
        "samples": len(shard.header.sample_ids),
        "offsets": len(offsets),
        "first row": int(offsets[0]),
        "rows": int(offsets[-1]),
        "rows of states": shard.header.rows,
    }
    for difference in differences(expected, found):
        yield Finding(check="counts", sample_id=None, detail=str(difference))
    if (np.diff(offsets) <= 0).any():
        yield Finding(check="counts", sample_id=None, detail="expected ascending offsets")
    elif shard.shares_rows:
        if (np.diff(offsets) != shard.segments.lengths).any():
            detail = "expected segments of as many rows as each sample has tokens"
            yield Finding(check="counts", sample_id=None, detail=detail)
        elif fault := shard.segments.fault(shard.input_ids):
            yield Finding(check="counts", sample_id=None, detail=f"segments: {fault}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scan:
    """Result of reading one sample's own rows: their checksum, and the faulty rows.

    A faulty row is one that no forward pass gives.
    """

    checksum: str
    findings: list[Finding]


def scan_sample(shard: Shard, index: int) -> Scan:
    """Read a sample's own states once, in the file's order; shared ones are an earlier sample's.

    Returns:
        their checksum, and the rows that are not finite, all zero or constant.
    """
    first, end = shard.rows(index)
    shared = shard.segments.shared(index)
    name, layers = shard.header.sample_ids[index], shard.header.residual_layers
    digests, faults = [], []
    for tensor in shard.header.states():
        digest = xxhash.xxh3_128()
        states = shard.state_rows(tensor, first, end)
        step = max(1, _BLOCK_BYTES // (states[0].numel() * states.itemsize))
        for start in range(0, len(states), step):
            bits = _bits(states[start : start + step])
            digest.update(bits)
            for position, fault in row_faults(bits.reshape(-1, bits.shape[-1]), states.dtype):
                row, layer = divmod(position, bits.shape[1] if tensor == "hidden_states" else 1)
                where = f"r_{layers[layer]}" if tensor == "hidden_states" else "the final state"
                faults.append(f"row {shared + start + row} of {where} is {fault}")
        digests.append(digest)
    shown = "; ".join(faults[:_FAULTS_SHOWN]) + (
        f" (and {len(faults) - _FAULTS_SHOWN} more)" if len(faults) > _FAULTS_SHOWN else ""
    )
    findings = [Finding(check="values", sample_id=name, detail=shown)] if faults else []
    return Scan(checksum=combined_checksum(*digests), findings=findings)


def check_sample(
    shard: Shard,
    index: int,
    *,
    receipt: SampleReceipt,
    scan: Scan,
    prefix: bool,
    most_cached: int = 0,
) -> Iterator[Finding]:
    """Compare one sample's receipt with the rows and the ids in the file, and check its values.

    Args:
        scan: what `scan_sample` found; its checksum must be the one that the server took.
        prefix: the sample is a prefix recapture: its sample id is that of the whole sample, and it
            has no `prompt_tokens`.
        most_cached: cached tokens that there may be.
    """
    first, end = shard.rows(index)
    name, (tokens, _) = shard.header.sample_ids[index], shard.tokens(index)
    cached = min(receipt.cached_tokens, most_cached)
    expected = {
        "sample_id": name,
        "first_row": first,
        "rows": end - first,
        "shared_rows": shard.segments.shared(index),
        "cached_tokens": cached,
        "ids_hash": ids.ids_hash(tokens[cached:]),
    }
    if not prefix:
        expected["prompt_tokens"] = len(tokens)
        content = shard.content_id(index)
        if content != name:
            yield Finding(
                check="ids",
                sample_id=name,
                detail=f"its tokens and mask in the file are those of {content}",
            )
    for field in differences(expected, vars(receipt)):
        check = {"cached_tokens": "cached tokens", "ids_hash": "ids"}.get(field.name, "counts")
        yield Finding(
            check=check,
            sample_id=name,
            detail=f"{field.name}: expected {field.expected}, the receipt has {field.found}",
        )
    yield from scan.findings
    if scan.checksum != receipt.checksum:
        detail = (
            f"the states changed since they were captured: expected {receipt.checksum},"
            f" found {scan.checksum}"
        )
        yield Finding(check="checksum", sample_id=name, detail=detail)


def row_faults(rows: np.ndarray, dtype: torch.dtype) -> list[tuple[int, str]]:
    """Return the rows that are not finite, all zero, or one value repeated.

    The function compares the numbers' bits, which is exact and several times as fast as a
    comparison of floats: without the sign, floats and their bits have the same order.

    Args:
        rows: the bits of `dtype` as unsigned numbers, [n, H].

    Returns:
        pairs (row, fault) in ascending order.
    """
    _, unsigned, sign, exponent = _BITS[dtype]
    # Of the negative numbers, if the row has one.
    largest = rows.max(axis=-1)
    # Of the positive numbers.
    positive = rows.view(np.dtype(unsigned).str.replace("u", "i")).max(axis=-1)
    infinite = (positive >= exponent) | (largest >= sign | exponent)
    zero = (positive <= 0) & (largest <= sign)
    same = np.flatnonzero(rows[:, 0] == rows[:, -1])
    constant = np.zeros(len(rows), dtype=bool)
    constant[same] = (rows[same] == rows[same, :1]).all(axis=-1)
    faults = np.select(
        [infinite, zero, constant], ["not finite", "all zero", "constant"], default=""
    )
    return [(int(row), str(faults[row])) for row in np.flatnonzero(infinite | zero | constant)]


def _bits(states: torch.Tensor) -> np.ndarray:
    signed, unsigned, *_ = _BITS[states.dtype]
    return states.view(signed).numpy().view(unsigned)

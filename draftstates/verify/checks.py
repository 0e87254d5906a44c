"""What is checked of every sample by itself: counts, ids, values, checksum. Each fault is a `Finding` that names its check."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from draftstates import ids
from draftstates.capture_spec import STORED_DTYPES
from draftstates.shards import Shard, ShardHeader

_BLOCK_BYTES = 1 << 18  # hashed and looked through while it lies in the processor's cache
_FAULTS_SHOWN = 3  # rows named of one sample
# Bits of each stored format: as unsigned and as signed numbers, its sign, and its exponent (all ones: infinite or no number).
_BITS: dict[torch.dtype, tuple[torch.dtype, type, int, int]] = {
    torch.bfloat16: (torch.int16, np.uint16, 0x8000, 0x7F80),
    torch.float16: (torch.int16, np.uint16, 0x8000, 0x7C00),
    torch.float32: (torch.int32, np.uint32, 0x80000000, 0x7F800000),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A fault: the check that found it, the sample (None: the whole shard), and what was expected and found."""

    check: str
    sample_id: str | None
    detail: str

    def __str__(self) -> str:
        return f"{'the shard' if self.sample_id is None else 'sample ' + self.sample_id}: {self.check}: {self.detail}"


def check_header(header: ShardHeader, *, capture: Mapping[str, Any], shard_id: str) -> Iterator[Finding]:
    """Hold a shard's (or its probe file's) header to the plan's capture."""
    layers, hidden = capture["residual_layers"], capture["hidden_size"]
    expected = {
        "shard_id": shard_id,
        "capture_key": capture["key"],
        "final_norm": capture["final_norm"],
        "residual_layers": list(layers),
        "shape of a row": ((len(layers), hidden), (hidden,)),
        "dtype": STORED_DTYPES[capture["stored_dtype"]][0],
    }
    found = {
        **{name: header.metadata[name] for name in ("shard_id", "capture_key", "final_norm")},
        "residual_layers": list(header.residual_layers),
        "shape of a row": (header.tensors["hidden_states"][1][1:], header.tensors["final_hidden_state"][1][1:]),
        "dtype": header.tensors["hidden_states"][0],
    }
    for name, value in expected.items():
        if found[name] != value:
            yield Finding(check="header", sample_id=None, detail=f"expected {name} {value}, found {found[name]}")


def check_layout(shard: Shard, *, samples: int, tokens: int) -> Iterator[Finding]:
    """Hold a shard's samples to the plan: their number, their rows, and the names that follow from their tokens."""
    names, offsets = shard.header.sample_ids, shard.offsets
    for what, expected, found in (
        ("samples", samples, len(names)),
        ("offsets", samples + 1, len(offsets)),
        ("first row", 0, int(offsets[0])),
        ("rows", tokens, int(offsets[-1])),
        ("rows of states", tokens, shard.header.rows),
    ):
        if expected != found:
            yield Finding(check="counts", sample_id=None, detail=f"expected {expected} {what}, found {found}")
    if (np.diff(offsets) <= 0).any():
        yield Finding(check="counts", sample_id=None, detail="expected ascending offsets")


def check_receipt(shard: Shard, index: int, receipt: Mapping[str, Any], *, prefix: bool = False) -> Iterator[Finding]:
    """Hold one sample's receipt to the rows, the name and the ids in the file.

    Args:
        prefix: the sample is a prefix recapture: its name is the whole sample's, and it has no `prompt_tokens`.
    """
    first, end = shard.rows(index)
    name, tokens = shard.header.sample_ids[index], shard.input_ids[first:end]
    expected = {"sample_id": name, "first_row": first, "rows": end - first, "cached_tokens": 0, "ids_hash": ids.ids_hash(tokens)}
    if not prefix:
        expected["prompt_tokens"] = end - first
        content = shard.content_id(index)
        if content != name:
            yield Finding(check="ids", sample_id=name, detail=f"its tokens and mask in the file are those of {content}")
    for field, value in expected.items():
        if receipt.get(field) != value:
            check = {"cached_tokens": "cached tokens", "ids_hash": "ids"}.get(field, "counts")
            yield Finding(check=check, sample_id=name, detail=f"{field}: expected {value}, the receipt says {receipt.get(field)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scan:
    """One sample, read once: the checksum of its states, and the rows that no forward pass gives."""

    checksum: str
    findings: list[Finding]


def scan_sample(shard: Shard, index: int) -> Scan:
    """Read a sample's states once, in the file's order: checksum, and rows that are not finite, all zero or constant."""
    first, end = shard.rows(index)
    name, layers = shard.header.sample_ids[index], shard.header.residual_layers
    digests, faults = [], []
    for tensor in ("hidden_states", "final_hidden_state"):
        digest = xxhash.xxh3_64()
        states = shard.states(tensor, first, end)
        step = max(1, _BLOCK_BYTES // (states[0].numel() * states.itemsize))
        for start in range(0, len(states), step):
            bits = _bits(states[start : start + step])
            digest.update(bits)
            for position, fault in row_faults(bits.reshape(-1, bits.shape[-1]), states.dtype):
                row, layer = divmod(position, bits.shape[1] if tensor == "hidden_states" else 1)
                where = f"r_{layers[layer]}" if tensor == "hidden_states" else "the final state"
                faults.append(f"row {start + row} of {where} is {fault}")
        digests.append(digest.hexdigest())
    shown = "; ".join(faults[:_FAULTS_SHOWN]) + (f" (and {len(faults) - _FAULTS_SHOWN} more)" if len(faults) > _FAULTS_SHOWN else "")
    findings = [Finding(check="values", sample_id=name, detail=shown)] if faults else []
    return Scan(checksum="".join(digests), findings=findings)


def check_checksum(name: str, *, found: str, receipt: Mapping[str, Any]) -> Iterator[Finding]:
    """Hold the states on the disk to the checksum that the server took at capture."""
    if found != receipt.get("checksum"):
        detail = f"the states changed since they were captured: expected {receipt.get('checksum')}, found {found}"
        yield Finding(check="checksum", sample_id=name, detail=detail)


def row_faults(rows: np.ndarray, dtype: torch.dtype) -> list[tuple[int, str]]:
    """Rows that are not finite, all zero, or one value repeated.

    Works on the numbers' bits, exactly, several times as fast as on floats: without its sign, a float's bits order as it does.

    Args:
        rows: the bits of `dtype` as unsigned numbers, [n, H].

    Returns:
        pairs (row, fault) in ascending order.
    """
    _, unsigned, sign, exponent = _BITS[dtype]
    largest = rows.max(axis=-1)  # of the negative numbers where there is one
    positive = rows.view(np.dtype(unsigned).str.replace("u", "i")).max(axis=-1)  # of the positive ones
    infinite = (positive >= exponent) | (largest >= sign | exponent)
    zero = (positive <= 0) & (largest <= sign)
    same = np.flatnonzero(rows[:, 0] == rows[:, -1])
    constant = np.zeros(len(rows), dtype=bool)
    constant[same] = (rows[same] == rows[same, :1]).all(axis=-1)
    faults = np.select([infinite, zero, constant], ["not finite", "all zero", "constant"], default="")
    return [(int(row), str(faults[row])) for row in np.flatnonzero(infinite | zero | constant)]


def _bits(states: torch.Tensor) -> np.ndarray:
    signed, unsigned, *_ = _BITS[states.dtype]
    return states.view(signed).numpy().view(unsigned)

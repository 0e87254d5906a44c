"""The shard file: a safetensors file laid out before capture, filled in place at each sample's row offset.

| tensor               | dtype, shape              |
| -------------------- | ------------------------- |
| `offsets`            | int64 [S+1]               | rows of sample i are offsets[i]:offsets[i+1]
| `hidden_states`      | stored dtype [T, K, H]    | r_k in ascending k
| `final_hidden_state` | stored dtype [T, H]       | post- or pre-norm, as `final_norm` says
| `input_ids`          | int32 [T]                 |
| `loss_mask`          | uint8 [T]                 | 1 = a target to learn

This module alone knows the layout; any safetensors reader opens the result. It imports torch only where states are read: that takes
seconds, and the jobs that lay shards out start by the thousand.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from draftstates import ids
from draftstates.capture_spec import FORMAT_VERSION, STORED_DTYPES, CaptureSpec, torch_dtype
from draftstates.errors import UserError

if TYPE_CHECKING:
    import torch

FORMAT = "draftstates.shard"
_ITEM_BYTES = dict(STORED_DTYPES.values())  # by safetensors' code
_HEADER_ALIGNMENT = 4096  # the first row starts on a page, so that aligned writes stay aligned


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardHeader:
    """A shard's metadata and where its tensors lie in the file (absolute byte offsets)."""

    metadata: dict[str, str]
    tensors: dict[str, tuple[str, tuple[int, ...], int, int]]  # name -> dtype, shape, first byte, end byte
    size: int  # bytes that the whole file must have
    residual_layers: tuple[int, ...]
    sample_ids: list[str]

    @property
    def rows(self) -> int:
        return self.tensors["final_hidden_state"][1][0]

    def states(self) -> dict[str, tuple[int, int]]:
        """First byte and bytes per row of the two tensors that the server fills."""
        found = {}
        for name in ("hidden_states", "final_hidden_state"):
            _, shape, begin, end = self.tensors[name]
            found[name] = (begin, (end - begin) // shape[0])
        return found


def shard_bytes(*, spec: CaptureSpec, samples: int, tokens: int) -> int:
    """Bytes of a shard file, without its header (the header takes 4 KiB and some 40 bytes a sample)."""
    return tokens * (spec.row_bytes + 5) + (samples + 1) * 8


def create(
    path: Path,
    *,
    spec: CaptureSpec,
    shard_id: str,
    sample_ids: Sequence[str],
    lengths: Sequence[int],
    input_ids: np.ndarray,
    loss_mask: np.ndarray,
) -> ShardHeader:
    """Lay out a shard: write header and tokens, reserve the bytes of the states on the disk.

    Args:
        lengths: tokens of each sample, S numbers that sum to T.
        input_ids: int [T]; loss_mask: 0 or 1 [T].

    Raises:
        UserError: the disk has no room; nothing is left behind.
    """
    rows = int(sum(lengths))
    if rows != len(input_ids) or rows != len(loss_mask) or len(lengths) != len(sample_ids):
        raise ValueError(f"{len(sample_ids)} samples of {rows} tokens, but {len(input_ids)} ids and {len(loss_mask)} mask values")
    offsets = np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))]).astype("<i8")
    shape = (rows, len(spec.residual_layers), spec.hidden_size)
    code, _ = STORED_DTYPES[spec.stored_dtype]
    text, size = _header(_metadata(spec, shard_id, sample_ids), dtype=code, shape=shape, samples=len(sample_ids))
    _write_layout(path, text, size)
    header = read_header(path)
    with open(path, "r+b") as file:
        for tensor, values in (("offsets", offsets), ("input_ids", input_ids), ("loss_mask", loss_mask)):
            file.seek(header.tensors[tensor][2])
            file.write(np.ascontiguousarray(values, dtype={"offsets": "<i8", "input_ids": "<i4", "loss_mask": np.uint8}[tensor]).data)
    return header


def _header(metadata: dict[str, str], *, dtype: str, shape: tuple[int, int, int], samples: int) -> tuple[bytes, int]:
    """The bytes of a shard's header, and those of the whole file; `shape` [T, K, H] and `dtype` are those of `hidden_states`."""
    rows, _, hidden = shape
    tensors = {
        "offsets": ("I64", [samples + 1], 8),
        "hidden_states": (dtype, [*shape], _ITEM_BYTES[dtype]),
        "final_hidden_state": (dtype, [rows, hidden], _ITEM_BYTES[dtype]),
        "input_ids": ("I32", [rows], 4),
        "loss_mask": ("U8", [rows], 1),
    }
    entries: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for tensor, (code, extent, item_bytes) in tensors.items():
        end = at + math.prod(extent) * item_bytes
        entries[tensor] = {"dtype": code, "shape": extent, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + at


def _metadata(spec: CaptureSpec, shard_id: str, sample_ids: Sequence[str]) -> dict[str, str]:
    return {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "residual_layers": json.dumps(list(spec.residual_layers)),
        "final_norm": spec.final_norm,
        "model": spec.model,
        "capture_key": spec.key,
        "shard_id": shard_id,
        "sample_ids": json.dumps(list(sample_ids)),
    }


def _write_layout(path: Path, header: bytes, size: int) -> None:
    with open(path, "wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
            file.write(header)
        except OSError as error:
            path.unlink()
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise UserError(f"{path}: no room for {size:,} bytes: {error.strerror}") from error
            raise


def read_header(path: Path) -> ShardHeader:
    """Read and check a shard's header.

    Raises:
        UserError: not a safetensors file, not a shard of this format, or a size other than its header says.
    """
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        size = os.fstat(file.fileno()).st_size
        if len(prefix) < 8 or length > size:
            raise UserError(f"{path}: not a safetensors file: {size} bytes, header length {length}")
        text = file.read(length)
    try:
        entries = json.loads(text)
        metadata = entries.pop("__metadata__")
        if metadata["format"] != FORMAT or metadata["format_version"] != str(FORMAT_VERSION):
            raise UserError(f"{path}: expected {FORMAT} version {FORMAT_VERSION}, found {metadata['format']} {metadata['format_version']}")
        states = entries["hidden_states"]
        layers, names = json.loads(metadata["residual_layers"]), json.loads(metadata["sample_ids"])
        shape = (states["shape"][0], len(layers), states["shape"][2])
        expected, whole = _header(metadata, dtype=states["dtype"], shape=shape, samples=len(names))
        start = 8 + length
        tensors = {
            name: (e["dtype"], tuple(e["shape"]), start + e["data_offsets"][0], start + e["data_offsets"][1]) for name, e in entries.items()
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(f"{path}: its header is not that of a shard: {type(error).__name__}: {error}") from error
    if prefix + text != expected:
        # a reader that takes what it needs, as this one does, would not see what another one refuses
        raise UserError(f"{path}: its header is not as it was written: expected {_first_difference(expected, prefix + text)}")
    if size != whole:
        raise UserError(f"{path}: cut short or overlong: its header says {whole} bytes, the file has {size}")
    return ShardHeader(metadata=metadata, tensors=tensors, size=whole, residual_layers=tuple(layers), sample_ids=names)


def _first_difference(expected: bytes, found: bytes) -> str:
    at = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), min(len(expected), len(found)))
    return f"{expected[at : at + 40]!r} at byte {at}, found {found[at : at + 40]!r}"


class Shard:
    """A shard opened for reading through a memory map: nothing is read until it is touched."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.header = read_header(self.path)
        self._bytes = np.memmap(self.path, dtype=np.uint8, mode="r")
        self.offsets = self._array("offsets", "<i8")
        self.input_ids = self._array("input_ids", "<i4")
        self.loss_mask = self._array("loss_mask", np.uint8)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def stored_dtype(self) -> str:
        """Name of the states' number format, as the configuration spells it."""
        code = self.header.tensors["hidden_states"][0]
        return next(name for name, (found, _) in STORED_DTYPES.items() if found == code)

    def _array(self, name: str, dtype: object) -> np.ndarray:
        _, shape, begin, end = self.header.tensors[name]
        return self._bytes[begin:end].view(dtype).reshape(shape)

    def states(self, name: str, first: int, end: int) -> torch.Tensor:
        """Rows first:end of `hidden_states` [n, K, H] or `final_hidden_state` [n, H], a read-only view of the file."""
        _, shape, begin, stop = self.header.tensors[name]
        width = (stop - begin) // shape[0]
        flat = np.asarray(self._bytes[begin + first * width : begin + end * width])
        return _as_tensor(flat, torch_dtype(self.stored_dtype)).reshape(end - first, *shape[1:])

    def rows(self, index: int) -> tuple[int, int]:
        """First row and end row of sample `index`."""
        return int(self.offsets[index]), int(self.offsets[index + 1])

    def sample(self, index: int) -> dict[str, torch.Tensor]:
        """Sample `index`: input_ids int32 [n], loss_mask uint8 [n], hidden_states [n, K, H], final_hidden_state [n, H]."""
        import torch

        first, end = self.rows(index)
        return {
            "input_ids": torch.from_numpy(self.input_ids[first:end].copy()),
            "loss_mask": torch.from_numpy(self.loss_mask[first:end].copy()),
            "hidden_states": self.states("hidden_states", first, end),
            "final_hidden_state": self.states("final_hidden_state", first, end),
        }

    def content_id(self, index: int) -> str:
        """What sample `index` is called by the tokens and the mask that lie in the file: its `sample_id`, where they are as they were."""
        first, end = self.rows(index)
        return ids.sample_id(self.input_ids[first:end], self.loss_mask[first:end])

    def checksum(self, index: int) -> str:
        """Checksum of sample `index` as it lies on the disk (see `sample_checksum`)."""
        first, end = self.rows(index)
        return sample_checksum(*(self.row_bytes(name, first, end) for name in self.header.states()))

    def row_bytes(self, name: str, first: int, end: int) -> np.ndarray:
        """The bytes of rows first:end of `hidden_states` or `final_hidden_state`, uint8, a view of the file."""
        begin, width = self.header.states()[name]
        return self._bytes[begin + first * width : begin + end * width]


def _as_tensor(flat: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    import torch

    with warnings.catch_warnings():  # the map is read-only on purpose; torch warns that it cannot say so
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(flat).view(dtype)


def sample_checksum(hidden: object, final: object) -> str:
    """32 hex digits: XXH3-64 of the sample's `hidden_states` bytes, then of its `final_hidden_state` bytes."""
    return xxhash.xxh3_64_hexdigest(hidden) + xxhash.xxh3_64_hexdigest(final)

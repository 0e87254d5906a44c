"""The shard file: a safetensors file that is laid out before capture and filled in place.

The server writes each sample's states at the sample's row offset. A capture may have no layers, or
no final state (`CaptureSpec.final_state`): then the file lacks the tensor.

| tensor               | dtype, shape              |
| -------------------- | ------------------------- |
| `offsets`            | int64 [S+1]               | tokens of sample i are offsets[i]:offsets[i+1]
| `hidden_states`      | stored dtype [R, K, H]    | r_k in ascending k; may be absent
| `final_hidden_state` | stored dtype [R, H]       | pre- or post-norm: `final_norm`; may be absent
| `input_ids`          | int32 [T]                 |
| `loss_mask`          | uint8 [T]                 | 1 = a supervised token

Format version 2 has a row for each token: R = T, and `offsets` are those of the rows too. Where
samples that begin alike share rows, the version is 3, R < T, and two tensors follow `offsets`:

| `segment_offsets`    | int64 [S+1]               | segments of each sample, as `offsets`
| `segments`           | int64 [G, 2]              | first row and number of rows of each

This module alone knows the layout; any safetensors reader opens the file. The module imports torch
only where states are read: the import takes seconds, and thousands of jobs lay shards out.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import mmap
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from draftstates import ids
from draftstates.errors import UserError
from draftstates.files import check_version
from draftstates.plan.prefixes import Segments, shard_id
from draftstates.plan.words import of_bytes
from draftstates.spec import FORMAT_VERSION, STORED_DTYPES, CaptureSpec, torch_dtype

if TYPE_CHECKING:
    import torch

FORMAT = "draftstates.shard"
# version of a file whose samples share rows; it is not in the capture key, since the rows are the
# same numbers, and a shard id says which rows are shared
SHARED_VERSION = FORMAT_VERSION + 1
# the tensors that the server fills, in the order of the file; a capture may lack one of them
_STATES = ("hidden_states", "final_hidden_state")
# bytes of an element by safetensors' name of its number format
_ITEM_BYTES = {**dict(STORED_DTYPES.values()), "F8_E4M3": 1, "I32": 4, "I64": 8, "U8": 1, "BOOL": 1}
# numpy's name of the formats of what is no state
_NUMBERS = {"I32": "<i4", "I64": "<i8", "U8": np.uint8}
# the first row starts on a page, so that aligned writes stay aligned
_HEADER_ALIGNMENT = 4096
# metadata that the readers of a header use, beside format and version
_NEEDED = (
    *("residual_layers", "final_norm", "model"),
    *("capture_key", "shard_id", "sample_ids"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardHeader:
    """A shard's metadata and the places of its tensors in the file.

    Attributes:
        metadata: metadata of the safetensors header.
        tensors: dtype, shape, first byte and end byte of each tensor by name; the bytes count from
            the beginning of the file.
        size: number of bytes that the whole file must have.
        residual_layers: ascending k of the captured r_k.
        sample_ids: ids of the samples, in order.
    """

    metadata: dict[str, str]
    tensors: dict[str, tuple[str, tuple[int, ...], int, int]]
    size: int
    residual_layers: tuple[int, ...]
    sample_ids: list[str]

    @property
    def rows(self) -> int:
        return self.tensors[next(iter(self.states()))][1][0]

    @property
    def dtype(self) -> str:
        """safetensors' name of the states' number format."""
        return self.tensors[next(iter(self.states()))][0]

    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of a row of each tensor that the server fills."""
        return {name: self.tensors[name][1][1:] for name in self.states()}

    def states(self) -> dict[str, tuple[int, int]]:
        """Return the first byte and the bytes per row of each tensor that the server fills."""
        found = {}
        for name in _STATES:
            if name not in self.tensors:
                continue
            _, shape, begin, end = self.tensors[name]
            found[name] = (begin, (end - begin) // shape[0])
        return found


def create(
    path: Path,
    *,
    spec: CaptureSpec,
    shard_id: str,
    sample_ids: Sequence[str],
    lengths: Sequence[int],
    input_ids: np.ndarray,
    loss_mask: np.ndarray,
    segments: Segments | None = None,
) -> ShardHeader:
    """Lay out a shard: write header and tokens, reserve the bytes of the states on the disk.

    Args:
        path: file to write.
        spec: spec of the capture.
        shard_id: id of the shard.
        sample_ids: ids of the S samples.
        lengths: tokens of each sample, S numbers whose sum is T.
        input_ids: ids of all samples, int [T].
        loss_mask: mask values of all samples, 0 or 1 [T].
        segments: places of the samples' rows; None where each token has a row of its own.

    Raises:
        UserError: the disk has no room; then no file remains.
    """
    tokens = int(sum(lengths))
    if tokens != len(input_ids) or tokens != len(loss_mask) or len(lengths) != len(sample_ids):
        raise ValueError(
            f"{len(sample_ids)} samples of {tokens} tokens, but {len(input_ids)} ids and"
            f" {len(loss_mask)} mask values"
        )
    values = {
        "offsets": np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))]),
        "input_ids": input_ids,
        "loss_mask": loss_mask,
    }
    if segments:
        values |= {"segment_offsets": segments.offsets, "segments": segments.places}
    text, size = _header(
        _metadata(
            spec, shard_id, sample_ids, version=SHARED_VERSION if segments else FORMAT_VERSION
        ),
        dtype=STORED_DTYPES[spec.stored_dtype][0],
        shape=(
            segments.rows if segments else tokens,
            len(spec.residual_layers),
            spec.hidden_size,
        ),
        samples=len(sample_ids),
        tokens=tokens,
        segments=len(segments.places) if segments else None,
        final=spec.final_state,
    )
    _write_layout(path, text, size)
    header = read_header(path)
    with open(path, "r+b") as file:
        for tensor, content in values.items():
            code, _, begin, _ = header.tensors[tensor]
            file.seek(begin)
            file.write(np.ascontiguousarray(content, dtype=_NUMBERS[code]).data)
    return header


def _header(
    metadata: Mapping[str, str],
    *,
    dtype: str,
    shape: tuple[int, int, int],
    samples: int,
    tokens: int,
    segments: int | None,
    final: bool,
) -> tuple[bytes, int]:
    """Return the bytes of a shard's header, and the size of the whole file.

    Args:
        metadata: metadata of the shard.
        dtype: safetensors' name of the states' number format.
        shape: shape of `hidden_states`, [R, K, H].
        samples: number of samples.
        tokens: number of tokens.
        segments: number of segments; None where each token has a row of its own.
        final: whether it holds final states.
    """
    rows, layers, hidden = shape
    places = {"segment_offsets": ("I64", [samples + 1]), "segments": ("I64", [segments, 2])}
    tensors = {
        "offsets": ("I64", [samples + 1]),
        **(places if segments is not None else {}),
        **({"hidden_states": (dtype, [*shape])} if layers else {}),
        **({"final_hidden_state": (dtype, [rows, hidden])} if final else {}),
        "input_ids": ("I32", [tokens]),
        "loss_mask": ("U8", [tokens]),
    }
    header, _, size = safetensors_header(tensors, metadata, alignment=_HEADER_ALIGNMENT)
    return header, size


def safetensors_header(
    tensors: Mapping[str, tuple[str, list[int]]],
    metadata: Mapping[str, str],
    *,
    alignment: int = 8,
    length: int = 0,
) -> tuple[bytes, dict[str, int], int]:
    """Return a file's header, the first byte of each tensor in the file, and the file's size.

    Args:
        tensors: safetensors' name of the number format and the shape of each tensor, in the order
            of the file.
        metadata: metadata of the file.
        alignment: the header's length becomes a multiple of it.
        length: least number of bytes of the header.
    """
    entries: dict[str, object] = {"__metadata__": metadata}
    begins, at = {}, 0
    for name, (code, shape) in tensors.items():
        end = at + math.prod(shape) * _ITEM_BYTES[code]
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [at, end]}
        begins[name], at = at, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(length - 8)
    text += b" " * (-(8 + len(text)) % alignment)
    start = 8 + len(text)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: start + begin for name, begin in begins.items()}, start + at


def _metadata(
    spec: CaptureSpec, shard_id: str, sample_ids: Sequence[str], *, version: int
) -> dict[str, str]:
    return {
        "format": FORMAT,
        "format_version": str(version),
        "residual_layers": json.dumps(list(spec.residual_layers)),
        "final_norm": spec.final_norm,
        "model": spec.model,
        "capture_key": spec.key,
        "shard_id": shard_id,
        "sample_ids": json.dumps(list(sample_ids)),
    }


def _write_layout(path: Path, header: bytes, size: int) -> None:
    """Reserve the whole file on the disk, and write its header."""
    with open(path, "wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
            file.write(header)
        except OSError as error:
            path.unlink()
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise UserError(
                    f"{path}: no room for {of_bytes(size)}: {error.strerror}"
                ) from error
            raise


def read_header(path: Path) -> ShardHeader:
    """Read and check a shard's header.

    Raises:
        UserError: the file is not a safetensors file, not a shard of this format, or not of the
            size that its header says.
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
        version = int(metadata["format_version"])
        shares = version == SHARED_VERSION
        check_version(
            path,
            what="a shard",
            expected=(FORMAT, version if shares else FORMAT_VERSION),
            found=(metadata["format"], version),
            remedy="run: snakemake --cores all --forcerun plan",
        )
        for name in _NEEDED:
            if not isinstance(metadata[name], str):
                raise TypeError(f"{name}: expected text, found {metadata[name]!r:.60}")
        states = entries[min(_STATES, key=lambda name: name not in entries)]
        layers, names = json.loads(metadata["residual_layers"]), json.loads(metadata["sample_ids"])
        shape = (states["shape"][0], len(layers), states["shape"][-1])
        expected, whole = _header(
            metadata,
            dtype=states["dtype"],
            shape=shape,
            samples=len(names),
            tokens=entries["input_ids"]["shape"][0] if shares else shape[0],
            segments=entries["segments"]["shape"][0] if shares else None,
            final="final_hidden_state" in entries,
        )
        start = 8 + length
        tensors = {
            name: (
                e["dtype"],
                tuple(e["shape"]),
                start + e["data_offsets"][0],
                start + e["data_offsets"][1],
            )
            for name, e in entries.items()
        }
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path}: its header is not that of a shard: {type(error).__name__}: {error}"
        ) from error
    if prefix + text != expected:
        # this reader needs few fields: it would accept a header that another reader refuses
        raise UserError(
            f"{path}: its header is not as it was written: expected"
            f" {_first_other_bytes(expected, prefix + text)}"
        )
    if size != whole:
        raise UserError(
            f"{path}: cut short or overlong: its header says {whole} bytes, the file has {size}"
        )
    return ShardHeader(
        metadata=metadata,
        tensors=tensors,
        size=whole,
        residual_layers=tuple(layers),
        sample_ids=names,
    )


def _first_other_bytes(expected: bytes, found: bytes) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b),
        min(len(expected), len(found)),
    )
    return f"{expected[at : at + 40]!r} at byte {at}, found {found[at : at + 40]!r}"


class Shard:
    """A shard opened for reading through memory maps: a page is read when it is first used.

    Attributes:
        offsets: tokens of sample i are offsets[i]:offsets[i+1], int64 [S+1].
        segments: places of the samples' rows.

    Raises:
        UserError: the file is no whole shard, or its segments are not those of its shard id.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.header = read_header(self.path)
        self.metadata = self.header.metadata
        self._bytes = np.memmap(self.path, dtype=np.uint8, mode="r")
        self.offsets = self._array("offsets")
        self.input_ids = self._array("input_ids")
        self.loss_mask = self._array("loss_mask")
        self.segments = self._read_segments()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def stored_dtype(self) -> str:
        """The configuration's name of the states' number format."""
        code = self.header.dtype
        return next(name for name, (found, _) in STORED_DTYPES.items() if found == code)

    @property
    def shares_rows(self) -> bool:
        return "segments" in self.header.tensors

    def _array(self, name: str) -> np.ndarray:
        code, shape, begin, end = self.header.tensors[name]
        return self._bytes[begin:end].view(_NUMBERS[code]).reshape(shape)

    def _read_segments(self) -> Segments:
        if not self.shares_rows:
            return Segments.unshared(np.diff(self.offsets))
        found = Segments(self._array("segment_offsets"), self._array("segments"))
        try:
            same = shard_id(self.header.sample_ids, found) == self.metadata["shard_id"]
        except (IndexError, ValueError):
            # damaged offsets lead out of the array; an IndexError would end a loop over a dataset
            same = False
        # a reader that trusts them would give a sample the rows of another
        if not same:
            raise UserError(
                f"{self.path}: its samples and their segments are not those of shard"
                f" {self.metadata['shard_id']}"
            )
        return found

    def state_rows(self, name: str, first: int, end: int) -> torch.Tensor:
        """Return rows first:end of `hidden_states` [n, K, H] or `final_hidden_state` [n, H].

        The result is a read-only view of the file.
        """
        _, shape, begin, stop = self.header.tensors[name]
        width = (stop - begin) // shape[0]
        flat = np.asarray(self._bytes[begin + first * width : begin + end * width])
        return _as_tensor(flat, torch_dtype(self.stored_dtype)).reshape(end - first, *shape[1:])

    def rows(self, index: int) -> tuple[int, int]:
        """Return the first row and the end row of sample `index`'s own rows.

        Those are all of its rows but the ones that it shares with an earlier sample.
        """
        return int(self.segments.ends[index]), int(self.segments.ends[index + 1])

    def length(self, index: int) -> int:
        """Return the number of tokens of sample `index`."""
        return int(self.offsets[index + 1] - self.offsets[index])

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return `input_ids` int32 [n] and `loss_mask` uint8 [n] of sample `index`."""
        span = slice(self.offsets[index], self.offsets[index + 1])
        return self.input_ids[span].copy(), self.loss_mask[span].copy()

    def pieces(self, index: int) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return the states of sample `index` by segment, in the order of its tokens.

        Each is a pair of layers [n, K, H] and final state [n, H], both private maps of the file.
        What is not captured has K = 0, or is None.
        """
        return [
            whole_states({name: self._map(name, first, first + n) for name in self.header.states()})
            for first, n in self.segments.of_sample(index)
        ]

    def states(self, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the layers [n, K, H] and the final state [n, H] of sample `index`.

        Of a sample in one segment they are private maps: a write to a state changes neither the
        file nor another state. Of other samples they are copies.
        """
        return joined(self.pieces(index))

    def _map(self, name: str, first: int, end: int) -> torch.Tensor:
        """Return rows as a private map of the file."""
        import torch

        _, shape, begin, _ = self.header.tensors[name]
        width = self.header.states()[name][1]
        start, stop = begin + first * width, begin + end * width
        page = start - start % mmap.ALLOCATIONGRANULARITY
        with open(self.path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), stop - page, access=mmap.ACCESS_COPY, offset=page)
        return torch.frombuffer(
            mapped, dtype=torch_dtype(self.stored_dtype), offset=start - page
        ).reshape(end - first, *shape[1:])

    def sample(self, index: int) -> dict[str, torch.Tensor]:
        """Return the tensors of sample `index` by name.

        They are `input_ids` int32 [n], `loss_mask` uint8 [n], and as far as they are captured
        `hidden_states` [n, K, H] and `final_hidden_state` [n, H].
        """
        import torch

        input_ids, loss_mask = self.tokens(index)
        return {
            "input_ids": torch.from_numpy(input_ids),
            "loss_mask": torch.from_numpy(loss_mask),
            **{name: self.sample_rows(name, index) for name in self.header.states()},
        }

    def sample_rows(self, name: str, index: int) -> torch.Tensor:
        """Return the rows of sample `index`, shared ones included (see `state_rows`).

        Of a sample in one segment they are a read-only view of the file, of others a copy.
        """
        import torch

        views = [
            self.state_rows(name, first, first + rows)
            for first, rows in self.segments.of_sample(index)
        ]
        return views[0] if len(views) == 1 else torch.cat(views)

    def content_id(self, index: int) -> str:
        """Return the sample id of the tokens and the mask that the file holds for sample `index`.

        It equals the planned sample id where the two have not changed.
        """
        return ids.sample_id(*self.tokens(index))

    def checksum(self, index: int) -> str:
        """Return the checksum of all rows of sample `index` on the disk (see `sample_checksum`)."""
        digests = []
        for name in self.header.states():
            digest = xxhash.xxh3_128()
            for first, rows in self.segments.of_sample(index):
                digest.update(self.row_bytes(name, first, first + rows))
            digests.append(digest)
        return combined_checksum(*digests)

    def row_bytes(self, name: str, first: int, end: int) -> np.ndarray:
        """Return the bytes of rows first:end of `hidden_states` or `final_hidden_state`, uint8.

        The result is a view of the file.
        """
        begin, width = self.header.states()[name]
        return self._bytes[begin + first * width : begin + end * width]


def whole_states(
    found: Mapping[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return layers [n, K, H] and final state [n, H] of a sample from the tensors that it has.

    What is not captured has K = 0, or is None.
    """
    final = found.get("final_hidden_state")
    layers = found.get("hidden_states")
    return (final.new_empty(len(final), 0, final.shape[-1]) if layers is None else layers), final


def joined(
    pieces: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the states of a sample from those of its segments (see `Shard.pieces`)."""
    import torch

    if len(pieces) == 1:
        return pieces[0]
    hidden, final = zip(*pieces, strict=True)
    return torch.cat(hidden), None if final[0] is None else torch.cat(final)


def _as_tensor(flat: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    import torch

    # the map is read-only on purpose; torch warns because its tensors cannot be marked read-only
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(flat).view(dtype)


def sample_checksum(*tensors: object) -> str:
    """Return the checksum of a sample's states: 32 hex digits.

    Args:
        tensors: bytes of each stored tensor, in the order of the file.
    """
    return combined_checksum(*(xxhash.xxh3_128(tensor) for tensor in tensors))


def combined_checksum(*digests: xxhash.xxh3_128) -> str:
    """Return the checksum of a sample whose tensors were hashed as one stream each.

    The checksum is the XXH3-128 of the streams' XXH3-128 digests, 16 bytes each, in the order of
    the tensors. So the chunks of the tensors may be hashed alternately, and a sample may have any
    number of tensors.
    """
    return xxhash.xxh3_128_hexdigest(b"".join(digest.digest() for digest in digests))

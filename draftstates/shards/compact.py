"""Compact shards: the same samples in fewer bytes, made from verified ones and read through `ShardDataset`.

A safetensors file like a shard, with these tensors; T rows, F of them with a final state, S samples:

| tensor               | dtype, shape                    |
| -------------------- | ------------------------------- |
| `input_ids`          | int32 [T]                       |
| `loss_mask`          | uint8 [T]                       |
| `offsets`            | int64 [S+1]                     | rows of sample i are offsets[i]:offsets[i+1]
| `final_offsets`      | int64 [S+1]                     | the same for `final_hidden_state`
| `hidden_states`      | stored dtype or e4m3 [T, K, H]  |
| `final_hidden_state` | stored dtype or e4m3 [F, H]     |
| `hidden_scales`      | float32 [T, K]                  | where the layers are e4m3: value = code * scale
| `final_scales`       | float32 [F]                     | where the final state is e4m3
| `exact_offsets`      | int64 [S+1]                     | where E final states are stored in full too, since e4m3 would change
| `exact_rows`         | int64 [E]                       | their most likely token: rows exact_offsets[i]:exact_offsets[i+1] are
| `exact_final`        | stored dtype [E, H]             | sample i's, counted among its final states

Where only supervised rows keep their final state, those are the rows that a loss reads: each supervised one and its neighbours, since
trainers shift targets by one. The others read as zeros. The layers stay whole: a drafter attends to all of them.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open

from draftstates.capture_spec import STORED_DTYPES, torch_dtype
from draftstates.errors import UserError
from draftstates.shards import Shard

FORMAT = "draftstates.compact"
FORMAT_VERSION = "1"
_E4M3_MAX = 448.0
_CODES = {torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32", torch.int32: "I32", torch.int64: "I64", torch.uint8: "U8"}
TopToken = Callable[[torch.Tensor], torch.Tensor]  # final states [n, H] to the most likely tokens [n]
_CODES |= {torch_dtype(name): code for name, (code, _) in STORED_DTYPES.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Storage:
    """How compact.

    Attributes:
        fp8: what is stored as e4m3 with a scale per row and layer: nothing (None), the "layers", or "all", the final state too. That one
            decides what a drafter is taught, and three bits of mantissa change the most likely token of some rows.
        supervised_rows: drop the final states that no loss reads.
        keep_top_token: with fp8 "all", store those final states in full whose most likely token would change.
    """

    fp8: str | None
    supervised_rows: bool
    keep_top_token: bool = False

    def __post_init__(self) -> None:
        if self.fp8 not in (None, "layers", "all"):
            raise UserError(f"fp8 must be 'layers' or 'all', found {self.fp8!r}")
        if self.keep_top_token and self.fp8 != "all":
            raise UserError("keep_top_token goes with fp8 'all': otherwise the final states are stored in full")

    @property
    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


def quantise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes [..., H] and float32 scales [...] of rows [..., H]; the largest value of each row becomes the largest code."""
    wide = rows.float()
    scales = (wide.abs().amax(-1) / _E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    return (wide / scales[..., None]).to(torch.float8_e4m3fn), scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows [..., H] in `dtype` from e4m3 codes [..., H] and scales [...]."""
    return (codes.float() * scales[..., None]).to(dtype)


def rows_of_loss(loss_mask: np.ndarray) -> np.ndarray:
    """Which rows' final states a loss may read, bool [n]: the supervised ones and their neighbours."""
    mask = loss_mask.astype(bool)
    needed = mask.copy()
    needed[1:] |= mask[:-1]
    needed[:-1] |= mask[1:]
    return needed


def compact_sample(shard: Shard, index: int, storage: Storage, top_token: TopToken | None) -> dict[str, torch.Tensor]:
    """The states of one sample as a compact shard holds them; `top_token` is needed for `keep_top_token` alone."""
    sample = shard.sample(index)
    hidden, final = sample["hidden_states"], sample["final_hidden_state"]
    if storage.supervised_rows:
        final = final[torch.from_numpy(rows_of_loss(sample["loss_mask"].numpy()))]
    found = {"hidden_states": hidden, "final_hidden_state": final}
    if storage.fp8:
        found["hidden_states"], found["hidden_scales"] = quantise(hidden)
    if storage.fp8 == "all":
        found["final_hidden_state"], found["final_scales"] = quantise(final)
    if storage.keep_top_token and top_token is not None:
        changed = top_token(final) != top_token(dequantise(found["final_hidden_state"], found["final_scales"], final.dtype))
        found["exact_rows"], found["exact_final"] = changed.nonzero().flatten(), final[changed]
    return found


def write_compact(source: Shard, path: Path, storage: Storage, top_token: TopToken | None = None) -> None:
    """Write the compact form of a shard, a sample at a time; the caller gives it its final name."""
    offsets = np.asarray(source.offsets)
    kept = [int(rows_of_loss(source.loss_mask[a:b]).sum()) if storage.supervised_rows else b - a for a, b in _ranges(offsets)]
    tokens = {
        "offsets": offsets,
        "final_offsets": np.concatenate([[0], np.cumsum(kept, dtype=np.int64)]),
        "input_ids": source.input_ids,
        "loss_mask": source.loss_mask,
    }
    fixed = {name: (torch.from_numpy(array[:0].copy()).dtype, [len(array)]) for name, array in tokens.items()}
    fixed |= _state_shapes(source, storage, finals=sum(kept))
    metadata = _metadata(source, storage)
    room = len(_header({**fixed, **_exact_shapes(source, storage, exact=sum(kept))}, metadata)[0])  # the header, at its longest
    _, begins = _header(fixed, metadata, length=room)
    exact: dict[str, list[torch.Tensor]] = {"exact_rows": [], "exact_final": []}
    with open(path, "wb") as file:
        for name, array in tokens.items():
            file.seek(begins[name])
            file.write(np.ascontiguousarray(array).tobytes())
        at = {name: begins[name] for name in fixed if name not in tokens}
        for index in range(len(source)):
            for name, tensor in compact_sample(source, index, storage, top_token).items():
                if name in exact:
                    exact[name].append(tensor)
                else:
                    file.seek(at[name])
                    at[name] += file.write(_bytes(tensor))
        shapes = {**fixed, **_exact_shapes(source, storage, exact=sum(map(len, exact["exact_rows"])))}
        header, begins = _header(shapes, metadata, length=room)
        file.seek(0)
        file.write(header)
        if storage.keep_top_token:
            file.seek(begins["exact_offsets"])
            file.write(np.concatenate([[0], np.cumsum([len(rows) for rows in exact["exact_rows"]], dtype=np.int64)]).tobytes())
            file.write(_bytes(torch.cat(exact["exact_rows"])) + _bytes(torch.cat(exact["exact_final"])))


def _exact_shapes(source: Shard, storage: Storage, *, exact: int) -> dict[str, tuple[torch.dtype, list[int]]]:
    if not storage.keep_top_token:
        return {}
    stored, width = source.states("final_hidden_state", 0, 1).dtype, source.header.tensors["final_hidden_state"][1][1]
    return {
        "exact_offsets": (torch.int64, [len(source) + 1]),
        "exact_rows": (torch.int64, [exact]),
        "exact_final": (stored, [exact, width]),
    }


def _state_shapes(source: Shard, storage: Storage, *, finals: int) -> dict[str, tuple[torch.dtype, list[int]]]:
    rows, layers, width = source.header.tensors["hidden_states"][1]
    stored = source.states("final_hidden_state", 0, 1).dtype
    shapes: dict[str, tuple[torch.dtype, list[int]]] = {
        "hidden_states": (torch.float8_e4m3fn if storage.fp8 else stored, [rows, layers, width]),
        "final_hidden_state": (torch.float8_e4m3fn if storage.fp8 == "all" else stored, [finals, width]),
    }
    if storage.fp8:
        shapes["hidden_scales"] = (torch.float32, [rows, layers])
    if storage.fp8 == "all":
        shapes["final_scales"] = (torch.float32, [finals])
    return shapes


def _metadata(source: Shard, storage: Storage) -> dict[str, str]:
    own = {"format": FORMAT, "format_version": FORMAT_VERSION, "storage": storage.text, "stored_dtype": source.stored_dtype}
    return {**source.header.metadata, **own}


def _header(
    shapes: dict[str, tuple[torch.dtype, list[int]]], metadata: dict[str, str], *, length: int | None = None
) -> tuple[bytes, dict[str, int]]:
    """Header of `length` bytes or as many as it needs, and the first byte of each tensor in the file."""
    entries: dict[str, object] = {"__metadata__": metadata}
    begins, at = {}, 0
    for name, (dtype, shape) in shapes.items():
        end = at + int(np.prod(shape)) * dtype.itemsize
        entries[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [at, end]}
        begins[name], at = at, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (length - 8 - len(text) if length else -(8 + len(text)) % 8)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + begin for name, begin in begins.items()}


def _ranges(offsets: np.ndarray) -> Iterator[tuple[int, int]]:
    return zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


class CompactShard:
    """A compact shard opened for reading; what it gives has the shape and dtype of the shard that it was made from."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            self._file = safe_open(self.path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.path}: not a whole safetensors file: {error}") from error
        self.metadata: dict[str, str] = self._file.metadata() or {}
        if (self.metadata.get("format"), self.metadata.get("format_version")) != (FORMAT, FORMAT_VERSION):
            raise UserError(f"{self.path}: expected {FORMAT} version {FORMAT_VERSION}, found {self.metadata.get('format')}")
        self.storage = Storage(**json.loads(self.metadata["storage"]))
        self._dtype = torch_dtype(self.metadata["stored_dtype"])

    @cached_property
    def _offsets(self) -> np.ndarray:
        return self._file.get_tensor("offsets").numpy()

    @cached_property
    def _final_offsets(self) -> np.ndarray:
        return self._file.get_tensor("final_offsets").numpy()

    def length(self, index: int) -> int:
        """Tokens of sample `index`."""
        return int(self._offsets[index + 1] - self._offsets[index])

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """`input_ids` int32 [n] and `loss_mask` uint8 [n] of sample `index`."""
        first, end = self._offsets[index], self._offsets[index + 1]
        return self._file.get_slice("input_ids")[first:end].numpy(), self._file.get_slice("loss_mask")[first:end].numpy()

    @cached_property
    def _exact_offsets(self) -> np.ndarray:
        return self._file.get_tensor("exact_offsets").numpy()

    def stored(self, index: int) -> dict[str, torch.Tensor]:
        """The states of sample `index` as they lie in the file."""
        rows = slice(int(self._offsets[index]), int(self._offsets[index + 1]))
        final = slice(int(self._final_offsets[index]), int(self._final_offsets[index + 1]))
        names = {"hidden_states": rows, "final_hidden_state": final}
        if self.storage.fp8:
            names["hidden_scales"] = rows
        if self.storage.fp8 == "all":
            names["final_scales"] = final
        if self.storage.keep_top_token:
            exact = slice(int(self._exact_offsets[index]), int(self._exact_offsets[index + 1]))
            names |= {"exact_rows": exact, "exact_final": exact}
        return {name: self._file.get_slice(name)[where] for name, where in names.items()}

    def states(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Layers [n, K, H] and final state [n, H] of sample `index`."""
        stored = self.stored(index)
        hidden, final = stored["hidden_states"], stored["final_hidden_state"]
        if self.storage.fp8:
            hidden = dequantise(hidden, stored["hidden_scales"], self._dtype)
        if self.storage.fp8 == "all":
            final = dequantise(final, stored["final_scales"], self._dtype)
        if self.storage.keep_top_token:
            final[stored["exact_rows"]] = stored["exact_final"]
        if self.storage.supervised_rows:
            whole = final.new_zeros((len(hidden), final.shape[-1]))
            whole[torch.from_numpy(rows_of_loss(self.tokens(index)[1]))] = final
            final = whole
        return hidden, final

    def checksum(self, index: int) -> str:
        """32 hex digits over the stored bytes of sample `index`."""
        digest = xxhash.xxh3_128()
        for tensor in self.stored(index).values():
            digest.update(_bytes(tensor))
        return digest.hexdigest()

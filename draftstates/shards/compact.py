"""Compact shards: the samples of verified shards in fewer bytes, read through `ShardDataset`.

A compact shard is a safetensors file like a shard. It has S samples with T tokens in R rows, F of
them with a final state, and these tensors:

| tensor               | dtype, shape                   |
| -------------------- | ------------------------------ |
| `input_ids`          | int32 [T]                      |
| `loss_mask`          | uint8 [T]                      |
| `offsets`            | int64 [S+1]                    |
| `final_offsets`      | int64 [S+1]                    |
| `segment_offsets`    | int64 [S+1]                    | where samples share rows
| `segments`           | int64 [G, 2]                   | where samples share rows
| `hidden_states`      | stored dtype or e4m3 [R, K, H] |
| `final_hidden_state` | stored dtype or e4m3 [F, H]    |
| `hidden_scales`      | float32 [R, K]                 | where the layers are e4m3
| `final_scales`       | float32 [F]                    | where the final state is e4m3
| `exact_offsets`      | int64 [S+1]                    |
| `exact_rows`         | int64 [E]                      |
| `exact_final`        | stored dtype [E, H]            |

The tokens of sample i are offsets[i]:offsets[i+1], and its rows as in a shard (see `layout`).
final_offsets counts the final states of the samples' own rows in the same way. A value is code *
scale. Where e4m3 would change the most likely token of a final state, the state is stored in full
too: exact_rows[exact_offsets[i]:exact_offsets[i+1]] are the places of these E rows among the final
states of sample i's own rows.

Where only supervised rows keep their final state, the kept rows are those that a loss reads: each
supervised row and its neighbours, since trainers shift the tokens by one, of any sample that has
the row. The other final states read as zeros, also in a sample that shares a kept row and reads no
loss there. The layers stay whole: a drafter attends to all rows.
"""

import contextlib
import dataclasses
import itertools
import json
import shlex
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from draftstates.errors import UserError
from draftstates.files import check_version
from draftstates.plan.prefixes import Segments, shard_id
from draftstates.shards.layout import (
    Shard,
    joined,
    safetensors_header,
    sample_checksum,
    whole_states,
)
from draftstates.spec import torch_dtype

FORMAT = "draftstates.compact"
FORMAT_VERSION = 2
# version of a file whose samples share rows
SHARED_VERSION = 3
_E4M3_MAX = 448.0
_E4M3 = "F8_E4M3"
# a function from final states [n, H] to the most likely tokens [n]
TopToken = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Storage:
    """The form in which a compact shard stores its states.

    Attributes:
        fp8: the tensors that are stored as e4m3 with a scale per row and layer: none (None), the
            "layers", or "all", which includes the final state. The final state decides what a
            drafter learns, and three bits of mantissa change the most likely token of some rows.
        supervised_rows: drop the final states that no loss reads.
        keep_top_token: with fp8 "all", store those final states in full whose most likely token
            would change.
    """

    fp8: str | None
    supervised_rows: bool
    keep_top_token: bool = False

    def __post_init__(self) -> None:
        if self.fp8 not in (None, "layers", "all"):
            raise UserError(f"fp8 must be 'layers' or 'all', found {self.fp8!r}")
        if self.keep_top_token and self.fp8 != "all":
            raise UserError(
                "keep_top_token goes with fp8 'all': otherwise the final states are stored in full"
            )

    @property
    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


def quantise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 codes [..., H] and float32 scales [...] of rows [..., H].

    The largest value of each row becomes the largest code.
    """
    wide = rows.float()
    scales = (wide.abs().amax(-1) / _E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    return (wide / scales[..., None]).to(torch.float8_e4m3fn), scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows [..., H] in `dtype` from e4m3 codes [..., H] and scales [...]."""
    return (codes.float() * scales[..., None]).to(dtype)


def rows_of_loss(loss_mask: np.ndarray) -> np.ndarray:
    """Return True for each row whose final state a loss may read, bool [n].

    Such rows are the supervised rows and their neighbours.
    """
    mask = loss_mask.astype(bool)
    needed = mask.copy()
    needed[1:] |= mask[:-1]
    needed[:-1] |= mask[1:]
    return needed


def needed_finals(
    loss_mask: np.ndarray, offsets: np.ndarray, segments: Segments, storage: Storage
) -> np.ndarray:
    """Return True for each row of a shard whose final state is kept, bool [R].

    Args:
        loss_mask: of all samples in sequence, [T].
        offsets: tokens of sample i are offsets[i]:offsets[i+1].
        segments: places of the samples' rows.
    """
    if not storage.supervised_rows:
        return np.ones(segments.rows, dtype=bool)
    needed = np.zeros(segments.rows, dtype=bool)
    for index, (first, end) in enumerate(itertools.pairwise(offsets.tolist())):
        needed[segments.row_numbers(index)[rows_of_loss(loss_mask[first:end])]] = True
    return needed


def compact_sample(
    shard: Shard, index: int, storage: Storage, top_token: TopToken | None, needed: np.ndarray
) -> dict[str, torch.Tensor]:
    """Return the states of one sample's own rows as a compact shard holds them.

    Args:
        shard: shard that holds the sample.
        index: position of the sample in the shard.
        storage: form in which to store the states.
        top_token: function that `keep_top_token` needs; not used otherwise.
        needed: rows whose final state is kept, of `needed_finals`.
    """
    first, end = shard.rows(index)
    found = {name: shard.state_rows(name, first, end) for name in shard.header.states()}
    if storage.fp8 and "hidden_states" in found:
        found["hidden_states"], found["hidden_scales"] = quantise(found["hidden_states"])
    final = found.get("final_hidden_state")
    if final is None:
        return found
    if storage.supervised_rows:
        final = final[torch.from_numpy(needed[first:end])]
    found["final_hidden_state"] = final
    if storage.fp8 == "all":
        found["final_hidden_state"], found["final_scales"] = quantise(final)
    if storage.keep_top_token and top_token is not None:
        changed = top_token(final) != top_token(
            dequantise(found["final_hidden_state"], found["final_scales"], final.dtype)
        )
        found["exact_rows"], found["exact_final"] = changed.nonzero().flatten(), final[changed]
    return found


def write_compact(
    source: Shard, path: Path, storage: Storage, top_token: TopToken | None = None
) -> None:
    """Write the compact form of a shard, one sample at a time.

    The caller gives the file its final name.
    """
    finals = "final_hidden_state" in source.header.states()
    needed = needed_finals(source.loss_mask, source.offsets, source.segments, storage)
    counts = np.add.reduceat(needed, source.segments.ends[:-1], dtype=np.int64).tolist()
    kept = counts if finals else [0] * len(source)
    metadata = _metadata(source, storage)

    def header(*, exact: int, length: int = 0) -> tuple[bytes, dict[str, int]]:
        shapes = _shapes(source, storage, finals=sum(kept), exact=exact)
        return safetensors_header(shapes, metadata, length=length)[:2]

    # the number of final states in full is known only at the end: the header gets room for all
    room = len(header(exact=sum(kept))[0])
    _, at = header(exact=0, length=room)
    exact: dict[str, list[torch.Tensor]] = {"exact_rows": [], "exact_final": []}
    with open(path, "wb") as file:

        def put(name: str, values: bytes) -> None:
            file.seek(at[name])
            at[name] += file.write(values)

        put("offsets", np.ascontiguousarray(source.offsets).tobytes())
        if source.shares_rows:
            put("segment_offsets", np.ascontiguousarray(source.segments.offsets).tobytes())
            put("segments", np.ascontiguousarray(source.segments.places).tobytes())
        put("final_offsets", _running_sum(kept))
        put("input_ids", np.ascontiguousarray(source.input_ids).tobytes())
        put("loss_mask", np.ascontiguousarray(source.loss_mask).tobytes())
        for index in range(len(source)):
            stored = compact_sample(source, index, storage, top_token, needed)
            for name, tensor in stored.items():
                if name in exact:
                    exact[name].append(tensor)
                else:
                    put(name, _bytes(tensor))
        counts = [len(rows) for rows in exact["exact_rows"]]
        text, at = header(exact=sum(counts), length=room)
        if storage.keep_top_token and finals:
            put("exact_offsets", _running_sum(counts))
            for name, tensors in exact.items():
                put(name, _bytes(torch.cat(tensors)))
        file.seek(0)
        file.write(text)


def _shapes(
    source: Shard, storage: Storage, *, finals: int, exact: int
) -> dict[str, tuple[str, list[int]]]:
    """Return the number format and the shape of each tensor, in the order of the file.

    Args:
        source: shard from which the compact shard is made.
        storage: form in which to store the states.
        finals: number of final states that are kept.
        exact: number of final states that are stored in full beside their e4m3 codes.
    """
    stored, rows, samples = source.header.dtype, source.header.rows, len(source)
    row_shapes, tokens = source.header.row_shapes(), len(source.input_ids)
    shapes = {
        "offsets": ("I64", [samples + 1]),
        "final_offsets": ("I64", [samples + 1]),
        "input_ids": ("I32", [tokens]),
        "loss_mask": ("U8", [tokens]),
    }
    if source.shares_rows:
        shapes["segment_offsets"] = ("I64", [samples + 1])
        shapes["segments"] = ("I64", [len(source.segments.places), 2])
    if "hidden_states" in row_shapes:
        layers, width = row_shapes["hidden_states"]
        shapes["hidden_states"] = (_E4M3 if storage.fp8 else stored, [rows, layers, width])
        if storage.fp8:
            shapes["hidden_scales"] = ("F32", [rows, layers])
    if "final_hidden_state" not in row_shapes:
        return shapes
    (width,) = row_shapes["final_hidden_state"]
    whole = storage.fp8 != "all"
    shapes["final_hidden_state"] = (stored if whole else _E4M3, [finals, width])
    if not whole:
        shapes["final_scales"] = ("F32", [finals])
    if storage.keep_top_token:
        shapes["exact_offsets"] = ("I64", [samples + 1])
        shapes["exact_rows"] = ("I64", [exact])
        shapes["exact_final"] = (stored, [exact, width])
    return shapes


def _metadata(source: Shard, storage: Storage) -> dict[str, str]:
    own = {
        "format": FORMAT,
        "format_version": str(SHARED_VERSION if source.shares_rows else FORMAT_VERSION),
        "storage": storage.text,
        "stored_dtype": source.stored_dtype,
    }
    return {**source.header.metadata, **own}


def _running_sum(counts: list[int]) -> bytes:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype("<i8").tobytes()


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


class CompactShard:
    """A compact shard opened for reading.

    Its samples have the shape and dtype of the shard from which it was made.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            self._file = safe_open(self.path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{self.path}: not a whole safetensors file: {error}; {self._remedy}"
            ) from error
        self.metadata: dict[str, str] = self._file.metadata() or {}
        text = self.metadata.get("format_version", "")
        version = int(text) if text.isdigit() else text
        check_version(
            self.path,
            what="a compact shard",
            expected=(FORMAT, SHARED_VERSION if version == SHARED_VERSION else FORMAT_VERSION),
            found=(self.metadata.get("format"), version),
            remedy=self._remedy,
        )
        with self._named("its header"):
            self.storage = Storage(**json.loads(self.metadata["storage"]))
            self._dtype = torch_dtype(self.metadata["stored_dtype"])
        self._names = frozenset(self._file.keys())

    @property
    def _remedy(self) -> str:
        return (
            f"to write it again: rm -f {shlex.quote(str(self.path))}, then run draftstates compact,"
            " or the workflow where `storage` made it"
        )

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Give what the libraries raise for damaged bytes the name of the file.

        Raises:
            UserError: the block could not use what it read.
        """
        try:
            yield
        except (
            *(SafetensorError, UserError, RuntimeError, OverflowError),
            *(ValueError, TypeError, LookupError, AttributeError),
        ) as error:
            raise UserError(
                f"{self.path}: {what} cannot be read: {type(error).__name__}: {error};"
                f" {self._remedy}"
            ) from error

    @cached_property
    def _offsets(self) -> np.ndarray:
        return self._file.get_tensor("offsets").numpy()

    @cached_property
    def _segments(self) -> Segments:
        if "segments" not in self._names:
            return Segments.unshared(np.diff(self._offsets))
        names = ("segment_offsets", "segments")
        found = Segments(*(self._file.get_tensor(name).numpy() for name in names))
        if shard_id(json.loads(self.metadata["sample_ids"]), found) != self.metadata["shard_id"]:
            raise ValueError("its segments are not those of its shard id")
        return found

    @cached_property
    def _needed(self) -> np.ndarray:
        mask = self._file.get_tensor("loss_mask").numpy()
        return needed_finals(mask, self._offsets, self._segments, self.storage)

    @cached_property
    def _final_offsets(self) -> np.ndarray:
        return self._file.get_tensor("final_offsets").numpy()

    def length(self, index: int) -> int:
        """Return the number of tokens of sample `index`."""
        with self._named("the place of a sample"):
            return int(self._offsets[index + 1] - self._offsets[index])

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return `input_ids` int32 [n] and `loss_mask` uint8 [n] of sample `index`."""
        with self._named(f"sample {index}"):
            first, end = self._offsets[index], self._offsets[index + 1]
            return (
                self._file.get_slice("input_ids")[first:end].numpy(),
                self._file.get_slice("loss_mask")[first:end].numpy(),
            )

    @cached_property
    def _exact_offsets(self) -> np.ndarray:
        return self._file.get_tensor("exact_offsets").numpy()

    def stored(self, index: int) -> dict[str, torch.Tensor]:
        """Return the states of sample `index`'s own rows as the file holds them."""
        rows = slice(*self._segments.ends[index : index + 2].tolist())
        final = slice(int(self._final_offsets[index]), int(self._final_offsets[index + 1]))
        places = {"hidden_states": rows, "final_hidden_state": final}
        places |= {"hidden_scales": rows, "final_scales": final}
        if "exact_offsets" in self._names:
            exact = slice(int(self._exact_offsets[index]), int(self._exact_offsets[index + 1]))
            places |= {"exact_rows": exact, "exact_final": exact}
        return {
            name: self._file.get_slice(name)[where]
            for name, where in places.items()
            if name in self._names
        }

    def states(self, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the layers [n, K, H] and the final state [n, H] of sample `index`.

        What is not captured has K = 0, or is None.
        """
        return joined(self.pieces(index))

    def pieces(self, index: int) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return the states of sample `index` by the samples whose own rows they are.

        See `Shard.pieces`.
        """
        with self._named(f"sample {index}"):
            ends = self._segments.ends
            found = [
                self._rows(owner, row - int(ends[owner]), count)
                for first, rows in self._segments.of_sample(index)
                for owner, row, count in self._segments.owners_of(first, rows)
            ]
            if self.storage.supervised_rows:
                self._zero_the_unread(index, [final for _, final in found])
            return found

    def _rows(self, owner: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the states of some of a sample's own rows, from its own row `first` on."""
        stored, end = self.stored(owner), first + count
        for name, scales in (
            ("hidden_states", "hidden_scales"),
            ("final_hidden_state", "final_scales"),
        ):
            if scales in stored:
                stored[name] = dequantise(stored[name], stored[scales], self._dtype)
        final = stored.get("final_hidden_state")
        if "exact_rows" in stored:
            final[stored["exact_rows"]] = stored["exact_final"]
        own = slice(*self._segments.ends[owner : owner + 2].tolist())
        if self.storage.supervised_rows and final is not None:
            whole = final.new_zeros((own.stop - own.start, final.shape[-1]))
            whole[torch.from_numpy(self._needed[own])] = final
            stored["final_hidden_state"] = whole
        hidden, final = whole_states(stored)
        return hidden[first:end], None if final is None else final[first:end]

    def _zero_the_unread(self, index: int, finals: list[torch.Tensor | None]) -> None:
        """Zero the final states that no loss of the sample reads, but that of another one does."""
        needed, at = rows_of_loss(self.tokens(index)[1]), 0
        for final in finals:
            if final is not None:
                final[torch.from_numpy(~needed[at : at + len(final)])] = 0
                at += len(final)

    def checksum(self, index: int) -> str:
        """Return the checksum of all that sample `index` is read from (see `sample_checksum`).

        Those are the stored tensors of the own rows of each sample that has some of its rows.
        """
        with self._named(f"sample {index}"):
            parts = [self.stored(owner) for owner in (*self._segments.owners(index), index)]
            return sample_checksum(*(_bytes(each) for part in parts for each in part.values()))


def open_shard(path: Path, *, compact: bool) -> CompactShard | Shard:
    """Open a compact shard, or a shard as captured; both have the same methods to read a sample.

    Raises:
        UserError: the file is not a shard of the expected kind, or is cut short.
    """
    return CompactShard(path) if compact else Shard(path)

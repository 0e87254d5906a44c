"""A torch `Dataset` over a manifest: random access to samples, under a trainer's names.

Shards are read by memory map.
"""

import copy
import dataclasses
import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Self, overload

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import Dataset

from draftstates import ids
from draftstates.errors import UserError, capture_again
from draftstates.files import differences, file_checksum, first_difference
from draftstates.model.final_norm import FinalNorm, FinalSource, find_final
from draftstates.paths import samples_of
from draftstates.records import Manifest, ManifestShard, ManifestTotals
from draftstates.shards.compact import CompactShard, open_shard
from draftstates.shards.layout import Shard
from draftstates.shards.trainers import States, Trainer, find_trainer
from draftstates.spec import CaptureSpec

ShardReader = CompactShard | Shard
# memory maps that each process keeps; each holds a file descriptor
_OPEN_SHARDS = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Index:
    """The place of every sample; each array has one element a sample.

    `ids` and `checksums` stay in Arrow because they are large.

    Attributes:
        shard: number of the sample's shard in the manifest, int32 [S].
        position: position of the sample in the shard, int32 [S].
        tokens: number of tokens, int64 [S].
        supervised: number of supervised tokens, int64 [S].
        ids: sample ids.
        checksums: checksums of the samples' states.
    """

    shard: np.ndarray
    position: np.ndarray
    tokens: np.ndarray
    supervised: np.ndarray
    ids: pa.ChunkedArray
    checksums: pa.ChunkedArray

    def take(self, chosen: np.ndarray) -> "Index":
        """Return the samples with the numbers `chosen`, in the order of `chosen`."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Index(**{name: value.take(chosen) for name, value in fields.items()})


def read_table(path: Path, shard_ids: Sequence[str]) -> Index:
    """Read `samples.parquet`, one row a sample.

    Args:
        path: file of the table.
        shard_ids: shard ids of the manifest, in its order.

    Raises:
        UserError: the file is no such table, or has a sample of a shard that the manifest does not
            list.
    """
    columns = ["sample_id", "shard_id", "position", "tokens", "supervised", "checksum"]
    try:
        table = pq.read_table(path, columns=columns)
    except (OSError, pa.ArrowInvalid, KeyError) as error:
        raise UserError(f"{path}: expected the manifest's table with {columns}: {error}") from error
    found = table["shard_id"].combine_chunks().dictionary_encode()
    number = {shard: i for i, shard in enumerate(shard_ids)}
    unknown = [name for name in found.dictionary.to_pylist() if name not in number]
    if unknown:
        raise UserError(f"{path}: samples of shard {unknown[0]}, which the manifest does not list")
    lookup = np.array([number[name] for name in found.dictionary.to_pylist()], dtype=np.int32)
    return Index(
        shard=lookup[found.indices.to_numpy()] if len(table) else np.zeros(0, np.int32),
        position=table["position"].to_numpy().astype(np.int32),
        tokens=table["tokens"].to_numpy().astype(np.int64),
        supervised=table["supervised"].to_numpy().astype(np.int64),
        ids=table["sample_id"],
        checksums=table["checksum"],
    )


def check_table(path: Path, manifest: Manifest) -> None:
    """Hold the table of samples beside a manifest to the manifest's checksum.

    Args:
        path: path of the manifest.
        manifest: its content.

    Raises:
        UserError: the table is missing, or has changed since it was written.
    """
    table = samples_of(path)
    try:
        found = file_checksum(table)
    except OSError as error:
        raise UserError(
            f"{table}: expected the manifest's table of samples: {error.strerror};"
            f" {Manifest.remedy(path)}"
        ) from error
    if found != manifest.samples_checksum:
        raise UserError(
            f"{table}: changed since the manifest was written: expected checksum"
            f" {manifest.samples_checksum}, found {found}; {Manifest.remedy(path)}"
        )


def split_values(ids: pa.ChunkedArray, *, seed: int) -> np.ndarray:
    """Return a number in [0, 1) for each sample id (32 hex digits), float64 [S].

    The number depends on the id and the seed alone, not on the other samples.
    """
    text = (
        np.array(ids.combine_chunks().to_numpy(zero_copy_only=False), dtype="S32")
        .view(np.uint8)
        .reshape(-1, 32)[:, 16:]
    )
    digits = np.where(text < ord("a"), text - ord("0"), text - ord("a") + 10).astype(np.uint64)
    value = np.zeros(len(digits), dtype=np.uint64)
    for column in range(16):
        value = (value << np.uint64(4)) | digits[:, column]
    # splitmix64, so that the splits of different seeds are independent
    value += np.uint64((seed * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % 2**64)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((value ^ (value >> np.uint64(31))) >> np.uint64(11)) / 2.0**53


class ShardDataset(Dataset):
    """A map-style dataset over a manifest.

    The dataset can be pickled; every worker process maps the shards for itself. States are private
    maps of the file: a page is read when it is first used, and a write to a state changes that item
    alone. States of compact shards (see `draftstates.shards.compact`) are read and widened; a final
    state that no loss reads may be zeros.

    Item i is a dict with the tensor names of `trainer`. With the default it has
    `input_ids` int64 [n], `loss_mask` bool [n], `hidden_states` [n, K, H] in ascending k (K may be
    0) and, where it is captured, `final_hidden_state` [n, H], states in the stored dtype. A slice
    is a dataset of its samples.

    Args:
        manifest: a capture folder, or the path of its `manifest.json`; `samples.parquet` lies
            beside it.
        trainer: a trainer of `draftstates.shards.trainers.TRAINERS`, such as "speculators".
        model: the model that the trainer expects to have been captured; None accepts any.
        residual_layers: the r_k that the trainer asks for (our numbers); None takes all but r_N.
        final_norm: "pre_norm" or "post_norm"; None takes the norm that the trainer reads (with our
            names: the captured one).
        norm: the model's final norm, where pre-norm is to become post-norm.
        split: None for all samples, "train" or "validation". The sample id alone decides, so that
            added rows move no sample from one to the other.
        verify: compare each sample's states with their checksum at every read. The tokens and the
            mask are always compared with the sample id.

    Raises:
        UserError: the capture differs from these arguments; the message names the difference.
    """

    def __init__(
        self,
        manifest: Path,
        *,
        trainer: str = "draftstates",
        model: str | None = None,
        residual_layers: Sequence[int] | None = None,
        final_norm: str | None = None,
        norm: FinalNorm | None = None,
        split: str | None = None,
        validation_fraction: float = 0.05,
        split_seed: int = 0,
        verify: bool = False,
    ) -> None:
        self.path = _manifest_path(Path(manifest))
        found = Manifest.read(self.path)
        self.capture: CaptureSpec = found.capture
        # the storage of compact shards, None for shards as captured
        self.storage: dict | None = found.storage
        self.shards: tuple[ManifestShard, ...] = found.shards
        self.trainer: Trainer = find_trainer(trainer)
        _check_captured_from(self.path, self.capture, model)
        self.residual_layers: list[int] = _choose_layers(self.path, self.capture, residual_layers)
        self.layer_numbers: list[int] = self.trainer.layer_numbers(self.residual_layers)
        self.final_norm: str = final_norm or self.trainer.final_norm or self.capture.final_norm
        self._final = FinalSource(layer=None, norm=None)
        if self.capture.final_state or final_norm or self.trainer.final_norm:
            self._final = find_final(
                capture=self.capture.document(), wanted=self.final_norm, norm=norm
            )
        captured = list(self.capture.residual_layers)
        self._slots: list[int] | None = [captured.index(k) for k in self.residual_layers]
        if self._slots == list(range(len(captured))):
            self._slots = None
        check_table(self.path, found)
        index = read_table(samples_of(self.path), [shard.shard_id for shard in self.shards])
        _check_totals(self.path, found.totals, index)
        self.index: Index = _split(index, split, validation_fraction, split_seed)
        self._verify = verify
        self._open: OrderedDict[int, ShardReader] = OrderedDict()

    def __len__(self) -> int:
        return len(self.index.tokens)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of every sample, int64 [S], for samplers."""
        return self.index.tokens

    def sample_id(self, i: int) -> str:
        return self.index.ids[i].as_py()

    def tokens(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return sample i's `input_ids` int32 [n] and `loss_mask` uint8 [n], without its states.

        Raises:
            UserError: the sample id is not the hash of the two: the shard has changed since it was
                verified.
        """
        return self._tokens(i, *self._locate(i))

    def _tokens(self, i: int, shard: ShardReader, position: int) -> tuple[np.ndarray, np.ndarray]:
        input_ids, loss_mask = shard.tokens(position)
        if ids.sample_id(input_ids, loss_mask) != self.sample_id(i):
            raise UserError(
                f"{shard.path}: sample {self.sample_id(i)} has other tokens or another mask than"
                f" its id says; {capture_again(shard.path)}"
            )
        return input_ids, loss_mask

    def content(self, i: int) -> str:
        """Return text that decides every byte of sample i.

        The text has the sample id, which is the hash of tokens and mask, and the states' checksum.
        """
        return f"{self.sample_id(i)}-{self.index.checksums[i].as_py()}"

    def _checked(self, i: int) -> tuple[ShardReader, int]:
        """Return the shard of sample i and the sample's position there, compared if asked for."""
        shard, position = self._locate(i)
        if self._verify and shard.checksum(position) != self.index.checksums[i].as_py():
            raise UserError(
                f"{shard.path}: sample {self.sample_id(i)} does not have the checksum that the"
                f" manifest says; {capture_again(shard.path)}"
            )
        return shard, position

    def states(self, i: int) -> States:
        """Return sample i before a trainer's names are given to its tensors."""
        shard, position = self._checked(i)
        hidden, final = shard.states(position)
        input_ids, loss_mask = self._tokens(i, shard, position)
        return States(
            input_ids=torch.from_numpy(input_ids),
            loss_mask=torch.from_numpy(loss_mask),
            layers=hidden if self._slots is None else hidden[:, self._slots],
            final=self._final(hidden, final),
            final_norm=self.final_norm,
        )

    def batch(self, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return samples as `pad_batch` collates them, under our names.

        Rows go from the file straight into the batch. An item whose rows lie in several places is a
        copy of them, which `pad_batch` would copy once more. As the `collate_fn` of a `DataLoader`
        over `range(len(dataset))`, it reads in the workers.
        """
        tokens = [self.tokens(i) for i in numbers]
        lengths = [len(input_ids) for input_ids, _ in tokens]
        shape = len(tokens), max(lengths)
        width, dtype = self.capture.hidden_size, self.capture.torch_dtype
        found = {
            "lengths": torch.tensor(lengths),
            "input_ids": torch.zeros(shape, dtype=torch.int64),
            "loss_mask": torch.zeros(shape, dtype=torch.bool),
            "hidden_states": torch.zeros((*shape, len(self.residual_layers), width), dtype=dtype),
            "final_hidden_state": torch.zeros((*shape, width), dtype=dtype),
        }
        slots = range(len(self.residual_layers)) if self._slots is None else self._slots
        for row, i in enumerate(numbers):
            for name, values in zip(("input_ids", "loss_mask"), tokens[row], strict=True):
                found[name][row, : lengths[row]] = torch.from_numpy(values)
            shard, position = self._checked(i)
            begin = 0
            for hidden, final in shard.pieces(position):
                span = slice(begin, begin := begin + len(hidden))
                for place, slot in enumerate(slots):
                    found["hidden_states"][row, span, place] = hidden[:, slot]
                if (final := self._final(hidden, final)) is None:
                    # it is not captured
                    found.pop("final_hidden_state", None)
                else:
                    found["final_hidden_state"][row, span] = final
        return found

    @overload
    def __getitem__(self, i: int) -> dict[str, torch.Tensor]: ...

    @overload
    def __getitem__(self, i: slice) -> Self: ...

    def __getitem__(self, i: int | slice) -> dict[str, torch.Tensor] | Self:
        if isinstance(i, slice):
            part = copy.copy(self)
            part.index = self.index.take(np.arange(len(self))[i])
            return part
        # a range handles negative numbers, and raises IndexError past the end
        i = range(len(self))[i]
        try:
            return self.trainer.names(self.states(i))
        except IndexError as error:
            # a loop over the dataset would take it for the end
            path = self.path.parent / self.shards[self.index.shard[i]].path
            raise UserError(
                f"{path}: sample {self.sample_id(i)} cannot be read: {error}; {capture_again(path)}"
            ) from error

    def __repr__(self) -> str:
        layers = ", ".join(f"r_{k}" for k in self.residual_layers)
        return (
            f"ShardDataset({str(self.path)!r}: {len(self):,} samples,"
            f" {int(self.index.tokens.sum()):,} tokens, {int(self.index.supervised.sum()):,}"
            f" supervised; {layers} and the final state {self.final_norm} as"
            f" {self.capture.stored_dtype})"
        )

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_open": OrderedDict()}

    def _locate(self, i: int) -> tuple[ShardReader, int]:
        """Return the shard of sample i and the sample's position there."""
        # a range handles negative numbers, and raises IndexError past the end
        i = range(len(self))[i]
        shard, position = self._shard(int(self.index.shard[i])), int(self.index.position[i])
        if shard.length(position) != self.index.tokens[i]:
            raise UserError(
                f"{shard.path}: sample {self.sample_id(i)} has {shard.length(position)} rows, the"
                f" manifest says {self.index.tokens[i]}; {capture_again(shard.path)}"
            )
        return shard, position

    def _shard(self, number: int) -> ShardReader:
        """Return an open shard; the one that was not used for longest is closed for it."""
        shard = self._open.pop(number, None)
        if shard is None:
            entry = self.shards[number]
            path = self.path.parent / entry.path
            try:
                shard = open_shard(path, compact=self.storage is not None)
            except OSError as error:
                raise UserError(
                    f"{path}: {self.path} lists this shard, but it cannot be read:"
                    f" {error.strerror}; {capture_again(path)}"
                ) from error
            except UserError as error:
                if self.storage is not None:
                    raise
                raise UserError(f"{error}; {capture_again(path)}") from error
            _check_shard(shard, entry, self.capture)
            if len(self._open) >= _OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open[number] = shard
        return shard


def _manifest_path(path: Path) -> Path:
    """Return the manifest of a capture folder, or `path` if it is no folder.

    Raises:
        UserError: the folder has no manifest; the message names those below it.
    """
    if not path.is_dir() or (path / "manifest.json").exists():
        return path / "manifest.json" if path.is_dir() else path
    below = ", ".join(str(found.parent) for found in sorted(path.glob("*/manifest.json")))
    found = f"the capture folders {below}: name one" if below else "none: complete the run first"
    raise UserError(f"{path}: expected a capture folder with a manifest.json, found {found}")


def _check_shard(shard: ShardReader, entry: ManifestShard, capture: CaptureSpec) -> None:
    """Refuse a shard whose id or capture differs from the manifest's."""
    expected = {
        "shard_id": entry.shard_id,
        "capture_key": capture.key,
        "residual_layers": json.dumps(list(capture.residual_layers)),
        "final_norm": capture.final_norm,
    }
    if difference := first_difference(expected, shard.metadata):
        raise UserError(
            f"{shard.path}: {difference.name}: the manifest lists {difference.expected}, the shard"
            f" has {difference.found}; {capture_again(shard.path)}"
        )


def _check_totals(path: Path, totals: ManifestTotals, index: Index) -> None:
    """Refuse a table of other samples than the manifest counts."""
    counted = {
        "samples": len(index.tokens),
        "tokens": int(index.tokens.sum()),
        "supervised_tokens": int(index.supervised.sum()),
    }
    for field in differences(counted, vars(totals)):
        raise UserError(
            f"{path}: {field.found} {field.name}, but samples.parquet beside it has"
            f" {field.expected}; {Manifest.remedy(path)}"
        )


def _check_captured_from(path: Path, capture: CaptureSpec, model: str | None) -> None:
    if model is not None and capture.model != model:
        raise UserError(f"{path}: captured from {capture.model!r}, the trainer asks for {model!r}")


def _choose_layers(path: Path, capture: CaptureSpec, wanted: Sequence[int] | None) -> list[int]:
    captured = list(capture.residual_layers)
    if wanted is None:
        return [k for k in captured if k != capture.num_layers]
    missing = [k for k in wanted if k not in captured]
    if missing or list(wanted) != sorted(set(wanted)):
        raise UserError(
            f"{path}: captured r_k for k in {captured}, the trainer asks for {list(wanted)}"
            " (ascending)"
        )
    return list(wanted)


def _split(index: Index, split: str | None, fraction: float, seed: int) -> Index:
    """Return the samples of a split, or all without one."""
    if split is None:
        return index
    if split not in ("train", "validation") or not 0 < fraction < 1:
        raise UserError(
            f"split must be 'train' or 'validation' with a fraction in (0, 1), found {split!r} with"
            f" {fraction}"
        )
    held_out = split_values(index.ids, seed=seed) < fraction
    return index.take(np.flatnonzero(held_out if split == "validation" else ~held_out))


def pad_batch(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate samples of different lengths: the `collate_fn` of a `DataLoader`.

    Args:
        samples: items of a dataset; all tensors have their tokens in dimension 0.

    Returns:
        Each tensor [B, longest, ...], with zeros behind a shorter sample, and `lengths` int64 [B]:
        the zeros of a sample begin at its length.
    """
    lengths = [len(sample["input_ids"]) for sample in samples]
    batch = {"lengths": torch.tensor(lengths)}
    for name, first in samples[0].items():
        out = first.new_zeros((len(samples), max(lengths), *first.shape[1:]))
        for row, sample in enumerate(samples):
            out[row, : lengths[row]] = sample[name]
        batch[name] = out
    return batch

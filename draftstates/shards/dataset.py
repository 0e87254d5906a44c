"""A manifest as a torch `Dataset`: random access to samples by memory map, under the names that a trainer uses."""

import dataclasses
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import Dataset

from draftstates import ids
from draftstates.errors import CAPTURE_ANEW, UserError
from draftstates.exports.trainers import States, Trainer, trainer
from draftstates.final_norm import FinalNorm, FinalSource, find_final
from draftstates.readers import ShardReader, open_shard

FORMAT = "draftstates.manifest"
_CAPTURE_FIELDS = ("key", "model", "num_layers", "hidden_size", "residual_layers", "final_norm")
_OPEN_SHARDS = 128  # memory maps kept by each process; each holds a file descriptor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Index:
    """Where every sample lies, one array element a sample; `ids` and `checksums` stay in Arrow, they are large."""

    shard: np.ndarray  # int32, number of the shard in the manifest
    position: np.ndarray  # int32, index in the shard
    tokens: np.ndarray  # int64
    supervised: np.ndarray  # int64
    ids: pa.ChunkedArray
    checksums: pa.ChunkedArray

    def take(self, chosen: np.ndarray) -> "Index":
        """The samples numbered `chosen`, in that order."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Index(**{name: value.take(chosen) for name, value in fields.items()})


def read_manifest(path: Path) -> dict:
    """Read `manifest.json` and check the fields that reading needs.

    Raises:
        UserError: no such file, not a manifest, or a field missing.
    """
    try:
        manifest = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: expected a manifest, found {type(error).__name__}: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or manifest.get("format_version") != 1:
        raise UserError(f"{path}: expected {FORMAT} version 1")
    missing = [f"capture.{name}" for name in _CAPTURE_FIELDS if name not in manifest.get("capture", {})]
    missing += ["shards"] if not isinstance(manifest.get("shards"), list) else []
    for number, shard in enumerate([] if missing else manifest["shards"]):
        entry = shard if isinstance(shard, dict) else {}
        missing += [f"shards[{number}].{name}" for name in ("shard_id", "path") if not isinstance(entry.get(name), str)]
    if missing:
        raise UserError(f"{path}: the manifest lacks {', '.join(missing)}")
    return manifest


def read_index(path: Path, shard_ids: Sequence[str]) -> Index:
    """Read `samples.parquet`, one row a sample.

    Args:
        shard_ids: of the manifest, in its order.

    Raises:
        UserError: not such a table, or a sample of a shard that the manifest does not list.
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


def split_values(ids: pa.ChunkedArray, *, seed: int) -> np.ndarray:
    """A number in [0, 1) for each sample id (32 hex digits), float64 [S]: the same for the same id and seed, whatever else is there."""
    text = np.array(ids.combine_chunks().to_numpy(zero_copy_only=False), dtype="S32").view(np.uint8).reshape(-1, 32)[:, 16:]
    digits = np.where(text < ord("a"), text - ord("0"), text - ord("a") + 10).astype(np.uint64)
    value = np.zeros(len(digits), dtype=np.uint64)
    for column in range(16):
        value = (value << np.uint64(4)) | digits[:, column]
    # splitmix64, so that another seed gives a split that has nothing to do with this one
    value += np.uint64((seed * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % 2**64)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((value ^ (value >> np.uint64(31))) >> np.uint64(11)) / 2.0**53


class ShardDataset(Dataset):
    """Map-style dataset over a manifest. Picklable; every worker process maps the shards for itself.

    States are private maps of the file: nothing is read until it is touched, and what is written to them stays with that one item. Of
    compact shards (see `draftstates.storage`) they are read and widened; where no loss reads a final state, it may read as zeros.
    Item i is a dict, named as the trainer `names` names it; with the default names: `input_ids` int32 [n], `loss_mask` uint8 [n],
    `hidden_states` [n, K, H] in ascending k, `final_hidden_state` [n, H], states in the stored dtype.

    Args:
        manifest: path of `manifest.json`; `samples.parquet` lies beside it.
        names: "draftstates", "speculators", "specforge", "model_optimizer" or "deepspec".
        model: what the trainer takes for the captured model; None accepts any.
        residual_layers: the r_k that the trainer asks for (our numbers); None takes all but r_N.
        final_norm: "pre_norm" or "post_norm"; None takes what the trainer reads (with our names: what was captured).
        norm: the model's final norm, where pre-norm is to become post-norm.
        split: None for all, "train" or "validation": chosen by each sample's own id, so that adding rows moves none between them.
        verify: compare each sample's states with their checksum at every read; its tokens and mask are always held to its id.

    Raises:
        UserError: on opening, where the capture is not what is asked for, and which of them is not.
    """

    def __init__(
        self,
        manifest: Path,
        *,
        names: str = "draftstates",
        model: str | None = None,
        residual_layers: Sequence[int] | None = None,
        final_norm: str | None = None,
        norm: FinalNorm | None = None,
        split: str | None = None,
        validation_fraction: float = 0.05,
        split_seed: int = 0,
        verify: bool = False,
    ) -> None:
        self.path = Path(manifest)
        document = read_manifest(self.path)
        self.capture: dict = document["capture"]
        self.storage: dict | None = document.get("storage")  # of compact shards: how compact
        self.shards: list[dict] = document["shards"]
        self.trainer: Trainer = trainer(names)
        _check_model(self.path, self.capture, model)
        self.residual_layers: list[int] = _choose_layers(self.path, self.capture, residual_layers)
        self.layer_numbers: list[int] = self.trainer.layer_numbers(self.residual_layers)
        self.final_norm: str = final_norm or self.trainer.final_norm or self.capture["final_norm"]
        self._final: FinalSource = find_final(capture=self.capture, wanted=self.final_norm, norm=norm)
        captured = list(self.capture["residual_layers"])
        self._slots: list[int] | None = [captured.index(k) for k in self.residual_layers]
        if self._slots == list(range(len(captured))):
            self._slots = None
        index = read_index(self.path.with_name("samples.parquet"), [shard["shard_id"] for shard in self.shards])
        _check_totals(self.path, document.get("totals", {}), index)
        self.index: Index = _split(index, split, validation_fraction, split_seed)
        self._verify = verify
        self._open: OrderedDict[int, ShardReader] = OrderedDict()

    def __len__(self) -> int:
        return len(self.index.tokens)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every sample, int64 [S], for the samplers."""
        return self.index.tokens

    def sample_id(self, i: int) -> str:
        return self.index.ids[i].as_py()

    def tokens(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Sample i's `input_ids` int32 [n] and `loss_mask` uint8 [n], without its states.

        Raises:
            UserError: they are not those that the sample's id was made of: the shard has changed since it was verified.
        """
        return self._tokens(i, *self._locate(i))

    def _tokens(self, i: int, shard: ShardReader, position: int) -> tuple[np.ndarray, np.ndarray]:
        input_ids, loss_mask = shard.tokens(position)
        if ids.sample_id(input_ids, loss_mask) != self.sample_id(i):
            raise UserError(f"{shard.path}: sample {self.sample_id(i)} has other tokens or another mask than its id says; {CAPTURE_ANEW}")
        return input_ids, loss_mask

    def content(self, i: int) -> str:
        """What decides every byte of sample i: its id, that of its tokens and mask, and the checksum of its states."""
        return f"{self.sample_id(i)}-{self.index.checksums[i].as_py()}"

    def states(self, i: int) -> States:
        """Sample i, before it is named."""
        shard, position = self._locate(i)
        if self._verify and shard.checksum(position) != self.index.checksums[i].as_py():
            raise UserError(f"{shard.path}: sample {self.sample_id(i)} does not have the checksum that the manifest says; {CAPTURE_ANEW}")
        hidden, final = shard.states(position)
        input_ids, loss_mask = self._tokens(i, shard, position)
        return States(
            input_ids=torch.from_numpy(input_ids),
            loss_mask=torch.from_numpy(loss_mask),
            layers=hidden if self._slots is None else hidden[:, self._slots],
            final=self._final(hidden, final),
            final_norm=self.final_norm,
        )

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return self.trainer.names(self.states(i))

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_open": OrderedDict()}

    def _locate(self, i: int) -> tuple[ShardReader, int]:
        i = range(len(self))[i]  # IndexError past the end, negative numbers from it
        shard, position = self._shard(int(self.index.shard[i])), int(self.index.position[i])
        if shard.length(position) != self.index.tokens[i]:
            raise UserError(
                f"{shard.path}: sample {self.sample_id(i)} has {shard.length(position)} rows, the manifest says {self.index.tokens[i]}"
            )
        return shard, position

    def _shard(self, number: int) -> ShardReader:
        shard = self._open.pop(number, None)
        if shard is None:
            entry = self.shards[number]
            path = self.path.parent / entry["path"]
            try:
                shard = open_shard(path, compact=self.storage is not None)
            except OSError as error:
                raise UserError(f"{path}: {self.path} lists this shard, but it cannot be read: {error.strerror}") from error
            _check_shard(shard, entry, self.capture)
            if len(self._open) >= _OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open[number] = shard
        return shard


def _check_shard(shard: ShardReader, entry: Mapping[str, object], capture: Mapping[str, object]) -> None:
    """A shard must be the one that the manifest lists, and hold what the manifest says of all: a manifest may have been changed."""
    expected = {
        "shard_id": entry["shard_id"],
        "capture_key": capture["key"],
        "residual_layers": json.dumps(list(capture["residual_layers"])),
        "final_norm": capture["final_norm"],
    }
    for name, value in expected.items():
        if shard.metadata.get(name) != value:
            raise UserError(f"{shard.path}: the manifest says {name} {value}, the shard {shard.metadata.get(name)}")


def _check_totals(path: Path, totals: Mapping[str, object], index: Index) -> None:
    """A table that is not the manifest's own would train on other samples than the manifest says, and nobody would notice."""
    counted = {"samples": len(index.tokens), "tokens": int(index.tokens.sum()), "supervised_tokens": int(index.supervised.sum())}
    for name, found in counted.items():
        if totals.get(name) != found:
            raise UserError(f"{path}: {totals.get(name)} {name}, but samples.parquet beside it has {found}: delete both and run again")


def _check_model(path: Path, capture: Mapping[str, object], model: str | None) -> None:
    if model is not None and capture["model"] != model:
        raise UserError(f"{path}: captured from {capture['model']!r}, the trainer asks for {model!r}")


def _choose_layers(path: Path, capture: Mapping[str, object], wanted: Sequence[int] | None) -> list[int]:
    captured = list(capture["residual_layers"])  # type: ignore[call-overload]
    if wanted is None:
        return [k for k in captured if k != capture["num_layers"]]
    missing = [k for k in wanted if k not in captured]
    if missing or list(wanted) != sorted(set(wanted)):
        raise UserError(f"{path}: captured r_k for k in {captured}, the trainer asks for {list(wanted)} (ascending)")
    return list(wanted)


def _split(index: Index, split: str | None, fraction: float, seed: int) -> Index:
    if split is None:
        return index
    if split not in ("train", "validation") or not 0 < fraction < 1:
        raise UserError(f"split must be 'train' or 'validation' with a fraction in (0, 1), found {split!r} with {fraction}")
    held_out = split_values(index.ids, seed=seed) < fraction
    return index.take(np.flatnonzero(held_out if split == "validation" else ~held_out))

"""Parts that all exports share: settings, identity of files, and the check by reading back."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from draftstates.errors import UserError
from draftstates.exports.builder import Builder
from draftstates.model.final_norm import FinalNorm
from draftstates.model.folder import ModelFolder
from draftstates.shards.dataset import ShardDataset
from draftstates.shards.trainers import States

# Version of the exported content. A new version makes every file stale.
FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of an export beyond the manifest.

    Attributes:
        dtype: number format of the exported states; None keeps the stored one.
        draft_vocab_size: size of the drafter's vocabulary; None writes no mapping.
        target_vocab_size: size of the target model's vocabulary, which a mapping needs.
        target_model: name of the target model in the trainer's configuration (DeepSpec compares the
            two names).
        model: the target model; None where its folder is not named.
        seq_length: tokens that each sample is padded to; None for those of the longest one.
        target_probs_topk: probabilities to keep of each row; None for all.
    """

    dtype: torch.dtype | None = None
    draft_vocab_size: int | None = None
    target_vocab_size: int | None = None
    target_model: str | None = None
    model: ModelFolder | None = None
    seq_length: int | None = None
    target_probs_topk: int | None = None


def identity(dataset: ShardDataset, options: Options, norm: FinalNorm | None) -> str:
    """Return the text that, with a sample id, decides every byte of the sample's exported file."""
    applied = (
        norm
        if dataset.final_norm != dataset.capture.final_norm and dataset.final_norm == "post_norm"
        else None
    )
    fields = {
        "format_version": FORMAT_VERSION,
        "trainer": dataset.trainer.name,
        "capture_key": dataset.capture.key,
        "residual_layers": dataset.residual_layers,
        "final_norm": dataset.final_norm,
        "storage": dataset.storage,
        "dtype": str(options.dtype),
        "norm": hashlib.sha256(applied.content()).hexdigest() if applied else None,
    }
    return json.dumps(fields, sort_keys=True)


def summary(dataset: ShardDataset, options: Options, **more: object) -> dict:
    """Return the content of `export.json`: source, layer numbers of both sides, norm and size."""
    layers = dict(
        zip([f"r_{k}" for k in dataset.residual_layers], dataset.layer_numbers, strict=True)
    )
    return {
        "format": "draftstates.export",
        "format_version": FORMAT_VERSION,
        "trainer": dataset.trainer.name,
        "model": dataset.capture.model,
        "capture_key": dataset.capture.key,
        "layers": layers,
        "layers_are_counted": dataset.trainer.numbering,
        "final_norm": dataset.final_norm,
        "dtype": str(options.dtype).removeprefix("torch.") if options.dtype else "as captured",
        "storage": dataset.storage,
        "samples": len(dataset),
        "tokens": int(dataset.lengths.sum()),
        "supervised_tokens": int(dataset.index.supervised.sum()),
        **more,
    }


def cast(states: torch.Tensor, options: Options) -> torch.Tensor:
    """Return a contiguous copy in the requested dtype.

    The copy keeps the map of the shard's file out of the saved file.
    """
    return states.to(options.dtype or states.dtype, copy=True).contiguous()


def check_equal(path: Path, found: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Compare the values that were read back with the expected ones, element by element.

    Raises:
        UserError: a name is missing or extra, or a value differs in type, shape or any element.
    """
    if found.keys() != expected.keys():
        raise UserError(f"{path}: reading back gave {sorted(found)}, expected {sorted(expected)}")
    for name, value in expected.items():
        other = found[name]
        if isinstance(value, torch.Tensor):
            same = (
                isinstance(other, torch.Tensor)
                and other.dtype == value.dtype
                and torch.equal(other, value)
            )
        else:
            same = other == value
        if not same:
            raise UserError(f"{path}: reading back gave another {name} than was written")


def save_torch(path: Path, values: dict[str, object]) -> None:
    """Write `values` with `torch.save`, as the trainers read them.

    The values go through a file object, because `torch.save` would put a file's name into the
    archive.
    """
    with open(path, "wb") as file:
        torch.save(values, file)


def check_torch(path: Path, expected: dict[str, object]) -> None:
    """Read a file of `save_torch` back, tensors and plain values only, and compare it."""
    check_equal(path, torch.load(path, weights_only=True), expected)


def include_torch(builder: Builder, name: str, values: dict[str, object]) -> None:
    """Write a file of `save_torch` that every export writes, read it back and include it."""
    save_torch(builder.partial / name, values)
    check_torch(builder.partial / name, values)
    builder.include(name)


def add_torch(
    builder: Builder, name: str, content: str, values: Callable[[], dict[str, object]]
) -> None:
    """Add a file of `save_torch` to the builder; see `Builder.add`."""
    builder.add(
        name,
        content,
        lambda path: save_torch(path, values()),
        lambda path: check_torch(path, values()),
    )


def sample_files(states: States, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sample's layers, concatenated [n, K*H], and its final state [n, H] as saved."""
    return cast(states.layers.flatten(1), options), cast(states.final, options)

"""Export for DeepSpec: its target cache, version 2.

The cache has `manifest.json`, `samples.idx`, and one `shard-{number}.bin` for each captured shard.

The .bin file holds the parts of one sample after the other: ids (int32), attention mask (uint8),
loss mask (uint8), layers [n, K*H] (bfloat16), final state after the norm [n, H] (bfloat16). The
index has one record of fixed size for each sample: the offsets of the parts.
"""

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from draftstates.errors import UserError
from draftstates.exports.builder import Builder
from draftstates.exports.common import Options, cast, summary
from draftstates.shards.dataset import ShardDataset

_VERSION = 2
# Sample, shard, length, then the offsets of the five parts.
_RECORD = struct.Struct("<QIIQQQQQ")


def export(dataset: ShardDataset, builder: Builder, options: Options) -> dict:
    """Write the dataset's samples into the builder, and return the content of `export.json`."""
    if options.draft_vocab_size is not None:
        raise UserError("deepspec drafts with the whole vocabulary: leave draft_vocab_size out")
    stored = dataset.states(0).layers.dtype if len(dataset) else torch.bfloat16
    dataset.trainer.check_dtype(str(options.dtype or stored).removeprefix("torch."))
    index = bytearray()
    groups = (
        np.split(np.arange(len(dataset)), np.flatnonzero(np.diff(dataset.index.shard)) + 1)
        if len(dataset)
        else []
    )
    for number, samples in enumerate(groups):
        content = hashlib.sha256(
            "\n".join(dataset.content(int(i)) for i in samples).encode()
        ).hexdigest()
        _add_shard(dataset, samples.tolist(), f"shard-{number:05d}.bin", content, builder, options)
        index += _records(dataset, samples.tolist(), number)
    (builder.partial / "samples.idx").write_bytes(index)
    (builder.partial / "manifest.json").write_text(
        json.dumps(_manifest(dataset, len(groups), options), indent=2, sort_keys=True)
    )
    builder.include("samples.idx", "manifest.json")
    return summary(dataset, options, target_layer_ids=dataset.layer_numbers)


def _parts(dataset: ShardDataset, i: int, options: Options) -> Iterator[bytes]:
    """Yield the parts of a sample in the order of the file."""
    states = dataset.states(i)
    yield states.input_ids.numpy().astype("<i4").tobytes()
    yield b"\1" * len(states.input_ids)
    yield states.loss_mask.numpy().tobytes()
    for tensor in (states.layers, states.final):
        yield cast(tensor, options).view(torch.uint8).numpy().tobytes()


def _add_shard(
    dataset: ShardDataset,
    samples: list[int],
    name: str,
    content: str,
    builder: Builder,
    options: Options,
) -> None:
    """Add the file of one captured shard to the builder."""

    def write(path: Path) -> None:
        with open(path, "wb") as file:
            for i in samples:
                file.writelines(_parts(dataset, i, options))

    def check(path: Path) -> None:
        with open(path, "rb") as file:
            for i in samples:
                for part in _parts(dataset, i, options):
                    if file.read(len(part)) != part:
                        raise UserError(
                            f"{path}: reading back gave other bytes than were written for sample"
                            f" {dataset.sample_id(i)}"
                        )
            if file.read(1):
                raise UserError(f"{path}: longer than what was written")

    builder.add(name, content, write, check)


def _records(dataset: ShardDataset, samples: list[int], shard: int) -> bytes:
    """Return the index records of the samples of one file."""
    records, at = b"", 0
    row = 2 * dataset.capture.hidden_size
    for i in samples:
        length = int(dataset.lengths[i])
        sizes = [
            4 * length,
            length,
            length,
            length * row * len(dataset.residual_layers),
            length * row,
        ]
        starts = [at, *(at + int(end) for end in np.cumsum(sizes))]
        records += _RECORD.pack(i, shard, length, *starts[:5])
        at = starts[5]
    return records


def _manifest(dataset: ShardDataset, shards: int, options: Options) -> dict:
    return {
        "version": _VERSION,
        "num_samples": len(dataset),
        "num_shards": shards,
        "target_layer_ids": dataset.layer_numbers,
        "hidden_dtype": "bfloat16",
        "token_dtype": "int32",
        "mask_dtype": "uint8",
        "index_record_size": _RECORD.size,
        "hidden_size": dataset.capture.hidden_size,
        "shards": [
            {"shard_id": number, "file_name": f"shard-{number:05d}.bin"} for number in range(shards)
        ],
        "target_model_name_or_path": options.target_model or dataset.capture.model,
        "capture_key": dataset.capture.key,
    }

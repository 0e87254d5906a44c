"""Export for speculators 0.9: a Hugging Face dataset of tokens, and one file of states per row.

The file of row i is `hidden_states/hs_{i}.safetensors`. Each file: `hidden_states` [n, K+1, H], the
layers in ascending k and then r_N before the final norm, and `token_ids` int64 [n].

The trainer holds out the last rows for validation. Rows are therefore ordered by the hash of their
ids, not by source. A row that is added or removed moves the others by renaming.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file, save_file

from draftstates.exports.builder import Builder
from draftstates.exports.common import Options, cast, check_equal, include_torch, summary
from draftstates.exports.vocabulary import TokenCounts, draft_vocabulary
from draftstates.shards.dataset import ShardDataset, split_values

_ROWS_PER_BATCH = 256
_SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int64())),
        ("loss_mask", pa.list_(pa.int64())),
        ("seq_len", pa.int64()),
    ]
)


def export(dataset: ShardDataset, builder: Builder, options: Options) -> dict:
    """Write the dataset's samples into the builder, and return the content of `export.json`."""
    order = np.argsort(split_values(dataset.index.ids, seed=0), kind="stable").tolist()
    counts = TokenCounts(options.target_vocab_size)
    for row, i in enumerate(order):
        _add_sample(dataset, i, f"hidden_states/hs_{row}.safetensors", builder, options)
    _write_tokens(dataset, order, builder, counts)
    _write_vocabulary(counts, builder, options)
    return summary(
        dataset,
        options,
        order="by the hash of the sample id",
        target_layer_ids=dataset.layer_numbers,
    )


def _add_sample(
    dataset: ShardDataset, i: int, name: str, builder: Builder, options: Options
) -> None:
    def tensors() -> dict[str, torch.Tensor]:
        states = dataset.states(i)
        slots = torch.cat([states.layers, states.final[:, None]], dim=1)
        return {"hidden_states": cast(slots, options), "token_ids": states.input_ids.long()}

    builder.add(
        name,
        dataset.content(i),
        lambda path: save_file(tensors(), path),
        lambda path: check_equal(path, load_file(path), tensors()),
    )


def _write_tokens(
    dataset: ShardDataset, order: list[int], builder: Builder, counts: TokenCounts
) -> None:
    """Write the tokens of all samples as a dataset, read it back, and count supervised tokens."""
    # `datasets` refuses to write to a folder that it reads from.
    staged = builder.partial / "staged" / "tokens.arrow"
    staged.parent.mkdir(exist_ok=True)
    with pa.OSFile(str(staged), "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as writer:
        for batch in _token_batches(dataset, order, counts):
            writer.write_batch(batch)
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_file(str(staged)).with_format("torch")
    rows.save_to_disk(str(builder.partial))
    del rows
    shutil.rmtree(staged.parent)
    builder.include(
        "dataset_info.json",
        "state.json",
        *(path.name for path in builder.partial.glob("data-*.arrow")),
    )
    _check_tokens(dataset, order, builder.partial)


def _token_batches(
    dataset: ShardDataset, order: list[int], counts: TokenCounts
) -> Iterator[pa.RecordBatch]:
    """Yield the tokens of the samples, and count the supervised ones on the way."""
    for start in range(0, len(order), _ROWS_PER_BATCH):
        tokens = [dataset.tokens(i) for i in order[start : start + _ROWS_PER_BATCH]]
        for i, (input_ids, loss_mask) in zip(order[start:], tokens, strict=False):
            counts.add(dataset.sample_id(i), input_ids, loss_mask)
        ids = pa.array(
            [input_ids.astype(np.int64) for input_ids, _ in tokens], type=_SCHEMA.field(0).type
        )
        masks = pa.array(
            [loss_mask.astype(np.int64) for _, loss_mask in tokens], type=_SCHEMA.field(1).type
        )
        yield pa.RecordBatch.from_arrays(
            [ids, masks, pa.array([len(input_ids) for input_ids, _ in tokens], type=pa.int64())],
            schema=_SCHEMA,
        )


def _check_tokens(dataset: ShardDataset, order: list[int], folder: Path) -> None:
    rows = datasets.load_from_disk(str(folder))
    for row, i in zip(rows, order, strict=True):
        input_ids, loss_mask = (
            torch.from_numpy(values.astype(np.int64)) for values in dataset.tokens(i)
        )
        check_equal(
            folder,
            row,
            {
                "input_ids": input_ids,
                "loss_mask": loss_mask,
                "seq_len": torch.tensor(len(input_ids)),
            },
        )


def _write_vocabulary(counts: TokenCounts, builder: Builder, options: Options) -> None:
    include_torch(builder, "token_freq.pt", counts.nonzero())
    if options.draft_vocab_size is not None:
        mapping = draft_vocabulary(counts.counts, draft_size=options.draft_vocab_size)
        for name, array in (("d2t.npy", mapping.d2t), ("t2d.npy", mapping.t2d)):
            np.save(builder.partial / name, array)
            check_equal(
                builder.partial / name,
                {name: np.load(builder.partial / name).tolist()},
                {name: array.tolist()},
            )
            builder.include(name)

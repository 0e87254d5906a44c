"""Export for SpecForge 0.2: `rows_{a}-{b}/data_{i}.ckpt`, in groups of 2,000.

SpecForge's own script that prepares hidden states writes the same files.

Each file: `input_ids` and `loss_mask` int64 [n], `hidden_state` [1, n, H] after the final norm,
`aux_hidden_state` [1, n, K*H].
"""

import torch

from draftstates.exports.builder import Builder
from draftstates.exports.common import Options, add_torch, include_torch, sample_files, summary
from draftstates.exports.vocabulary import TokenCounts, draft_vocabulary
from draftstates.shards.dataset import ShardDataset

_GROUP = 2000


def export(dataset: ShardDataset, builder: Builder, options: Options) -> dict:
    """Write the dataset's samples into the builder, and return the content of `export.json`."""
    counts = TokenCounts(options.target_vocab_size)
    for i in range(len(dataset)):
        first = i - i % _GROUP
        _add_sample(dataset, i, f"rows_{first}-{first + _GROUP}/data_{i}.ckpt", builder, options)
        counts.add(dataset.sample_id(i), *dataset.tokens(i))
    if options.draft_vocab_size is not None:
        mapping = draft_vocabulary(counts.counts, draft_size=options.draft_vocab_size)
        values = {"d2t": torch.from_numpy(mapping.d2t), "t2d": torch.from_numpy(mapping.t2d)}
        include_torch(builder, "vocab_mapping.pt", values)
    return summary(dataset, options, aux_hidden_state_layers=dataset.layer_numbers)


def _add_sample(
    dataset: ShardDataset, i: int, name: str, builder: Builder, options: Options
) -> None:
    def values() -> dict[str, object]:
        states = dataset.states(i)
        layers, final = sample_files(states, options)
        return {
            "input_ids": states.input_ids.long(),
            "loss_mask": states.loss_mask.long(),
            "hidden_state": final[None],
            "aux_hidden_state": layers[None],
        }

    add_torch(builder, name, dataset.content(i), values)

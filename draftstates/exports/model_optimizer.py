"""Export for NVIDIA Model-Optimizer: `{sample id}.pt`, as its collecting scripts write it.

Each file: `input_ids` and `loss_mask` int64 [n], `hidden_states` [n, H], `aux_hidden_states` [n,
K*H], `conversation_id`. Where the final state is r_N and the trainer has to norm it, the file also
holds `hidden_states_prenorm` (Model-Optimizer's DFlash norms it, its EAGLE does not).
"""

from draftstates.errors import UserError
from draftstates.exports.builder import Builder
from draftstates.exports.common import Options, add_torch, sample_files, summary
from draftstates.shards.dataset import ShardDataset


def export(dataset: ShardDataset, builder: Builder, options: Options) -> dict:
    """Write the dataset's samples into the builder, and return the content of `export.json`."""
    if options.draft_vocab_size is not None:
        raise UserError(
            "model_optimizer makes its own draft vocabulary: leave draft_vocab_size out"
        )
    for i in range(len(dataset)):
        _add_sample(dataset, i, builder, options)
    return summary(dataset, options, eagle_aux_hidden_state_layer_ids=dataset.layer_numbers)


def _add_sample(dataset: ShardDataset, i: int, builder: Builder, options: Options) -> None:
    sample_id = dataset.sample_id(i)

    def values() -> dict[str, object]:
        states = dataset.states(i)
        layers, final = sample_files(states, options)
        found = {
            "input_ids": states.input_ids.long(),
            "hidden_states": final,
            "aux_hidden_states": layers,
            "loss_mask": states.loss_mask.long(),
            "conversation_id": sample_id,
        }
        return (
            {**found, "hidden_states_prenorm": True} if states.final_norm == "pre_norm" else found
        )

    add_torch(builder, f"{sample_id}.pt", dataset.content(i), values)

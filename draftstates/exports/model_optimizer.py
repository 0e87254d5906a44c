"""NVIDIA Model-Optimizer: one `{sample id}.pt` a sample, as its scripts that collect hidden states write them.

Each file: `input_ids` and `loss_mask` int64 [n], `hidden_states` [n, H], `aux_hidden_states` [n, K*H], `conversation_id`; and
`hidden_states_prenorm`, where the final state is r_N and the trainer is to norm it (its DFlash does, its EAGLE does not).
"""

from draftstates.dataset import ShardDataset
from draftstates.errors import UserError
from draftstates.exports.builder import Builder
from draftstates.exports.common import Options, check_torch, sample_files, save_torch, summary


def export(dataset: ShardDataset, builder: Builder, options: Options) -> dict:
    """Write the dataset's samples into the builder; returns what `export.json` is to say."""
    if options.draft_vocab_size is not None:
        raise UserError("model_optimizer makes its own draft vocabulary: leave draft_vocab_size out")
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
        return {**found, "hidden_states_prenorm": True} if states.final_norm == "pre_norm" else found

    builder.add(f"{sample_id}.pt", dataset.content(i), lambda path: save_torch(path, values()), lambda path: check_torch(path, values()))

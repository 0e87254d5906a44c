"""Held-out agreement of a drafter with the model, on whole captures: how often its 1st, 2nd and 3rd
token is the model's most likely one.

The model's token is taken over its whole vocabulary, so that what the drafter's smaller one lacks
counts as a miss. As in training, the tokens before a drafted one are the conversation's, and the
states from the 2nd step on are the drafter's own.
"""

import argparse
import json
from pathlib import Path

import torch
from agreement import count_agreement
from hs_connectors import FileTransfer
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset

from draftstates.model.folder import ModelFolder
from draftstates.model.head import Head, read_head

STEPS = 3


def held_out(folder: Path) -> ArrowDataset:
    """Return speculators' own reader of a whole export."""
    return ArrowDataset(
        datapath=folder,
        # no packing: each sample is judged alone
        max_len=0,
        transfer=FileTransfer(folder / "hidden_states"),
        on_missing="raise",
        hidden_states_dtype=torch.float32,
    )


def load_drafter(checkpoint: Path, device: str) -> Eagle3DraftModel:
    """Return the drafter in float32, with the attention of its training, which the checkpoint does
    not name.
    """
    config = Eagle3SpeculatorConfig.from_pretrained(checkpoint)
    config.transformer_layer_config._attn_implementation = "sdpa"
    return Eagle3DraftModel.from_pretrained(checkpoint, config=config).float().to(device).eval()


def draft(drafter: Eagle3DraftModel, sample: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the tokens of each step, in the target model's vocabulary, int64 [n]: those at j
    follow token j of a shifted sample.
    """
    rows = {name: sample[name][None] for name in ("hidden_states", "input_ids", "position_ids")}
    rows["hidden_states"] = rows["hidden_states"].float()
    tokens = drafter(**rows, document_ids=torch.zeros_like(rows["input_ids"]), ttt_steps=STEPS)
    return [step[0] + drafter.d2t[step[0]] for step in tokens]


def own_tokens(head: Head, states: torch.Tensor) -> torch.Tensor:
    """Return the target model's most likely next tokens, int64 [n], from its states before the
    final norm, [n, H].
    """
    return head.logits(head.inputs(states), dtype=torch.float32).argmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        help="folder of a whole speculators export that no drafter was trained on",
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    drafter = load_drafter(arguments.checkpoint, device)
    head = read_head(ModelFolder(arguments.model), final_norm="pre_norm")
    agreed, total = torch.zeros(STEPS), torch.zeros(STEPS)
    samples = held_out(arguments.data)
    with torch.inference_mode():
        for i in range(len(samples)):
            sample = shift_batch(samples[i])
            drafted = draft(drafter, {name: value.to(device) for name, value in sample.items()})
            own = own_tokens(head, sample["verifier_last_hidden_states"])
            # A draft at j follows token j, so its first token is supervised where token j + 1 is.
            # No token follows the last.
            supervised = torch.cat([sample["loss_mask"][1:].bool(), torch.tensor([False])])
            counts = count_agreement([tokens.cpu() for tokens in drafted], own, supervised)
            agreed, total = agreed + torch.tensor(counts[0]), total + torch.tensor(counts[1])
    figures = {
        "samples": len(samples),
        "drafts": int(total[0]),
        "agreement": (agreed / total).tolist(),
    }
    arguments.output.write_text(json.dumps(figures))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

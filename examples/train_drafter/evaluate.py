"""Held-out agreement of a drafter with the model, on whole captures: how often its 1st, 2nd and 3rd token is the model's most likely one.

The model's token is taken over its whole vocabulary, so that what the drafter's smaller one lacks counts as a miss. As in training, the
tokens before a drafted one are the conversation's, and the states from the 2nd step on are the drafter's own.
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

from draftstates.model import Head, read_head

STEPS = 3


def held_out(folder: Path) -> ArrowDataset:
    """speculators' own reader of an export, all of it."""
    return ArrowDataset(
        datapath=folder,
        max_len=0,  # nothing is packed here
        transfer=FileTransfer(folder / "hidden_states"),
        on_missing="raise",
        hidden_states_dtype=torch.float32,
    )


def load_drafter(checkpoint: Path, device: str) -> Eagle3DraftModel:
    """The drafter in float32, with the attention that it was trained with: a checkpoint does not say which."""
    config = Eagle3SpeculatorConfig.from_pretrained(checkpoint)
    config.transformer_layer_config._attn_implementation = "sdpa"
    return Eagle3DraftModel.from_pretrained(checkpoint, config=config).float().to(device).eval()


def draft(drafter: Eagle3DraftModel, sample: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Tokens of each step, in the model's vocabulary, int64 [n]: at j they follow the token j of a shifted sample."""
    rows = {name: sample[name][None] for name in ("hidden_states", "input_ids", "position_ids")}
    rows["hidden_states"] = rows["hidden_states"].float()
    tokens = drafter(**rows, document_ids=torch.zeros_like(rows["input_ids"]), ttt_steps=STEPS)
    return [step[0] + drafter.d2t[step[0]] for step in tokens]


def own_tokens(head: Head, states: torch.Tensor) -> torch.Tensor:
    """The model's most likely next tokens, int64 [n], from its states before the final norm, [n, H]."""
    return (head.norm(states.float()) @ head.weight.float().T).argmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder of a whole speculators export that nothing was trained on")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    drafter, head = load_drafter(arguments.checkpoint, device), read_head(arguments.model, final_norm="pre_norm")
    agreed, total = torch.zeros(STEPS), torch.zeros(STEPS)
    samples = held_out(arguments.data)
    with torch.inference_mode():
        for i in range(len(samples)):
            sample = shift_batch(samples[i])
            drafted = draft(drafter, {name: value.to(device) for name, value in sample.items()})
            own = own_tokens(head, sample["verifier_last_hidden_states"])
            # a draft at j follows token j: the first that it gives is a target if token j + 1 is one; none follows the last
            targets = torch.cat([sample["loss_mask"][1:].bool(), torch.tensor([False])])
            counts = count_agreement([tokens.cpu() for tokens in drafted], own, targets)
            agreed, total = agreed + torch.tensor(counts[0]), total + torch.tensor(counts[1])
    figures = {"samples": len(samples), "drafts": int(total[0]), "agreement": (agreed / total).tolist()}
    arguments.output.write_text(json.dumps(figures))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

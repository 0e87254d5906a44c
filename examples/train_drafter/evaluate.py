"""Held-out agreement of a trained drafter with the model, on whole captures: how often its first 1, 2 and 3 tokens are all the model's."""

import argparse
import json
from pathlib import Path

import torch
from hs_connectors import FileTransfer
from speculators.losses import resolve_loss_config
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.dataloader import create_train_val_loaders

STEPS = 3


def validation_batches(data: Path, model: Eagle3DraftModel, *, tokens: int, ratio: float) -> torch.utils.data.DataLoader:
    """speculators' own loader of the held-out rows."""
    _, loader = create_train_val_loaders(
        data_path=str(data),
        total_seq_len=tokens,
        hidden_states_dtype=torch.float32,
        transfer=FileTransfer(data / "hidden_states"),
        vllm_endpoint="",
        on_missing="raise",
        verifier_name_or_path="",
        request_timeout=None,
        max_retries=0,
        generation_validation_retries=0,
        max_consecutive_generation_failures=1,
        hidden_size=model.config.transformer_layer_config.hidden_size,
        num_target_layers=len(model.target_layer_ids),
        num_workers=0,
        prefetch_factor=1,
        preprocess=shift_batch,
        train_data_ratio=ratio,
    )
    return loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder of a whole speculators export")
    parser.add_argument("--tokens", type=int, required=True, help="tokens a batch")
    parser.add_argument("--train-data-ratio", type=float, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = Eagle3SpeculatorConfig.from_pretrained(arguments.checkpoint)
    config.transformer_layer_config._attn_implementation = "sdpa"  # as in training; a checkpoint does not say
    model = Eagle3DraftModel.from_pretrained(arguments.checkpoint, config=config).float().to(device).eval()
    loss = resolve_loss_config("kl_div", "eager")
    agreed, total = torch.zeros(STEPS), torch.zeros(STEPS)
    with torch.inference_mode():
        for batch in validation_batches(arguments.data, model, tokens=arguments.tokens, ratio=arguments.train_data_ratio):
            inputs = {name: value.to(device) for name, value in batch.items() if isinstance(value, torch.Tensor)}
            _, _, metrics = model(**inputs, ttt_steps=STEPS, loss_config=loss)
            for step in range(STEPS):
                agreed[step] += metrics[f"full_acc_{step}_sum"].cpu()
                total[step] += metrics[f"full_acc_{step}_total"].cpu()
    figures = {"tokens": int(total[0]), "agreement": (agreed / total).tolist()}
    arguments.output.write_text(json.dumps(figures))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

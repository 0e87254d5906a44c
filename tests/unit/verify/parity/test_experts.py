"""Experts that no token of parity's prompt reaches are named: their weights were not compared."""

from pathlib import Path

import parity_models
import torch
from safetensors.torch import load_file, save_file

from draftstates.model.folder import ModelFolder
from draftstates.verify.parity.streamed import StreamedModel


def states(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    found = StreamedModel(ModelFolder(folder)).states(parity_models.ids(3))
    return found.by_name, found.unreached


def zero(folder: Path, expert: int) -> None:
    """Zero the weights of one expert of the first layer."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if f"layers.0.mlp.experts.{expert}." in name:
                tensor.zero_()
        save_file(tensors, file, metadata={"format": "pt"})


def test_unreached_experts_are_those_whose_weights_change_nothing(tmp_path: Path) -> None:
    folder = parity_models.make("qwen3_moe", tmp_path, num_experts=12)
    right, unreached = states(folder)
    # Its second layer has no experts.
    assert sorted(unreached) == ["r_1", "r_3", "r_4"]
    count, named = unreached["r_1"].split(": ")
    left = {int(number) for number in named.split(", ")}
    assert count == f"{len(left)} of 12"
    assert 6 <= len(left) < 12
    for expert in sorted(left):
        zero(folder, expert)
    assert torch.equal(states(folder)[0]["r_1"], right["r_1"])
    zero(folder, min({*range(12)} - left))
    assert not torch.equal(states(folder)[0]["r_1"], right["r_1"])


def test_a_model_without_experts_names_none(tmp_path: Path) -> None:
    assert states(parity_models.make("qwen3", tmp_path))[1] == {}

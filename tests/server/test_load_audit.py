"""Promise 6: a server that does not read the whole checkpoint, or fill its whole model, is refused.

SGLang loads the models in processes of its own kind, without a server: see `load_only.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
import torch
import transformers
from safetensors.torch import load_file, save_file
from server_harness import spec_for

from draftstates.capture.settings import CaptureSettings

pytestmark = pytest.mark.server
_MOE = {
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [1],
}


def made_by(config: transformers.PretrainedConfig, folder: Path) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            # a bias of zeros may be left out
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)


def make(name: str, folder: Path) -> None:
    common = tiny_models._COMMON
    if name == "mlp_bias":
        made_by(transformers.LlamaConfig(**common, mlp_bias=True), folder)
    elif name == "mlp_only_layers":
        made_by(transformers.Qwen3MoeConfig(**common, **_MOE), folder)
    elif name == "tied":
        tied = {**common, "tie_word_embeddings": True}
        made_by(transformers.LlamaConfig(**tied), folder)
    else:
        tiny_models.make("deepseek_v3" if name == "deepseek_v3" else "qwen3", folder)
    weights = folder / "model.safetensors"
    if name == "removed":
        tensors = load_file(weights)
        del tensors["model.layers.2.mlp.up_proj.weight"]
        save_file(tensors, weights, metadata={"format": "pt"})
    elif name == "added":
        tensors = {**load_file(weights), "model.layers.2.mlp.extra.weight": torch.ones(3)}
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        save_file(tensors, weights, metadata={"format": "pt"})


RIGHT = ["deepseek_v3", "qwen3", "tied"]
REFUSED = {
    "mlp_bias": [
        f"model.layers.{k}.mlp.{part}_proj.bias is in the checkpoint and was not read"
        for k in range(2)
        for part in ("down", "gate", "up")
    ],
    "mlp_only_layers": [
        *(
            f"model.layers.1.mlp.{part}_proj.weight is in the checkpoint and was not read"
            for part in ("down", "gate", "up")
        ),
        "model.layers.1.mlp.experts.w13_weight is in the model and was not filled",
        "model.layers.1.mlp.gate.weight is in the model and was not filled",
    ],
    "removed": [
        "model.layers.2.mlp.gate_up_proj.weight is in the model and was not filled (8,192 of"
        " 16,384 elements)"
    ],
    "added": ["model.layers.2.mlp.extra.weight is in the checkpoint and was not read"],
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Load every model; return the folder that has a folder for each, with its log."""
    base = tmp_path_factory.mktemp("loaded")
    folders = []
    for name in (*RIGHT, *REFUSED):
        folder = base / name / "model"
        make(name, folder)
        settings = CaptureSettings(root=base / name / "root", spec=spec_for(folder, layers=(1,)))
        (base / name / "root").mkdir()
        (base / name / "settings.json").write_text(*settings.to_environment().values())
        folders.append(folder)
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, Path(__file__).with_name("load_only.py"), *folders]
    subprocess.run(command, env=environment, check=True, timeout=600)
    return base


def said(base: Path, name: str) -> str:
    return (base / name / "load.log").read_text(errors="replace")


@pytest.mark.parametrize("name", RIGHT)
def test_a_model_that_is_loaded_as_it_is_passes_and_is_remembered(loaded: Path, name: str) -> None:
    assert "loaded in" in said(loaded, name)
    assert len(list((loaded / name / "root" / ".audits").iterdir())) == 1


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_is_loaded_otherwise_is_refused_by_tensor(loaded: Path, name: str) -> None:
    log = said(loaded, name)
    assert "draftstates: cannot capture with sglang" in log
    assert "loaded in" not in log
    assert [each for each in REFUSED[name] if each not in log] == []
    assert "inv_freq" not in log
    assert not (loaded / name / "root" / ".audits").exists()

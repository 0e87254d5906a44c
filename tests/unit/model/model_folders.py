"""A made-up model's folder, for the tests of its readers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftstates.model.folder import ModelFolder

HIDDEN, VOCAB = 16, 50
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def tensors(prefix: str = "") -> dict[str, torch.Tensor]:
    """Return embeddings, norm and head, with names as a wrapper gives them by `prefix`."""
    generator = torch.Generator().manual_seed(0)
    return {
        f"{prefix}model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        f"{prefix}model.layers.8.embed_tokens.weight": torch.randn(
            VOCAB, HIDDEN, generator=generator
        ),
        f"{prefix}model.norm.weight": torch.rand(HIDDEN, generator=generator),
        f"{prefix}lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
    }


def make(
    folder: Path,
    *,
    config: dict[str, Any] | None = None,
    weights: dict[str, torch.Tensor] | None = None,
) -> ModelFolder:
    """Write a model with changes to `CONFIG`, or other weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    (folder / "tokenizer.json").write_text("{}")
    save_file(tensors() if weights is None else weights, folder / "model.safetensors")
    return ModelFolder(folder)


def make_wrapped(folder: Path) -> ModelFolder:
    """Write a multimodal wrapper's layout: the language model below `text_config`."""
    model = make(folder, weights=tensors("language_model."))
    text = {
        **CONFIG,
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "quantization_config": {"quant_method": "compressed-tensors"},
    }
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    model.config_path.write_text(json.dumps(config))
    return model

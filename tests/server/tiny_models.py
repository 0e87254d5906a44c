"""Random models of the smallest possible size, in the layouts that SGLang serves."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen2Config, Qwen3Config

VOCABULARY = 512
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    # Large enough that layers differ and the next token is no coin toss.
    "initializer_range": 0.2,
}
_YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32,
    "beta_slow": 1,
}
_DEEPSEEK = {
    **_COMMON,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "topk_group": 1,
}
# Keys of a DeepSeek-V3 config.json that SGLang reads and transformers does not write.
_DEEPSEEK_EXTRA = {
    "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 10000.0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
}


def make(kind: str, folder: Path) -> Path:
    """Write a model of `kind` (qwen2, qwen3, deepseek_v3, kimi_k25) to `folder`."""
    if kind == "kimi_k25":
        return _kimi(folder)
    torch.manual_seed(0)
    config = {"qwen2": _qwen2, "qwen3": _qwen3, "deepseek_v3": _deepseek}[kind]()
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    if kind == "deepseek_v3":
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **_DEEPSEEK_EXTRA}))
    return folder


def _qwen2() -> Qwen2Config:
    return Qwen2Config(**_COMMON)


def _qwen3() -> Qwen3Config:
    return Qwen3Config(**_COMMON, head_dim=16)


def _deepseek() -> DeepseekV3Config:
    return DeepseekV3Config(
        **_DEEPSEEK,
        rope_scaling={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        rope_theta=10000.0,
    )


def _kimi(folder: Path) -> Path:
    """Write Kimi-K2.5's layout: a vision tower and a projector beside a DeepSeek-V3 text model.

    The folder has no weights: SGLang makes random ones.
    """
    text = {
        **_DEEPSEEK,
        **_DEEPSEEK_EXTRA,
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_act": "silu",
    }
    text |= {
        "rms_norm_eps": 1e-6,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "attention_bias": False,
        "n_shared_experts": 1,
    }
    vision = {
        "vt_hidden_size": 64,
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "text_hidden_size": 64,
    }
    folder.mkdir(parents=True)
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": {**vision, "mm_hidden_size": 64},
        "media_placeholder_token_id": 500,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder

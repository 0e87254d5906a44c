"""Random models with saved weights, for GPU machines.

The shapes are those whose kernels a bare GPU machine has; all other sizes are small.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config, PretrainedConfig, Qwen3Config

_COMMON = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "max_position_embeddings": 40960,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "num_hidden_layers": 8,
    "initializer_range": 0.05,
}


def dense() -> PretrainedConfig:
    """Qwen3 with the heads of the 8B model."""
    return Qwen3Config(
        **_COMMON,
        intermediate_size=3072,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )


def mla() -> PretrainedConfig:
    """DeepSeek-V2 with the attention and the experts' number of the Lite model."""
    return DeepseekV2Config(
        **_COMMON,
        intermediate_size=3072,
        moe_intermediate_size=512,
        num_attention_heads=16,
        num_key_value_heads=16,
        first_k_dense_replace=1,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        # read by SGLang, of no meaning to transformers
        moe_layer_freq=1,
        scoring_func="softmax",
        seq_aux=True,
        pretraining_tp=1,
        ep_size=1,
    )


def qwen3_8b() -> PretrainedConfig:
    """Qwen3-8B's shape, for benchmarks that need a head on the disk: 16 GB."""
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    shape = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "vocab_size": 151936,
        "initializer_range": 0.02,
    }
    return Qwen3Config(**{**_COMMON, **shape, **heads})


def make(kind: str, folder: Path) -> Path:
    """Write the model `dense`, `mla` or `qwen3_8b` with random weights in bfloat16."""
    torch.manual_seed(0)
    config = {"dense": dense, "mla": mla, "qwen3_8b": qwen3_8b}[kind]()
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))

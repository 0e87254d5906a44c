"""Tiny random checkpoints of several families, and the ordinary forward pass of them."""

from collections.abc import Callable
from pathlib import Path

import torch
import transformers

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 128,
}
_MLA = {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "rope_scaling": _YARN,
}
_GEMMA = {**SMALL, "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "model_type": "siglip_vision_model",
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 32,
}
# class of the configuration and its values
FAMILIES = {
    "llama_with_biases": ("LlamaConfig", {**SMALL, "mlp_bias": True, "attention_bias": True}),
    "qwen3": ("Qwen3Config", {**SMALL, "head_dim": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", {**SMALL, **_MOE, "head_dim": 16, "mlp_only_layers": [1]}),
    "deepseek_v3": ("DeepseekV3Config", {**SMALL, **_MLA}),
    "gemma3_text": ("Gemma3TextConfig", _GEMMA),
    "gemma3": (
        "Gemma3Config",
        {
            "text_config": {**_GEMMA, "model_type": "gemma3_text"},
            "vision_config": _VISION,
            "mm_tokens_per_image": 4,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {**SMALL, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
         "sliding_window": 16},
    ),
    "llama4_text": (
        "Llama4TextConfig",
        {**SMALL, "intermediate_size_mlp": 128, "head_dim": 16, "num_local_experts": 4,
         "num_experts_per_tok": 1},
    ),
    "qwen3_next": ("Qwen3NextConfig", {**SMALL, **_MOE, **_LINEAR, "head_dim": 16}),
}  # fmt: skip


def make(family: str, folder: Path, **changes: object) -> Path:
    """Write a random checkpoint in bfloat16, several files large."""
    name, values = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**values, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5 if parameter.ndim == 1 else 0.1)
    model.save_pretrained(folder, max_shard_size="300KB")
    return folder


def ordinary_states(
    folder: Path,
    input_ids: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    change: Callable[[torch.nn.Module], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Return the states of transformers' model, loaded as a whole.

    Args:
        attention: transformers' name of the kernel of attention; None for its choice.
        change: plants a fault into the model.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention
    ).eval()
    if change is not None:
        with torch.no_grad():
            change(model)
    stack = model.get_decoder()
    stack = stack if hasattr(stack, "layers") else stack.model
    found: dict[str, torch.Tensor] = {}
    for k, layer in enumerate(stack.layers):
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, k=k: found.update(
                {f"r_{k}": (args or (kwargs["hidden_states"],))[0][0].clone()}
            ),
            with_kwargs=True,
        )
    stack.norm.register_forward_pre_hook(
        lambda _, args: found.update({f"r_{len(stack.layers)}": args[0][0].clone()})
    )
    with torch.inference_mode():
        output = stack(input_ids=input_ids[None], use_cache=False)
    return {**found, "post_norm": output.last_hidden_state[0]}


def ids(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(1))

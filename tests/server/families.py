"""The families of models: tried, read, or refused; the source of `docs/models.md`.

`python tests/server/families.py > docs/models.md` writes the document.
"""

import dataclasses
import sys
import textwrap
from typing import Any

from draftstates.model.family import REFUSED_KEYS, REFUSED_TYPES

VOCABULARY = 512
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    # Not the usual base, which hides a server that does not read it.
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
}
_TWO_BASES = {
    "full_attention": {"rope_type": "default", "rope_theta": 300.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family that is tried.

    Attributes:
        model_type: its name in transformers.
        config: its configuration, small.
        written: keys of `config.json` that SGLang reads and transformers does not write.
        norm_mean: mean of the random weights of norms; 0 where the norm adds 1.
        limit: largest distance of a row from Hugging Face's, over the row's norm.
        note: what a user should know.
        parity: how the result of a run's own comparison with the checkpoint begins.
    """

    model_type: str
    config: dict[str, Any]
    written: dict[str, Any] = dataclasses.field(default_factory=dict)
    norm_mean: float = 1.0
    # Sums in float32 in another order. Neighbouring layers lie a thousand times as far.
    limit: float = 1e-4
    note: str = ""
    parity: str = "all "


def _family(
    model_type: str,
    *,
    without: tuple[str, ...] = (),
    written: dict[str, Any] | None = None,
    norm_mean: float = 1.0,
    limit: float = 1e-4,
    note: str = "",
    parity: str = "all ",
    **config: Any,
) -> Family:
    small = {key: value for key, value in _SMALL.items() if key not in without}
    return Family(
        model_type=model_type,
        config={**small, **config},
        written=written or {},
        norm_mean=norm_mean,
        limit=limit,
        note=note,
        parity=parity,
    )


_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ONE = {"norm_mean": 0.0}
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 300.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 128,
}
FAMILIES: dict[str, Family] = {
    "llama": _family("llama"),
    "mistral": _family("mistral", head_dim=16, sliding_window=None),
    "qwen2": _family("qwen2"),
    "qwen3": _family("qwen3", head_dim=16),
    "qwen2_moe": _family("qwen2_moe", **_MOE, shared_expert_intermediate_size=64),
    "qwen3_moe": _family("qwen3_moe", **_MOE, head_dim=16),
    "mixtral": _family("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "gemma": _family(
        "gemma",
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        head_dim=16,
        limit=1e-3,
        note="SGLang computes GELU exactly, the model approximates it",
        **_ONE,
    ),
    "gemma3_text": _family(
        "gemma3_text",
        tie_word_embeddings=True,
        head_dim=16,
        query_pre_attn_scalar=16,
        num_hidden_layers=4,
        rope_parameters=_TWO_BASES,
        **_ONE,
    ),
    "granite": _family(
        "granite",
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.25,
        logits_scaling=8.0,
    ),
    "granitemoe": _family(
        "granitemoe",
        num_local_experts=4,
        num_experts_per_tok=2,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.25,
        logits_scaling=6.0,
    ),
    "cohere": _family("cohere", logit_scale=0.25, tie_word_embeddings=True),
    "cohere2": _family("cohere2", logit_scale=0.25, head_dim=16, tie_word_embeddings=True),
    "olmo2": _family("olmo2"),
    "olmoe": _family(
        "olmoe", num_key_value_heads=4, num_experts=8, num_experts_per_tok=2, intermediate_size=32
    ),
    "phi3": _family("phi3"),
    "starcoder2": _family("starcoder2"),
    "stablelm": _family("stablelm"),
    "persimmon": _family("persimmon", num_key_value_heads=4),
    "gpt2": _family(
        "gpt2",
        n_embd=64,
        n_head=4,
        n_layer=3,
        n_positions=512,
        without=(*tuple(_SMALL)[1:7], "rope_parameters"),
        parity="none ",
        tie_word_embeddings=True,
    ),
    "glm4": _family("glm4", head_dim=16),
    "glm4_moe": _family(
        "glm4_moe",
        head_dim=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
    "ernie4_5": _family("ernie4_5", head_dim=16),
    "lfm2": _family(
        "lfm2", num_hidden_layers=4, layer_types=["conv", "conv", "full_attention", "conv"]
    ),
    "lfm2_moe": _family(
        "lfm2_moe",
        num_hidden_layers=4,
        layer_types=["conv", "conv", "full_attention", "conv"],
        **_MOE,
        num_dense_layers=1,
    ),
    "arcee": _family("arcee"),
    "apertus": _family(
        "apertus",
        limit=2e-3,
        note="SGLang holds two numbers of its activation in bfloat16",
    ),
    "seed_oss": _family("seed_oss", head_dim=16),
    "smollm3": _family("smollm3"),
    "minicpm3": _family("minicpm3", **_MLA, scale_emb=12, dim_model_base=16, scale_depth=1.4),
    "solar_open": _family(
        "solar_open",
        head_dim=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        without=("intermediate_size",),
    ),
    "ministral3": _family("ministral3", head_dim=16, without=("rope_parameters",)),
    "opt": _family(
        "opt",
        ffn_dim=128,
        word_embed_proj_dim=64,
        without=("intermediate_size", "num_key_value_heads", "rope_parameters"),
        tie_word_embeddings=True,
    ),
    "gemma2": _family(
        "gemma2",
        tie_word_embeddings=True,
        head_dim=16,
        query_pre_attn_scalar=16,
        num_hidden_layers=4,
        final_logit_softcapping=None,
        note="without the cap of its logits, which has a kernel for a GPU alone",
        written={"hidden_act": "gelu_pytorch_tanh"},
        **_ONE,
    ),
    "olmo": _family("olmo", num_key_value_heads=4),
    "glm4_moe_lite": _family(
        "glm4_moe_lite",
        **_MLA,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        rope_parameters=_YARN,
        written={"first_k_dense_replace": 1},
    ),
}


# Where the states lie was read in SGLang 0.5.23's model files; the reason why the family was not
# tried stands beside it.
_ATTENTION = "its attention has kernels for a GPU alone"
_MIXERS = "its mixers have kernels for a GPU alone"
_OWN_CODE = "transformers runs it with code of its own"
READ = {
    "afmoe, ernie4_5_moe": "its choice of experts has kernels for a GPU alone",
    "deepseek_v32, glm_moe_dsa, exaone4, exaone_moe, gpt_oss, minimax_m2": _ATTENTION,
    "falcon_h1, granitemoehybrid, kimi_linear, nemotron_h, qwen3_5, qwen3_next": _MIXERS,
    "deepseek_v2, gemma4, hy_v3": (
        "not compared here: no run of their tiny models has come to its end"
    ),
    "deepseek_v3": "`tests/server/test_parity.py` captures it from a server and compares",
    "hunyuan_v1_dense, hunyuan_v1_moe": "transformers writes its tensors under other names",
    "internlm2, internvl_chat, minicpm, nemotron-nas": _OWN_CODE,
    "kimi_k2, kimi_k25": "DeepSeek-V3's layers; captured with random weights, without a reference",
    "laguna, mellum": "its sliding windows need attention of a GPU",
    "llama4, llama4_text": "SGLang computes a part of it in bfloat16 on the CPU",
    "mistral3, gemma3, qwen2_vl, qwen2_5_vl, qwen3_vl": "a wrapper around a family that was tried",
}


def document() -> str:
    """Return `docs/models.md`."""
    refused = {f"`{name}`": reason for name, reason in REFUSED_TYPES.items()}
    refused |= {f"a model with `{key}`": reason for key, reason in REFUSED_KEYS.items()}
    refused |= {
        "a model with an encoder and a decoder": "one drafter reads one residual stream",
        "a model without a head that predicts a next token": "there is nothing to draft",
        "a model whose attention sees later tokens": "it predicts no next token",
        "a drafter": "it reads another model's states",
        "a model with `rope_type: dynamic`": (
            "SGLang scales its rotary angles at every length, the model only beyond the original"
        ),
        "samples longer than the original length of `rope_type: longrope`": (
            "SGLang rotates a whole batch otherwise as soon as one position lies beyond it"
        ),
    }
    parts = [
        "# Models",
        "Which families of models are captured, by `model_type` of `config.json`. The list is made"
        " by `tests/server/families.py`.",
        "## Works",
        "Tiny models with random weights, SGLang 0.5.23 on the CPU against Hugging Face, float32:"
        " every r_k, the final state before and after the norm, and the logits agree"
        " (`make test-families`).",
        _items({f"`{name}`": each.note for name, each in FAMILIES.items()}),
        "## Works by reading",
        "SGLang's model files hand the states over in a way that the taps know, but the CPU cannot"
        " run the family, or transformers cannot. The self-test and parity judge each server.",
        _items(READ),
        "## Refused",
        "From `config.json`, before anything is tokenised:",
        _items(refused),
        "Every other family is tried: the plug-in finds its layers and its final norm when the"
        " model is loaded, and refuses one whose states it cannot read.",
    ]
    return "\n\n".join(part if "\n" in part else _wrapped(part) for part in parts) + "\n"


def _items(reasons: dict[str, str]) -> str:
    """Return a list in the order of the names; a name without a reason stands alone."""
    lines = [f"- {name}" + (f": {reason}" if reason else "") for name, reason in reasons.items()]
    return "\n".join(_wrapped(line, indent="  ") for line in sorted(lines))


def _wrapped(text: str, *, indent: str = "") -> str:
    return textwrap.fill(
        text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    sys.stdout.write(document())

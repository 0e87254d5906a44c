"""Differences between model families, as `config.json` tells them: the one place that names any.

Plan, head, final norm, self-test and the SGLang plug-in read them here. What a loaded model shows
by itself, such as the place of its layers and norms, the plug-in finds there.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftstates.errors import UserError

if TYPE_CHECKING:
    import torch

# The keys of `config.json` below which a multimodal wrapper holds its language model; the second
# kind of wrapper holds the first.
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
_OUTER_CONFIG = "thinker_config"
PARTS = (*_TEXT_CONFIGS, _OUTER_CONFIG)
# Other names of a configuration's values, by the usual name.
_OTHER_NAMES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "layers_block_type"),
    "hidden_size": ("n_embd", "d_model"),
}

_PARTS = r"(.+\.)?"
_TEXT_PARTS = r"((model|language_model|backbone|transformer|decoder)\.)*"
HEAD_NAMES = re.compile(_PARTS + r"(lm_head|embed_out)\.weight|(language_model\.)?output\.weight")
# A multi-token-prediction layer may hold embeddings of its own: these are not the model's.
EMBEDDING_NAMES = re.compile(
    r"(?!.*\.layers\.)"
    + _PARTS
    + r"embed_tokens\.weight|"
    + _TEXT_PARTS
    + r"(embeddings|tok_embeddings|wte|embed_in|word_embeddings)\.weight"
)
_NORM = r"(norm|final_layernorm|final_layer_norm|embedding_norm|norm_f|ln_f)"
FINAL_NORM_NAMES = re.compile(_TEXT_PARTS + _NORM + r"\.weight")
FINAL_NORM_BIASES = re.compile(_TEXT_PARTS + _NORM + r"\.bias")

# Kinds of final norms: weight * x / rms(x); (1 + weight) * x / rms(x); weight * x' / std(x') + bias
# for x' = x - mean(x); the same with 1 + weight.
RMS, RMS_PLUS_ONE, LAYER, LAYER_PLUS_ONE = "rms", "rms_plus_one", "layer", "layer_plus_one"
LAYER_KINDS = (LAYER, LAYER_PLUS_ONE)
PLUS_ONE_KINDS = (RMS_PLUS_ONE, LAYER_PLUS_ONE)
_NORM_TYPES = {
    RMS: """
        afmoe apertus arcee deepseek_v2 deepseek_v3 ernie4_5 ernie4_5_moe exaone4 exaone_moe
        falcon_h1 glm glm4 glm4_moe glm4_moe_lite gpt_oss granite granitemoe granitemoehybrid
        hunyuan_v1_dense hunyuan_v1_moe hy_v3 internlm2 kimi_k2 kimi_linear lfm2 lfm2_moe llama
        llama4_text longcat_flash mellum mimo minicpm minicpm3 minimax_m2 ministral3 mistral
        mixtral nemotron_h olmo2 olmoe phi3 qwen2 qwen2_5_vl_text qwen2_moe qwen2_vl_text
        qwen3 qwen3_moe qwen3_vl_moe_text qwen3_vl_text seed_oss smollm3 solar_open
    """,
    RMS_PLUS_ONE: """
        gemma gemma2 gemma3 gemma3_text qwen3_5_moe_text qwen3_5_text qwen3_next
    """,
    LAYER: "cohere cohere2 gpt_neox persimmon phi phimoe stablelm starcoder2",
    LAYER_PLUS_ONE: "nemotron",
}
_NORMS = {name: kind for kind, names in _NORM_TYPES.items() for name in names.split()}
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon")
_LOGIT_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
# keys that hold numbers
NUMBERS = (
    *(*_EPSILONS, *_LOGIT_FACTORS, "logits_scaling", "final_logit_softcapping"),
    *("dim_model_base", "embedding_multiplier", "scale_emb"),
    *("output_mult", "mup_scale_factor", "output_soft_cap_temp"),
)

HEAD_BIAS = "SGLang leaves the bias of its head out, so that it predicts other tokens"
# What no tap can read, by the key of `config.json` that tells it, or by the model's type or class.
REFUSED_KEYS = {
    "hc_count": "its residual stream is several streams that its layers mix (hyper-connections)",
    "hc_mult": "its residual stream is several streams that its layers mix (hyper-connections)",
    "altup_num_inputs": "its residual stream is several streams, one of them current (AltUp)",
    "mhc": "its residual stream is several streams that its layers mix (hyper-connections)",
    "loop_num": "its layers run several times for a token, so that r_k has several values",
    "num_loops": "its layers run several times for a token, so that r_k has several values",
}
REFUSED_TYPES = {
    "Grok1ForCausalLM": "its norms are fused across layers, so that no module is given r_N",
    "gptj": HEAD_BIAS,
    "phi": HEAD_BIAS,
    "phimoe": HEAD_BIAS,
    "Grok1ModelForCausalLM": "its norms are fused across layers, so that no module is given r_N",
    "hrm_text": "its layers run several times for a token, so that r_k has several values",
    "iquestloopcoder": "its layers run several times for a token, so that r_k has several values",
    "kimi_k3": "its layers attend to the states of earlier layers instead of adding to one stream",
    "llada2_moe": "it is a diffusion model: it predicts no next token",
    "olmo3": "SGLang 0.5.23 reads no rope_theta for its layers, so that it computes another model",
    "sdar": "it is a diffusion model: it predicts no next token",
    "sdar_moe": "it is a diffusion model: it predicts no next token",
    "diffusion_gemma": "it is a diffusion model: it predicts no next token",
}
# What these families' own code takes where `config.json` does not say it.
_UNSAID = {
    "deepseek_v4": {"hc_mult": 4},
    "gemma3n_text": {"altup_num_inputs": 4},
    "hy_v4": {"hc_mult": 4},
    "nanbeige": {"num_loops": 2},
    "qwen4_exp_text": {"hc_count": 4},
}
# The same by a part of the model's type or class. Few generative classes are named Model.
_REFUSED_NAMES = (
    (
        r".*Embedding\w*|\w*For\w*(Classification|Reward)\w*|\w*For(MaskedLM|RewardModel)"
        r"|\w*(?<!LMHead)(?<!Chat)(?<!ChatGLM)Model",
        "it has no head that predicts a next token",
    ),
    (
        r"\w*(Diffusion|_diffusion|diffusion_|LLaDA|SDAR|Dream)\w*",
        "it is a diffusion model: it predicts no next token",
    ),
    (
        r"\w*(NextN|MTP|Eagle3?|DFlash\d?|DSpark|Draft|Assistant)(Model|ForCausalLM)?",
        "it is a drafter, which reads another model's states",
    ),
)
# Lists of the kinds of a model's layers, and keys that only models with recurrent layers have.
_LAYER_KINDS = ("layer_types", "layers_block_type")
_RECURRENT_KEYS = (
    *("hybrid_override_pattern", "full_attention_interval", "linear_attn_config", "conv_L_cache"),
    *("linear_num_value_heads", "mamba_d_state", "mamba_n_heads", "ssm_state_size", "mamba_d_ssm"),
)
# SGLang 0.5.23's own capture of these is not r_k: it hands over the layer's output without the
# residual, or the state after another layer. Taps and parity judge them.
OTHER_OWN_CAPTURE = frozenset(("gemma3", "gemma3_text"))
# The family's r_0 is not a multiple of the embedding's row.
_OTHER_EMBEDDINGS = frozenset(
    (
        "bloom",
        "gpt2",
        "gpt_bigcode",
        "inkling_model",
        "muse_glimmer",
        "muse_spark_text",
        "opt",
        "zaya",
    )
)
# Granite and Falcon-H1; MiniCPM; Phi-3-small; TeleFLM.
_EMBEDDING_SCALES = ("embedding_multiplier", "scale_emb", "mup_embedding_multiplier", "input_mult")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a `config.json`."""
    config = config.get(_OUTER_CONFIG) or config
    return next((config[key] for key in _TEXT_CONFIGS if config.get(key)), config)


def with_usual_names(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return a language model's configuration with the usual names beside a family's own.

    GPT-2 calls the number of layers n_layer, for example; Nemotron-H lists the layers' kinds.
    """
    found = dict(text)
    for usual, others in _OTHER_NAMES.items():
        value = next((text[name] for name in others if name in text), None)
        if usual not in text and value is not None:
            found[usual] = len(value) if isinstance(value, list) else value
    return found


def rope_scalings(text: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield how a language model scales its rotary angles; kinds of layers may differ in it."""
    for key in ("rope_scaling", "rope_parameters"):
        found = text.get(key)
        if isinstance(found, Mapping):
            yield found
            yield from (part for part in found.values() if isinstance(part, Mapping))


def rope_type(scaling: Mapping[str, Any]) -> object:
    """Return the name of a scaling of rotary angles; older files call it `type`."""
    return scaling.get("rope_type", scaling.get("type"))


def check_capturable(config: Mapping[str, Any], *, origin: Path) -> None:
    """Refuse a model whose residual stream cannot be captured.

    Args:
        config: the whole `config.json`.
        origin: that file.

    Raises:
        UserError: says what cannot be captured and why.
    """
    text = text_config(config)
    classes = [str(name) for name in config.get("architectures") or []]
    types = [str(part.get("model_type")) for part in (config, text)] + classes
    values = {**_UNSAID.get(str(text.get("model_type")), {}), **text}
    reasons = [reason for kind, reason in REFUSED_TYPES.items() if kind in types]
    reasons += [
        reason
        for names, reason in _REFUSED_NAMES
        if any(re.fullmatch(names, name) for name in types)
    ]
    reasons += [
        reason
        for key, reason in REFUSED_KEYS.items()
        if values.get(key) is True or (values.get(key) or 1) != 1
    ]
    if config.get("is_encoder_decoder") or text.get("is_encoder_decoder"):
        reasons.append("it has an encoder and a decoder, and one drafter reads one residual stream")
    # With an alpha both scale always.
    if any(
        rope_type(each) == "dynamic" and each.get("factor") != 1 and "alpha" not in each
        for each in rope_scalings(text)
    ):
        reasons.append(
            "SGLang scales its rotary angles at every length, the model only beyond the original"
            " one (rope_type dynamic)"
        )
    # EmbeddingGemma has the class and the type of Gemma 3.
    if text.get("use_bidirectional_attention") is True or text.get("is_causal") is False:
        reasons.append("its attention sees later tokens, so that it predicts no next token")
    if reasons:
        kind = text.get("model_type") or next(iter(classes), None)
        raise UserError(
            f"{origin}: {kind} cannot be captured: {reasons[0]}; take another target model"
        )


def check_reusable(config: Mapping[str, Any], *, origin: Path) -> None:
    """Refuse a model whose layers keep more of a prefix than keys and values.

    A radix cache keeps the state of a recurrent layer at few places of a prefix, or not at all.

    Args:
        config: the whole `config.json`.
        origin: that file.

    Raises:
        UserError: names the key that tells it.
    """
    text = text_config(config)
    kinds = {str(kind) for key in _LAYER_KINDS for kind in text.get(key) or ()}
    others = sorted(kind for kind in kinds if "attention" not in kind or "linear" in kind)
    found = [f"layers of the kind {others[0]}"] if others else []
    found += [key for key in _RECURRENT_KEYS if text.get(key)]
    if found:
        raise UserError(
            f"{origin}: {text.get('model_type')} has layers that are not attention ({found[0]}), of"
            " which a cached prefix does not hold all: set capture.reuse_prefixes: false"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormKind:
    """Formula of a final norm.

    Attributes:
        kind: one of `RMS`, `RMS_PLUS_ONE`, `LAYER`, `LAYER_PLUS_ONE`.
        eps: its epsilon.
    """

    kind: str
    eps: float


def has_known_norm(text: Mapping[str, Any]) -> bool:
    """Return whether the formula of a model's final norm is known."""
    return str(text.get("model_type")) in _NORMS


def final_norm(text: Mapping[str, Any], *, origin: Path) -> NormKind:
    """Return the formula of the final norm.

    Args:
        text: the language model's part of `config.json`.
        origin: that file.

    Raises:
        UserError: the family's norm is not known, or its epsilon is missing.
    """
    kind = _NORMS.get(str(text.get("model_type")))
    if kind is None:
        raise UserError(
            f"{origin}: the final norm of model_type {text.get('model_type')!r} is not known:"
            f" expected one of {', '.join(sorted(_NORMS))}; capture the final state as the trainer"
            " reads it (capture.final_norm)"
        )
    eps = next((text[key] for key in _EPSILONS if text.get(key) is not None), None)
    if eps is None:
        raise UserError(
            f"{origin}: expected {_EPSILONS[0]}, the epsilon of the final norm, found no such key:"
            " use config.json as the model's authors published it"
        )
    return NormKind(kind=kind, eps=float(eps))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitForm:
    """What a model makes of the head's product: cap * tanh(scale * product / cap).

    Attributes:
        scale: factor of the product.
        cap: limit of a logit; None for no limit.
    """

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, product: "torch.Tensor") -> "torch.Tensor":
        """Return logits from the head's product."""
        logits = product * self.scale
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap

    def slope(self, logits: "torch.Tensor") -> "torch.Tensor":
        """Return how fast each logit changes with its product."""
        if self.cap is None:
            return logits.new_full(logits.shape, self.scale)
        return self.scale * (1 - (logits / self.cap).square())

    def product(self, logits: "torch.Tensor") -> "torch.Tensor":
        """Return the head's product, from logits."""
        if self.cap is not None:
            logits = (logits / self.cap).clamp(-1 + 1e-7, 1 - 1e-7).atanh() * self.cap
        return logits / self.scale


def logits(text: Mapping[str, Any]) -> LogitForm:
    """Return what the model makes of the head's product.

    Cohere multiplies by logit_scale, Falcon-H1 by lm_head_multiplier, Muse by output_multiplier.
    Granite divides by logits_scaling, TeleFLM by mup_scale_factor. Gemma caps at
    final_logit_softcapping, Muse at output_soft_cap_temp.
    """
    scale = math.prod(float(text.get(key) or 1.0) for key in _LOGIT_FACTORS)
    if text.get("use_mup"):
        scale *= float(text["output_mult"]) / float(text["mup_scale_factor"])
    cap = text.get("final_logit_softcapping") or text.get("output_soft_cap_temp")
    return LogitForm(
        scale=scale / float(text.get("logits_scaling") or 1.0),
        cap=float(cap) if cap and cap > 0 else None,
    )


def final_scale(text: Mapping[str, Any]) -> float:
    """Return the factor between the final norm's output and what the head reads.

    It is MiniCPM's muP, or Inkling's.
    """
    base = text.get("dim_model_base")
    scale = float(base) / float(text["hidden_size"]) if base else 1.0
    return scale / float(text.get("logits_mup_width_multiplier") or 1.0)


def embedding_scale(text: Mapping[str, Any]) -> float | None:
    """Return the factor between the embedding's row and r_0; None where r_0 is no multiple."""
    kind = str(text.get("model_type"))
    if kind in _OTHER_EMBEDDINGS:
        return None
    if kind.startswith("gemma") or text.get("mup_enabled"):
        return math.sqrt(text["hidden_size"])
    named = (text.get(key) for key in _EMBEDDING_SCALES)
    return next((float(scale) for scale in named if scale and scale > 0), 1.0)

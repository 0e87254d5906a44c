"""Differences between model families: names of tensors and modules, kinds of norm, scaled logits.

A family that differs in another way is described here. The reader of a model's folder, the head,
the final norm and the SGLang plug-in name no family.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftstates.errors import UserError

# The key of `config.json` below which a multimodal wrapper holds its language model.
TEXT_CONFIG = "text_config"
# The attribute under which a loaded multimodal wrapper holds its language model.
LANGUAGE_MODEL = "language_model"
# Methods of SGLang's decoder stacks that mark the layers to capture one by one: mixtures of experts
# of the Qwen family have them in place of `layers_to_capture`.
LAYER_SETTERS = ("set_eagle3_layers_to_capture", "set_dflash_layers_to_capture")

HEAD_NAMES = re.compile(r"(.+\.)?lm_head\.weight")
# A multi-token-prediction layer may hold embeddings of its own: these are not the model's.
EMBEDDING_NAMES = re.compile(r"(?!.*\.layers\.)(.+\.)?embed_tokens\.weight")
FINAL_NORM_NAMES = re.compile(r"(model|model\.language_model|language_model\.model)\.norm\.weight")

# Families whose final norm is a plain RMSNorm: weight * x / rms(x). Other norms differ (Gemma adds
# 1 to the weight) and are refused.
PLAIN_RMS_NORM = frozenset(
    (
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "deepseek_v2",
        "deepseek_v3",
        "kimi_k2",
        "gpt_oss",
    )
)
_LOGIT_SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a `config.json`."""
    return config.get(TEXT_CONFIG, config)


def check_plain_norm(text: Mapping[str, Any], *, origin: Path) -> None:
    """Refuse a family whose final norm is not known to be a plain RMSNorm.

    Args:
        text: the language model's part of `config.json`.
        origin: that file.

    Raises:
        UserError: the model_type is not one of `PLAIN_RMS_NORM`, or `rms_norm_eps` is missing.
    """
    if text.get("model_type") not in PLAIN_RMS_NORM:
        raise UserError(
            f"{origin}: the final norm of model_type {text.get('model_type')!r} is not known:"
            f" expected one of {', '.join(sorted(PLAIN_RMS_NORM))}; capture the final state as the"
            " trainer reads it (capture.final_norm)"
        )
    if "rms_norm_eps" not in text:
        raise UserError(
            f"{origin}: expected rms_norm_eps, the epsilon of the final norm, found no such key:"
            " use config.json as the model's authors published it"
        )


def check_plain_logits(text: Mapping[str, Any], *, origin: Path) -> None:
    """Refuse a family that scales or caps its logits: the alignment check does not compute that.

    Args:
        text: the language model's part of `config.json`.
        origin: that file.

    Raises:
        UserError: names the scale.
    """
    for scale in _LOGIT_SCALES:
        if text.get(scale) not in (None, 1, 1.0):
            raise UserError(
                f"{origin}: alignment cannot be checked: expected logits as lm_head gives them,"
                f" found {scale}: {text[scale]}; capture another model"
            )

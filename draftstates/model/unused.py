"""Names of tensors that no hidden state depends on: a server or a forward pass may leave them out.

Everything else in a checkpoint must be read, and everything else in a loaded model filled.
"""

import re
from collections.abc import Mapping
from typing import Any

_REASONS = (
    # Older checkpoints hold what is computed from the configuration.
    (
        "rotary cache",
        r"(^|\.)(rotary_emb|rotary_pos_emb|rope)\.(\w+_)?(inv_freq|cos_cached|sin_cached)$",
    ),
    ("attention mask", r"(^|\.)attn\.(masked_)?bias$|(^|\.)attention\.(masked_)?bias$"),
    ("draft layers", r"(^|\.)(mtp|eagle|nextn|model_mtp|mtp_block)\w*\."),
)
_KV_SCALE = re.compile(r"(^|\.)([kv]|kv|[kv]_proj\.[kv]|[kv]_proj\.output)_scale$")
_OTHER_MODALITY = re.compile(
    r"(^|\.)(vision|visual|image|audio|speech|video|vit|vq|siglip|aligner|connector"
    r"|mm_projector|multi_modal_projector|embed_vision|embed_audio|patch_merger)\w*\."
)
# Of a quantised layer: the order of its columns, which older checkpoints permute, and what the
# engine makes of it; and the scales of numbers that the engine itself rounds.
_ORDER, _MADE_ORDER = "g_idx", "g_idx_sort_indices"
_NUMBERS_SCALE = re.compile(r"(^|[._])(weight|input)_scale(_inv|_2)?$")
# The first list of layers in a name: what stands after it is a part of a layer.
_LIST = re.compile(r"(^|\.)(layers?|h|blocks?)\.\d+\.")
_DRAFTING = re.compile(r"nextn|mtp")
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
_HEAD = re.compile(r"(^|\.)lm_head\.\w+$")


def is_kv_scale(name: str) -> bool:
    """Return whether a tensor is a scale of the KV cache."""
    return _KV_SCALE.search(name) is not None


def _drafting(text: Mapping[str, Any]) -> int:
    """Return how many layers behind the last one predict further tokens, by the configuration."""
    named = (value for key, value in text.items() if _DRAFTING.search(key))
    return max((value for value in named if type(value) is int), default=0)


def is_made(name: str, *, ordered: bool, quantised: bool) -> bool:
    """Return whether the engine makes a parameter after loading, where no tensor fills it.

    Args:
        name: the parameter's name in the loaded model.
        ordered: whether the checkpoint permutes columns of quantised layers.
        quantised: whether the checkpoint is quantised.
    """
    if name.endswith(_ORDER):
        return not ordered
    return name.endswith(_MADE_ORDER) or (not quantised and bool(_NUMBERS_SCALE.search(name)))


def why_unused(
    name: str, *, text: Mapping[str, Any], tied: bool, scaled_cache: bool = False
) -> str | None:
    """Return why no state depends on a tensor, or None where one does.

    Args:
        name: the tensor's name in the checkpoint, or the parameter's in the loaded model.
        text: the language model's part of `config.json`.
        tied: whether the head is the embeddings.
        scaled_cache: whether the KV cache is held in a number format that needs scales.
    """
    if tied and _HEAD.search(name):
        return "tied head"
    layers = text.get("num_hidden_layers")
    number = _LAYER.search(name)
    if layers and number and 0 <= int(number[2]) - layers < _drafting(text):
        return "draft layers"
    if is_kv_scale(name) and not scaled_cache:
        return "scale of the KV cache"
    # A decoder layer may have parts for another modality, and compute with them.
    first = _LIST.search(name)
    if _OTHER_MODALITY.search(name[: first.end()] if first else name):
        return "other modality"
    return next((reason for reason, pattern in _REASONS if re.search(pattern, name)), None)

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
    # Scales of the KV cache, which is held in the compute dtype.
    ("scale of the KV cache", r"(^|\.)([kv]|kv|[kv]_proj\.[kv]|[kv]_proj\.output)_scale$"),
    ("draft layers", r"(^|\.)(mtp|eagle|nextn|model_mtp|mtp_block)\w*\."),
    (
        "other modality",
        r"(^|\.)(vision|visual|image|audio|speech|video|vit|vq|siglip|aligner|connector"
        r"|mm_projector|multi_modal_projector|embed_vision|embed_audio|patch_merger)\w*\.",
    ),
)
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
_HEAD = re.compile(r"(^|\.)lm_head\.\w+$")


def why_unused(name: str, *, text: Mapping[str, Any], tied: bool) -> str | None:
    """Return why no state depends on a tensor, or None where one does.

    Args:
        name: the tensor's name in the checkpoint, or the parameter's in the loaded model.
        text: the language model's part of `config.json`.
        tied: whether the head is the embeddings.
    """
    if tied and _HEAD.search(name):
        return "tied head"
    layers = text.get("num_hidden_layers")
    number = _LAYER.search(name)
    if layers and number and int(number[2]) >= layers:
        return "draft layers"
    return next((reason for reason, pattern in _REASONS if re.search(pattern, name)), None)

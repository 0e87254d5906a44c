"""Renderers of the package `renderers`: which one a model needs, and one made without a network.

The package renders conversations of models whose tokenizers carry no template, or none that can be
used. Its masks are not used: they show earlier turns as history, not as the model wrote them.
"""

import datetime
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftstates.errors import UserError
from draftstates.model.folder import ModelFolder
from draftstates.tokens.encoder import Encoder
from draftstates.tokens.rendering import DeepseekV32Rendering, LibraryRendering, Rendering

DEEPSEEK_V32 = "deepseek-v3.2"
# The renderers that models of a `model_type` need. Where there are several, templates differ within
# the type, and `auto` cannot know which one the model was trained with.
_FOR_TYPE = {
    "deepseek_v3": (DEEPSEEK_V32, "deepseek-v3", "deepseek-r1"),
    "deepseek_v32": (DEEPSEEK_V32,),
    "deepseek_v4": ("deepseek-v4",),
    "gemma4": ("gemma4",),
    "gemma4_text": ("gemma4",),
    "glm4_moe": ("glm-4.5", "glm-5"),
    "glm4_moe_lite": ("glm-5",),
    "glm_moe_dsa": ("glm-5", "glm-5.1", "glm-5.3"),
    "gpt_oss": ("gpt-oss",),
    "hy_v3": ("hy3",),
    "kimi_k2": ("kimi-k2",),
    "kimi_k25": ("kimi-k2.5",),
    "laguna": ("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"),
    "minimax_m2": ("minimax-m2",),
    "nemotron_h": ("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
    "qwen3": ("qwen3",),
    "qwen3_5": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "qwen3_5_moe": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "qwen3_vl": ("qwen3-vl",),
    "qwen3_vl_moe": ("qwen3-vl",),
}


def renderers_for(folder: Path) -> tuple[str, ...]:
    """Return the names of the renderers that a model may need, by its `model_type`."""
    model = ModelFolder(folder)
    if not model.exists():
        return ()
    kinds = (model.config.get("model_type"), model.model_type)
    return next((_FOR_TYPE[kind] for kind in kinds if kind in _FOR_TYPE), ())


def load_renderer(
    name: str,
    *,
    folder: Path,
    tokenizer: Any,
    encoder: Encoder,
    arguments: Mapping[str, Any],
    today: datetime.date,
) -> Rendering:
    """Return a renderer for a model's tokenizer.

    Args:
        name: name of the renderer, as `data.renderer` has it.
        folder: folder of the tokenizer, for messages.
        tokenizer: the tokenizer.
        encoder: the tokenizer's encoder.
        arguments: `data.template_arguments`.
        today: the date for renderers that write today's.

    Raises:
        UserError: the renderer does not take the arguments, or the tokenizer lacks its marks.
    """
    if name == DEEPSEEK_V32:
        return _deepseek_v32(encoder, arguments)
    if name == "gpt-oss":
        # it would also download a vocabulary
        raise UserError(
            "data.renderer: gpt-oss: this renderer opens a thought in the prompt, which the server"
            " leaves to the model: put the model's chat_template.jinja beside its tokenizer, or"
            " name it with data.chat_template, and use data.renderer: template"
        )
    from renderers import base, configs

    settings = configs.config_from_name(name)
    dates = {"llama-3": {"date_string": today.strftime("%d %b %Y")}}
    try:
        given = {**dates.get(name, {}), **arguments}
        settings = base.merge_chat_template_kwargs(settings, given)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"data.template_arguments: the renderer {name} does not take them: {error}"
        ) from None
    try:
        renderer = base.create_renderer(tokenizer, settings)
    except Exception as error:
        # a renderer looks its marks up in its own ways, with assertions among them
        raise UserError(
            f"data.renderer: {name}: {folder} has another tokenizer than this renderer needs"
            f" ({type(error).__name__}: {error}): name another renderer, or template"
        ) from None
    version = importlib.metadata.version("renderers")
    return LibraryRendering(
        renderer,
        tokenizer,
        name=f"{name} of renderers {version}",
        origin=f"data.renderer: {name}",
    )


def _deepseek_v32(encoder: Encoder, arguments: Mapping[str, Any]) -> Rendering:
    known = ("thinking", "enable_thinking")
    if unknown := sorted(set(arguments) - set(known)):
        raise UserError(
            f"data.template_arguments: the renderer {DEEPSEEK_V32} takes {' or '.join(known)},"
            f" found {', '.join(unknown)}"
        )
    return DeepseekV32Rendering(encoder, thinking=any(arguments.get(name) for name in known))

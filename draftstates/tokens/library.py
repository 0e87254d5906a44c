"""Renderers of the package `renderers`: which one a model needs, and one made without a network.

The package renders conversations of models whose tokenizers carry no template, or none that can be
used. Its masks are not used: they show earlier turns as history, not as the model wrote them.
"""

import base64
import contextlib
import datetime
import hashlib
import importlib.metadata
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from draftstates.errors import UserError
from draftstates.model.folder import ModelFolder
from draftstates.tokens.encoder import Encoder, byte_marks
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
# openai_harmony reads its vocabulary from a file of this name in the folder that the variable names
_HARMONY_VARIABLE, _HARMONY_FILE = "TIKTOKEN_ENCODINGS_BASE", "o200k_base.tiktoken"
_HARMONY_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"


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
    from renderers import base, configs

    settings = configs.config_from_name(name)
    dates = {
        "gpt-oss": {"conversation_start_date": today.isoformat()},
        "llama-3": {"date_string": today.strftime("%d %b %Y")},
    }
    try:
        given = {**dates.get(name, {}), **arguments}
        settings = base.merge_chat_template_kwargs(settings, given)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"data.template_arguments: the renderer {name} does not take them: {error}"
        ) from None
    vocabulary = _harmony_vocabulary(folder, tokenizer) if name == "gpt-oss" else nullcontext()
    try:
        with vocabulary:
            renderer = base.create_renderer(tokenizer, settings)
    except UserError:
        raise
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


@contextlib.contextmanager
def _harmony_vocabulary(folder: Path, tokenizer: Any) -> Iterator[None]:
    """Give openai_harmony its vocabulary, made from the tokenizer's own file.

    It would download the vocabulary otherwise. A folder that the user names is left alone.

    Raises:
        UserError: the tokenizer holds another vocabulary.
    """
    if _HARMONY_VARIABLE in os.environ:
        yield
        return
    content = _tiktoken_file(tokenizer)
    if hashlib.sha256(content).hexdigest() != _HARMONY_SHA256:
        raise UserError(
            f"data.renderer: gpt-oss: {folder} holds another vocabulary than gpt-oss: use"
            " data.renderer: template"
        )
    with tempfile.TemporaryDirectory(prefix="draftstates.") as scratch:
        (Path(scratch) / _HARMONY_FILE).write_bytes(content)
        os.environ[_HARMONY_VARIABLE] = scratch
        try:
            yield
        finally:
            del os.environ[_HARMONY_VARIABLE]


def _tiktoken_file(tokenizer: Any) -> bytes:
    """Return a byte-level BPE vocabulary as tiktoken writes it: a token in base64 and its rank."""
    byte_of = {mark: byte for byte, mark in byte_marks().items()}
    added = set(tokenizer.added_tokens_decoder)
    plain = sorted(
        (number, token) for token, number in tokenizer.get_vocab().items() if number not in added
    )
    return b"".join(
        base64.b64encode(bytes(byte_of[mark] for mark in token)) + f" {rank}\n".encode()
        for rank, token in plain
    )

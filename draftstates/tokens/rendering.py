"""Renderings: what turns a conversation into ids, and which one a model needs.

A chat template writes text, which the encoder turns into ids. A renderer of the package `renderers`
writes ids, for models whose tokenizers carry no template or none that can be used. Its masks are
not used: they show earlier turns as history, not as the model wrote them. All are held to the same
checks, see `template.py`.
"""

import abc
import dataclasses
import datetime
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from draftstates.errors import UserError
from draftstates.model.folder import ModelFolder
from draftstates.tokens import deepseek_v32
from draftstates.tokens.encoder import Encoder
from draftstates.tokens.rows import RowSkipped

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


@dataclasses.dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation.

    Attributes:
        text: the conversation as text, marks included.
        ids: int32 [T].
    """

    text: str
    ids: np.ndarray


class Rendering(abc.ABC):
    """A way from messages to ids.

    Attributes:
        name: the way, for people and for the accounting.
        origin: where it comes from, for messages.
        end_ids: tokens that it says end a turn.
    """

    name: str
    origin: str
    end_ids: frozenset[int]
    # of those that render text
    _encoder: Encoder

    @abc.abstractmethod
    def text(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        prompt: bool = False,
    ) -> str:
        """Return the conversation as text.

        Args:
            messages: messages of the conversation.
            tools: tools that are offered to the model.
            prompt: whether to add the generation prompt, at which the model would begin its turn.

        Raises:
            RowSkipped: `template_error`: the messages are refused; `bad_text`: lone surrogates.
        """

    def rendered(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        prompt: bool = False,
    ) -> Rendered:
        """Return the conversation as text and ids; otherwise as `text`."""
        return encoded(self.text(messages, tools=tools, prompt=prompt), self._encoder)


class TemplateRendering(Rendering):
    """A Jinja template, rendered as the server renders it."""

    def __init__(
        self,
        tokenizer: Any,
        encoder: Encoder,
        *,
        origin: str,
        template: str | None,
        arguments: Mapping[str, Any],
    ) -> None:
        self.name, self.origin, self.end_ids = "template", origin, frozenset()
        self._tokenizer, self._encoder = tokenizer, encoder
        self._arguments = {**arguments, "chat_template": template}

    def text(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        prompt: bool = False,
    ) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                add_generation_prompt=prompt,
                tokenize=False,
                **self._arguments,
            )
        except Exception as error:
            # a template is a program of its own: any error of it is the row's fault
            raise RowSkipped("template_error", f"{type(error).__name__}: {error}") from None

    def tokenizers_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        """Return the ids that the tokenizer itself gives for a conversation, without a prompt."""
        return list(self._tokenizer.apply_chat_template(messages, **self._arguments)["input_ids"])


class DeepseekV32Rendering(Rendering):
    """DeepSeek-V3.2's own encoding, which its tokenizer does not carry as a template."""

    def __init__(self, encoder: Encoder, *, thinking: bool) -> None:
        self.name, self.end_ids = "deepseek-v3.2", frozenset()
        self.origin = "data.renderer: deepseek-v3.2"
        self._encoder, self._thinking = encoder, thinking

    def text(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        prompt: bool = False,
    ) -> str:
        try:
            return deepseek_v32.render(messages, tools=tools, thinking=self._thinking)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RowSkipped("template_error", f"{type(error).__name__}: {error}") from None


class LibraryRendering(Rendering):
    """A renderer of the package `renderers`."""

    def __init__(self, renderer: Any, tokenizer: Any, *, name: str, origin: str) -> None:
        self.name, self.origin = name, origin
        self.end_ids = frozenset(renderer.get_stop_token_ids())
        self.renderer, self._tokenizer = renderer, tokenizer

    def text(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        prompt: bool = False,
    ) -> str:
        return self.rendered(messages, tools=tools, prompt=prompt).text

    def rendered(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        prompt: bool = False,
    ) -> Rendered:
        try:
            ids = self.renderer.render_ids(messages, tools=tools, add_generation_prompt=prompt)
            text = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        except Exception as error:
            # the library raises errors of any kind for messages that it does not take
            _check_text(messages)
            raise RowSkipped("template_error", f"{type(error).__name__}: {error}") from None
        return Rendered(text, np.array(ids, dtype=np.int32))


def encoded(text: str, encoder: Encoder) -> Rendered:
    """Return rendered text with its ids.

    The template has written every special token, so the tokenizer adds no token.

    Raises:
        RowSkipped: `bad_text`: the text has lone surrogates.
    """
    try:
        return Rendered(text, encoder.encode(text))
    except UnicodeEncodeError as error:
        raise RowSkipped("bad_text", str(error)) from None


def _check_text(value: Any) -> None:
    """Refuse lone surrogates anywhere in messages."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RowSkipped("bad_text", str(error)) from None
    if isinstance(value, dict):
        value = list(value.values())
    for part in value if isinstance(value, list) else ():
        _check_text(part)


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

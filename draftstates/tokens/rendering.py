"""Renderings: what turns a conversation into ids.

A chat template writes text, which the encoder turns into ids. A renderer of the package `renderers`
writes ids. Both are held to the same checks, see `template.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from draftstates.tokens import deepseek_v32
from draftstates.tokens.encoder import Encoder
from draftstates.tokens.rows import RowSkipped


@dataclasses.dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation.

    Attributes:
        text: the conversation as text, marks included.
        ids: int32 [T].
    """

    text: str
    ids: np.ndarray


class Rendering(Protocol):
    """A way from messages to ids.

    Attributes:
        name: the way, for people and for the accounting.
        origin: where it comes from, for messages.
        end_ids: tokens that it says end a turn.
    """

    name: str
    origin: str
    end_ids: frozenset[int]

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


class TemplateRendering:
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

    def rendered(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        prompt: bool = False,
    ) -> Rendered:
        return encoded(self.text(messages, tools=tools, prompt=prompt), self._encoder)

    def tokenizers_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        """Return the ids that the tokenizer itself gives for a conversation, without a prompt."""
        return list(self._tokenizer.apply_chat_template(messages, **self._arguments)["input_ids"])


class DeepseekV32Rendering:
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

    def rendered(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        prompt: bool = False,
    ) -> Rendered:
        return encoded(self.text(messages, tools=tools, prompt=prompt), self._encoder)


class LibraryRendering:
    """A renderer of the package `renderers`."""

    def __init__(self, renderer: Any, tokenizer: Any, *, name: str, origin: str) -> None:
        self.name, self.origin = name, origin
        self.end_ids = frozenset(renderer.get_stop_token_ids())
        self._renderer, self._tokenizer = renderer, tokenizer

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
            ids = self._renderer.render_ids(messages, tools=tools, add_generation_prompt=prompt)
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

"""A model's chat format: tokenizer and rendering, chosen and checked; exact tokenising.

`auto` renders with the tokenizer's template where the template passes the checks, as the server
does. Otherwise it takes the renderer that the model's type needs.
"""

import copy
import datetime
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftstates.config import TEMPLATE_DATE
from draftstates.errors import UserError
from draftstates.model.folder import ModelFolder
from draftstates.tokens.content import MARK, renamed, tools_are_quoted
from draftstates.tokens.conversations import Conversation
from draftstates.tokens.encoder import encoder_for, load_tokenizer
from draftstates.tokens.forms import find_forms
from draftstates.tokens.rendering import (
    Rendering,
    TemplateRendering,
    encoded,
    load_renderer,
    renderers_for,
)
from draftstates.tokens.rows import RowSkipped
from draftstates.tokens.sources import read_template
from draftstates.tokens.turn_bounds import (
    ANSWERS,
    find_opener,
    find_prefill,
    find_turn_ends,
)
from draftstates.tokens.turn_marks import find_turn_marks

_USER = {"role": "user", "content": "Hi"}

# most characters that a tokenizer's normalisation joins to one
_JOINED = 4


class ChatTemplate:
    """The chat template, or renderer, and the tokenizer in a folder.

    Attributes:
        chat_template: Jinja text that replaces the tokenizer's template; None replaces nothing.
        name: what renders: `template`, or the renderer's name and version.
        why: why `auto` took a renderer; empty otherwise.
        rendering: what turns messages into text and ids.
        ends: how a turn ends.
        end_marks: the end tokens as text, where text is split at them.
        closing_text: text that is put after an assistant's text.
        forms: what of a message is rendered, and in which form.
        prefill: what a generation prompt adds and history lacks; usually nothing.
        opener: the start of a thought that ends the generation prompt, where the template shows no
            thought itself; usually empty.
        turn_marks: the marks by which it opens turns, which no row's text may begin with.
        added_ids: the vocabulary's marks; text is split at these first.
        most_characters: characters of text that a token stands for, at most.
    """

    def __init__(
        self,
        folder: Path,
        *,
        chat_template: Path | None = None,
        renderer: str = "auto",
        arguments: Mapping[str, Any] | None = None,
        end_tokens: Sequence[str] = (),
        today: datetime.date = TEMPLATE_DATE,
        trust_remote_code: bool = False,
    ) -> None:
        self.folder = folder
        self.tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
        named, for_tools = self.tokenizer.chat_template, None
        if chat_template:
            self.chat_template = read_template(chat_template)
        elif isinstance(named, dict):
            self.chat_template, for_tools = named.get("default"), named.get("tool_use")
        else:
            self.chat_template = None
        self.most_characters = _JOINED * max(map(len, self.tokenizer.get_vocab()))
        added = self.tokenizer.added_tokens_decoder
        self.added_ids = frozenset(added)
        self._marks = [token.content for token in added.values()]
        self._origin = f"data.chat_template: {chat_template}" if chat_template else str(folder)
        self._named_template = chat_template
        self._today = today
        self._encoder = encoder_for(self.tokenizer)
        vocabulary = self.tokenizer.get_vocab()
        if unknown := [token for token in end_tokens if token not in vocabulary]:
            raise UserError(f"data.end_tokens: not in the vocabulary: {', '.join(unknown)}")
        # those that the model's own files name; a turn's need not be the end-of-text token
        own = {*ModelFolder(folder).end_ids, self.tokenizer.eos_token_id} - {None}
        self._named_ends = {vocabulary[token] for token in end_tokens} | own
        self._arguments = dict(arguments or {})
        self.why = ""
        if renderer == "auto":
            self._choose()
        else:
            self._use(renderer)
        self._for_tools = self._another(for_tools) if for_tools else None

    def with_arguments(self, arguments: Mapping[str, Any]) -> "ChatTemplate":
        """Return this template with more arguments, for a row that brings its own.

        Raises:
            RowSkipped: `template_error`: the template cannot be used with them.
        """
        other = copy.copy(self)
        other._arguments = {**self._arguments, **arguments}
        try:
            other._use(self._chosen)
            if self._for_tools is not None:
                other._for_tools = self._for_tools.with_arguments(arguments)
        except UserError as error:
            raise RowSkipped("template_error", f"with the row's arguments: {error}") from None
        return other

    def variant(self, conversation: Conversation) -> "ChatTemplate":
        """Return the template for a conversation: of two, the one that shows its tool calls."""
        other = self._for_tools
        if other is None or "tool calls" in other.forms.ignored:
            return self
        uses_tools = conversation.tools or any(
            message["role"] == "tool" or message.get("tool_calls")
            for message in conversation.messages
        )
        return other if uses_tools else self

    @property
    def reasoning_key(self) -> str | None:
        """The key of a message under which reasoning is read; None where none is read."""
        answer, calls = self.forms.reasoning
        return answer or calls

    def unread(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return the names of arguments that the template does not read."""
        if not isinstance(self.rendering, TemplateRendering):
            # a renderer refuses them
            return []
        text = self.chat_template or self.tokenizer.chat_template
        return [name for name in arguments if not re.search(rf"\b{re.escape(name)}\b", text)]

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of rendered text, int32 [T].

        Raises:
            RowSkipped: `bad_text`: the text has lone surrogates.
        """
        return encoded(text, self._encoder).ids

    def prepared(
        self,
        conversation: Conversation,
        *,
        may_drop: frozenset[str] = frozenset(),
        not_used: set[str] | None = None,
    ) -> list[dict[str, Any]]:
        """Return the messages as the template takes them.

        Reasoning lies under the template's key, calls have the template's form. Where the template
        takes only text, a list of parts becomes one text. An answer does not end in an end token,
        which the template adds.

        Args:
            conversation: the conversation.
            may_drop: kinds of content that are dropped where the template does not show them.
            not_used: names of what is dropped are added.

        Raises:
            RowSkipped: `not_rendered`: the template would leave out a role, reasoning, the tools
                or the tool calls; `bad_message`: a message is rendered already.
        """
        messages = [
            self._without_marks(message, index in conversation.open_turns)
            for index, message in enumerate(conversation.messages)
        ]
        for index, message in enumerate(messages):
            self.turn_marks.check(message, index)
        lost = self.forms.lost(messages)
        if "reasoning" in may_drop and (dropped := {kind for kind in lost if "reasoning" in kind}):
            lost -= dropped
            (not_used if not_used is not None else set()).update(dropped)
        if lost:
            names = tuple(sorted(lost))
            raise RowSkipped("not_rendered", f"{self._what} ignores {', '.join(names)}", names)
        return [self.forms.formed(message) for message in messages]

    def shows_tools(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> bool:
        """Return whether the template shows the tools before a turn, or the messages quote them.

        Args:
            messages: the messages before the first turn.
            tools: the tools of the conversation.
        """
        try:
            text = self.rendering.text(
                messages, tools=[renamed(tool) for tool in tools], prompt=True
            )
        except RowSkipped:
            # the row's own rendering says why
            return True
        return MARK in text or tools_are_quoted(tools, messages)

    def _without_marks(self, message: dict[str, Any], is_open: bool) -> dict[str, Any]:
        """Return a message without the end tokens that its text ends in."""
        content = message["content"]
        if isinstance(content, list) and len(content) == 1:
            content = content[0]["text"]
        if message["role"] != "assistant" or not isinstance(content, str):
            return message
        ended = content.rstrip()
        while ended.endswith(self.end_marks):
            mark = next(mark for mark in self.end_marks if ended.endswith(mark))
            content = ended = ended.removesuffix(mark)
            ended = ended.rstrip()
            message = {**message, "content": content}
        if is_open and self.reasoning_key and "</think>" not in content:
            before, opened, thought = content.partition("<think>")
            if opened and not before.strip() and not message.get("reasoning_content"):
                # cut within the thought
                message = {**message, "content": "", "reasoning_content": thought}
        return message

    # ---- The choice of what renders ------------------------------------------------------------

    def _choose(self) -> None:
        """Use the template where it passes the checks, else the renderer of the model's type."""
        try:
            self._use("template")
            return
        except UserError as error:
            refused = error
        names = renderers_for(self.folder)
        # a template that the user names is meant to be used
        if self._named_template or not names:
            raise refused
        if len(names) > 1:
            raise UserError(
                f"{refused}; models of this type use different formats: say which with"
                f" data.renderer: {' or '.join(names)}"
            )
        try:
            self._use(names[0])
        except UserError as error:
            raise UserError(f"{refused}; {error}") from None
        self.why = str(refused)

    def _another(self, chat_template: str) -> "ChatTemplate | None":
        """Return the same tokenizer with another template, or None where that cannot be used."""
        if self._chosen != "template":
            return None
        other = copy.copy(self)
        other.chat_template = chat_template
        other._for_tools = None
        try:
            other._use("template")
        except UserError:
            return None
        return other

    def _use(self, name: str) -> None:
        """Render with the template or the named renderer from now on, if it passes the checks."""
        self._chosen = name
        self.rendering = self._template() if name == "template" else self._renderer(name)
        self.name = self.rendering.name
        self._what = "the chat template" if name == "template" else f"the renderer {name}"
        self.forms = find_forms(self.rendering.text)
        self.ends = find_turn_ends(
            lambda messages: self.rendering.rendered(messages).ids,
            calls=self.forms.calling(),
            named=self._named_ends | self.rendering.end_ids,
            tokenizer=self.tokenizer,
            origin=self.rendering.origin,
        )
        self.end_marks = tuple(
            self.tokenizer.convert_ids_to_tokens(token)
            for token in sorted(self.ends.ids & self.added_ids)
        )
        turns = [
            self.rendering.text([_USER, {"role": "assistant", "content": answer}])
            for answer in ANSWERS
        ]
        self.closing_text = os.path.commonprefix([text[::-1] for text in turns])[::-1]
        # a template that shows thoughts shows them behind what its prompt opens
        self.opener = "" if any(self.forms.reasoning) else find_opener(self.rendering.text)
        if self.opener:
            self.forms = self.forms.with_thoughts()
        self.prefill = find_prefill(self.rendering.text, marks=self._marks)
        self.turn_marks = find_turn_marks(
            self.rendering.text, marks=self._marks, ends=self.end_marks, prefill=self.prefill
        )
        if isinstance(self.rendering, TemplateRendering):
            self._check_round_trip(self.rendering)

    def _template(self) -> TemplateRendering:
        named = self.tokenizer.chat_template
        if not (self.chat_template or (named and not isinstance(named, dict))):
            found = f"none named default but {', '.join(named)}" if named else "no chat template"
            raise UserError(
                f"{self.folder}: the tokenizer has {found}; name one with data.chat_template, or a"
                " renderer with data.renderer"
            )
        return TemplateRendering(
            self.tokenizer,
            self._encoder,
            origin=self._origin,
            template=self.chat_template,
            arguments={"strftime_now": self._today.strftime, **self._arguments},
        )

    def _renderer(self, name: str) -> Rendering:
        if self._named_template:
            raise UserError(
                f"{self._origin}: the renderer {name} needs no template: leave out this key or"
                " data.renderer"
            )
        return load_renderer(
            name,
            folder=self.folder,
            tokenizer=self.tokenizer,
            encoder=self._encoder,
            arguments=self._arguments,
            today=self._today,
        )

    def _check_round_trip(self, rendering: TemplateRendering) -> None:
        """Refuse a tokenizer that gives a conversation other ids than its rendered text.

        Some tokenizers (Mistral's own) have marks that no text represents. The server does not get
        the ids of their rendered text.
        """
        messages = [_USER, {"role": "assistant", "content": "Yes"}]
        if self.rendering.rendered(messages).ids.tolist() != rendering.tokenizers_ids(messages):
            raise UserError(
                f"{self.folder}: this tokenizer gives a rendered conversation other ids than its"
                " text; it is not supported"
            )

"""A model's chat template and tokenizer: rendering, exact tokenising, the end of a turn."""

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
from draftstates.tokens.messages import REASONING_KEYS
from draftstates.tokens.options import read_template
from draftstates.tokens.rows import RowSkipped

# the ids that turns with these answers have in common at their end are the template's
_ANSWERS = (
    "Yes",
    "two words.",
    "x=1",
    "Ω9",
)
_TAGS = re.compile(rf"(<[^<>\s]+>)\s*{MARK}\s*(</[^<>\s]+>)")
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {}},
    },
}


class ChatTemplate:
    """The chat template and tokenizer in a folder.

    Attributes:
        chat_template: Jinja text that replaces the tokenizer's template; None replaces nothing.
        end_ids: tokens that end an assistant turn; the end token is supervised.
        tail: tokens that the template puts after the end token (ChatML's newline); they are not
            supervised.
        closing: all tokens that the template puts after an assistant's text, end token and tail
            included.
        closing_text: the text of these tokens.
        end_marks: the end tokens as text, where text is split at them.
        reasoning_key: the key of a message under which the template reads reasoning; None where it
            reads none.
        added_ids: the vocabulary's marks; text is split at these first.
    """

    def __init__(
        self,
        folder: Path,
        *,
        chat_template: Path | None = None,
        arguments: Mapping[str, Any] | None = None,
        end_tokens: Sequence[str] = (),
        today: datetime.date = TEMPLATE_DATE,
        trust_remote_code: bool = False,
    ) -> None:
        self.tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
        named = self.tokenizer.chat_template
        for_tools = None
        if chat_template:
            self.chat_template = read_template(chat_template)
        elif isinstance(named, dict):
            self.chat_template, for_tools = named.get("default"), named.get("tool_use")
        else:
            self.chat_template = None
        if not (self.chat_template or (named and not isinstance(named, dict))):
            found = f"none named default but {', '.join(named)}" if named else "no chat template"
            raise UserError(
                f"{folder}: the tokenizer has {found}; name one with data.chat_template"
            )
        self.folder = folder
        self._origin = f"data.chat_template: {chat_template}" if chat_template else str(folder)
        self._arguments = {"strftime_now": today.strftime, **(arguments or {})}
        self._encoder = encoder_for(self.tokenizer)
        self.vocabulary_size = len(self.tokenizer)
        self.added_ids = frozenset(self.tokenizer.added_tokens_decoder)
        self._named_ends = _ids_of(end_tokens, self.tokenizer) | _model_end_ids(
            folder, self.tokenizer
        )
        self._examine()
        self._for_tools = self._another(for_tools) if for_tools else None

    def _examine(self) -> None:
        """Find out what the template puts around a turn, and what it leaves out."""
        self.closing, self.closing_text = self._find_closing()
        self._check_round_trip()
        self.end_ids, self.tail = self._find_turn_end(self._named_ends)
        self.end_marks = tuple(
            self.tokenizer.convert_ids_to_tokens(token)
            for token in sorted(self.end_ids & self.added_ids)
        )
        self.takes_parts = self._takes_parts()
        self.reasoning_key = self._find_reasoning_key()
        self._ignored = self._find_ignored()
        self._result_tags = self._find_result_tags()

    def _another(self, chat_template: str) -> "ChatTemplate | None":
        """Return the same tokenizer with another template, or None where that cannot be used."""
        other = copy.copy(self)
        other.chat_template = chat_template
        try:
            other._examine()
        except UserError:
            return None
        return other

    def variant(self, conversation: Conversation) -> "ChatTemplate":
        """Return the template for a conversation: of two, the one that shows its tool calls."""
        other = getattr(self, "_for_tools", None)
        if other is None or "tool calls" in other._ignored:
            return self
        uses_tools = conversation.tools or any(
            message["role"] == "tool" or message.get("tool_calls")
            for message in conversation.messages
        )
        return other if uses_tools else self

    def render(
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
            RowSkipped: `template_error`: the template refuses the messages.
        """
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self.chat_template,
                add_generation_prompt=prompt,
                tokenize=False,
                **self._arguments,
            )
        except Exception as error:
            # a template is a program of its own: any error of it is the row's fault
            raise RowSkipped("template_error", f"{type(error).__name__}: {error}") from None

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of rendered text, int32 [T].

        The template has written every special token, so the tokenizer adds no token.

        Raises:
            RowSkipped: `bad_text`: the text has lone surrogates.
        """
        try:
            return self._encoder.encode(text)
        except UnicodeEncodeError as error:
            raise RowSkipped("bad_text", str(error)) from None

    def turn_end(self, turn: np.ndarray) -> int:
        """Return the number of tokens of an assistant turn up to and including its end token.

        Args:
            turn: ids from the generation prompt's end to the end of the rendering, int32 [T].

        Raises:
            RowSkipped: `no_turn_end`: the turn does not end in an end token and the tail.
        """
        end = len(turn) - len(self.tail)
        if (
            end < 1
            or turn[end - 1] not in self.end_ids
            or not np.array_equal(turn[end:], self.tail)
        ):
            expected = ", ".join(self.tokenizer.convert_ids_to_tokens(sorted(self.end_ids)))
            found = self.tokenizer.convert_ids_to_tokens(turn[-4:].tolist())
            raise RowSkipped(
                "no_turn_end",
                f"expected one of {expected} and then {len(self.tail)} more tokens, found a turn"
                f" that ends in {found}",
            )
        return end

    def prepared(
        self,
        conversation: Conversation,
        *,
        may_drop: frozenset[str] = frozenset(),
        not_used: set[str] | None = None,
    ) -> list[dict[str, Any]]:
        """Return the messages as the template takes them.

        Reasoning lies under the template's key. Where the template takes only text, a list of parts
        becomes one text. An answer does not end in an end token, which the template adds.

        Args:
            conversation: the conversation.
            may_drop: kinds of content that are dropped where the template does not show them.
            not_used: names of what is dropped are added.

        Raises:
            RowSkipped: `not_rendered`: the template would leave out a role, reasoning, the tools
                or the tool calls.
        """
        messages = [
            self._as_taken(message, index in conversation.open_turns)
            for index, message in enumerate(conversation.messages)
        ]
        present = {message["role"] for message in messages}
        for message in messages:
            if message.get("tool_calls"):
                present.add("tool calls")
                if message["content"]:
                    present.add("text beside tool calls")
                if message.get("reasoning_content"):
                    present.add("reasoning beside tool calls")
            if message.get("reasoning_content"):
                present.add("reasoning")
        lost = present & self._ignored
        if "reasoning" in may_drop and (dropped := {kind for kind in lost if "reasoning" in kind}):
            lost -= dropped
            (not_used if not_used is not None else set()).update(dropped)
        if lost:
            names = tuple(sorted(lost))
            raise RowSkipped("not_rendered", f"the chat template ignores {', '.join(names)}", names)
        if "reasoning" in present:
            messages = [self._with_reasoning(message) for message in messages]
        return messages

    def shows_tools(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> bool:
        """Return whether the template shows the tools before a turn, or the messages quote them.

        Args:
            messages: the messages before the first turn.
            tools: the tools of the conversation.
        """
        if not tools:
            return True
        try:
            text = self.render(messages, tools=[renamed(tool) for tool in tools], prompt=True)
        except RowSkipped:
            # the row's own rendering says why
            return True
        return MARK in text or tools_are_quoted(tools, messages)

    def _as_taken(self, message: dict[str, Any], is_open: bool) -> dict[str, Any]:
        message = self._flattened(message)
        content = message["content"]
        if message["role"] == "tool" and self._result_tags and isinstance(content, str):
            first, last = self._result_tags
            text = content.strip()
            if text.startswith(first) and text.endswith(last):
                # Hermes' results come with the tags that the template writes
                return {**message, "content": text[len(first) : -len(last)].strip()}
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

    def _with_reasoning(self, message: dict[str, Any]) -> dict[str, Any]:
        if "reasoning_content" not in message or self.reasoning_key == "reasoning_content":
            return message
        renamed = {key: value for key, value in message.items() if key != "reasoning_content"}
        if self.reasoning_key:
            renamed[self.reasoning_key] = message["reasoning_content"]
        return renamed

    def _flattened(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message["content"]
        if isinstance(content, str) or (self.takes_parts and message["role"] != "tool"):
            return message
        return {**message, "content": " ".join(part["text"] for part in content)}

    def _find_closing(self) -> tuple[list[int], str]:
        user = {"role": "user", "content": "Hi"}
        try:
            texts = [
                self.render([user, {"role": "assistant", "content": answer}]) for answer in _ANSWERS
            ]
            turns = [self.encode(text).tolist() for text in texts]
        except RowSkipped as error:
            raise UserError(
                f"{self._origin}: the chat template cannot render a user's and an assistant's"
                f" message: {error.detail}"
            ) from None
        backwards = os.path.commonprefix([text[::-1] for text in texts])
        return _common_suffix(turns), backwards[::-1]

    def _check_round_trip(self) -> None:
        """Refuse a tokenizer that gives a conversation other ids than its rendered text.

        Some tokenizers (Mistral's own) have marks that no text represents. The server does not get
        the ids of their rendered text.
        """
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
        ids = self.tokenizer.apply_chat_template(
            messages, chat_template=self.chat_template, **self._arguments
        )["input_ids"]
        if self.encode(self.render(messages)).tolist() != list(ids):
            raise UserError(
                f"{self.folder}: this tokenizer gives a rendered conversation other ids than its"
                " text; it is not supported"
            )

    def _find_turn_end(self, named: set[int]) -> tuple[frozenset[int], list[int]]:
        """Return the end tokens and the tokens that follow the end token.

        The end token is the first one that the model names, else the first special token, else the
        last token that is not blank.
        """
        special = {
            key for key, token in self.tokenizer.added_tokens_decoder.items() if token.special
        }
        for ends in (named, special):
            if found := [index for index, token in enumerate(self.closing) if token in ends]:
                return frozenset(named | {self.closing[found[0]]}), self.closing[found[0] + 1 :]
        text = [
            index
            for index, token in enumerate(self.closing)
            if self.tokenizer.decode([token]).strip()
        ]
        if not text:
            raise UserError(
                f"{self._origin}: the chat template puts nothing after an assistant turn, so its"
                " end cannot be learnt"
            )
        return frozenset(named | {self.closing[text[-1]]}), self.closing[text[-1] + 1 :]

    def _takes_parts(self) -> bool:
        try:
            parts = self.render(
                [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], prompt=True
            )
            return parts == self.render([{"role": "user", "content": "Hi"}], prompt=True)
        except RowSkipped:
            return False

    def _find_ignored(self) -> frozenset[str]:
        """Return the kinds of content that the template drops without an error.

        Two conversations that differ in a dropped kind alone are rendered to the same text.
        """
        user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}

        def call(name: str, **more: str) -> dict[str, Any]:
            function = {"name": name, "arguments": {}}
            calls = [{"id": "call00001", "type": "function", "function": function}]
            return {"role": "assistant", "content": "", "tool_calls": calls, **more}

        pairs = {
            role: [[{"role": role, "content": text}, user, answer] for text in "ab"]
            for role in ("system", "developer")
        }
        pairs["tool"] = [
            [user, call("f"), {"role": "tool", "name": "f", "content": text}, answer]
            for text in "ab"
        ]
        pairs["tool calls"] = [[user, call(name)] for name in "fg"]
        pairs["text beside tool calls"] = [[user, call("f", content=text)] for text in "ab"]
        ignored = {name for name, (one, other) in pairs.items() if self._same(one, other)}
        if self.reasoning_key is None:
            ignored.add("reasoning")
        elif "tool calls" not in ignored and self._same(
            *([user, call("f", **{self.reasoning_key: text})] for text in "ab")
        ):
            ignored.add("reasoning beside tool calls")
        return frozenset(ignored)

    def _find_result_tags(self) -> tuple[str, str] | None:
        """Return the tags that the template writes around a tool's result."""
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        messages = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "f", "content": MARK},
        ]
        try:
            found = _TAGS.search(self.render(messages, tools=[_TOOL]))
        except RowSkipped:
            return None
        return (found[1], found[2]) if found else None

    def _same(self, one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
        try:
            return self.render(one, tools=[_TOOL]) == self.render(other, tools=[_TOOL])
        except RowSkipped:
            # the template itself refuses a row with this content
            return False

    def _find_reasoning_key(self) -> str | None:
        """Return the first key whose text the template shows in the last turn.

        Some templates show it beside tool calls alone.
        """
        user = {"role": "user", "content": "Hi"}
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        for fields in ({"content": "Yes"}, {"content": "", "tool_calls": [call]}):
            for key in REASONING_KEYS:
                answer = {"role": "assistant", **fields, key: MARK}
                try:
                    if MARK in self.render([user, answer], tools=[_TOOL]):
                        return key
                except RowSkipped:
                    continue
        return None


def _ids_of(tokens: Sequence[str], tokenizer: Any) -> set[int]:
    vocabulary = tokenizer.get_vocab()
    if unknown := [token for token in tokens if token not in vocabulary]:
        raise UserError(f"data.end_tokens: not in the vocabulary: {', '.join(unknown)}")
    return {vocabulary[token] for token in tokens}


def _model_end_ids(folder: Path, tokenizer: Any) -> set[int]:
    """Return the end tokens that the model's own files name.

    The end token of a turn need not be the end-of-text token.
    """
    found = set(ModelFolder(folder).end_ids)
    return found if tokenizer.eos_token_id is None else {*found, tokenizer.eos_token_id}


def _common_suffix(sequences: list[list[int]]) -> list[int]:
    shortest = min(map(len, sequences))
    length = 0
    while length < shortest and len({sequence[-length - 1] for sequence in sequences}) == 1:
        length += 1
    return sequences[0][len(sequences[0]) - length :]

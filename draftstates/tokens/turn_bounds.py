"""What a template puts around an assistant's turn: a prefill, and its end.

A turn ends in one of three ways. Most templates close it with an end token (and a newline). Some
close a turn with calls differently (Gemma 4). Some do not close it (GLM-4.5): the model ends its
turn with the token that opens the next role's message.

A prefill is text that the generation prompt adds to a turn and that history lacks. Gemma 4 opens a
turn without thoughts with an empty thought channel, and shows the turn without it once it is
history. The model sees the channel, so its turn begins behind it. DeepSeek-R1's prompt opens a
thought, which no history shows: the model writes the thought, its end and the answer.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from draftstates.errors import UserError
from draftstates.tokens.rows import RowSkipped

# the ids that turns with these answers have in common at their end are the template's
ANSWERS = ("Yes", "two words.", "x=1", "Ω9")
_USER = {"role": "user", "content": "Hi"}
_ANSWER = {"role": "assistant", "content": "Yes"}
# most tokens in which the end of a turn is looked for where the next message begins
_LONGEST_OPENING = 4
_LONGEST_TAG = 40
_OPENED_THOUGHT = re.compile(r"<[\w:]*th(?:ink|ought)\w*>\s*\Z")

Messages = list[dict[str, Any]]
RenderIds = Callable[[Messages], np.ndarray]


@dataclasses.dataclass(frozen=True)
class TurnEnds:
    """How a template ends an assistant turn.

    Attributes:
        ids: tokens that end a turn; the end token is supervised.
        closing: all tokens that the template puts after an assistant's text.
        tails: the tokens that may follow the end token (ChatML's newline), one tuple for each kind
            of turn; they are not supervised.
        next_role: for a template that does not close a turn, the tokens that come before the
            message of the next role, `user` or `tool`, up to the token that ends the turn; else
            empty.
        calls_are_open: whether the template does not close a turn with calls (DeepSeek-V3, after
            a single call): all its tokens are supervised, and no end token.
    """

    ids: frozenset[int]
    closing: tuple[int, ...]
    tails: tuple[tuple[int, ...], ...]
    next_role: dict[str, tuple[int, ...]]
    calls_are_open: bool

    def end(self, turn: np.ndarray, *, calls: bool, tokenizer: Any) -> int:
        """Return the number of tokens of a turn up to and including its end token.

        Args:
            turn: ids from the generation prompt's end to the end of the rendering, int32 [T].
            calls: whether the turn has calls, which some templates do not close.
            tokenizer: the tokenizer, for messages.

        Raises:
            RowSkipped: `no_turn_end`: the turn does not end in an end token and what may follow.
        """
        for tail in self.tails:
            end = len(turn) - len(tail)
            if end > 0 and turn[end - 1] in self.ids and tuple(turn[end:].tolist()) == tail:
                return end
        if calls and self.calls_are_open:
            return len(turn)
        expected = ", ".join(tokenizer.convert_ids_to_tokens(sorted(self.ids)))
        found = tokenizer.convert_ids_to_tokens(turn[-4:].tolist())
        lengths = " or ".join(str(len(tail)) for tail in self.tails)
        raise RowSkipped(
            "no_turn_end",
            f"expected one of {expected} and then {lengths} more tokens, found a turn that ends in"
            f" {found}",
        )

    def closed(self, ids: np.ndarray, messages: Messages, place: int) -> np.ndarray:
        """Return a turn's ids with the token of the next role, where that ends the turn.

        Args:
            ids: ids up to the end of the rendered turn, int32 [T].
            messages: messages of the conversation.
            place: place of the turn's message.
        """
        following = messages[place + 1]["role"] if place + 1 < len(messages) else None
        if following not in ("user", "tool"):
            # the model is followed by what it asks for: a result, or the user
            following = "tool" if messages[place].get("tool_calls") else "user"
        end = self.next_role.get(following, ())
        return np.concatenate([ids, np.array(end, dtype=np.int32)]) if end else ids


def find_turn_ends(
    render: RenderIds,
    *,
    calls: list[dict[str, Any]],
    named: Collection[int],
    tokenizer: Any,
    origin: str,
) -> TurnEnds:
    """Find how a template ends a turn.

    The end token is the first one that the model names, else the first special token; else the
    token of the next role, if the model names it; else the last token that is not blank.

    Args:
        render: function from messages to ids without a generation prompt.
        calls: assistant messages with calls, as the template takes them; empty if it shows none.
        named: end tokens that configuration, library and the model's files name.
        tokenizer: the tokenizer.
        origin: name of the template, for messages.

    Raises:
        UserError: the template cannot render an answer, or the end of a turn cannot be known.
    """
    try:
        answers = [
            render([_USER, {"role": "assistant", "content": answer}]).tolist() for answer in ANSWERS
        ]
    except RowSkipped as error:
        raise UserError(
            f"{origin}: the chat template cannot render a user's and an assistant's message:"
            f" {error.detail}: give it the arguments that it needs with data.template_arguments, or"
            " name another template with data.chat_template"
        ) from None
    closing = _common_suffix(answers)
    special = {key for key, token in tokenizer.added_tokens_decoder.items() if token.special}
    for ends in (set(named), special):
        if found := [place for place, token in enumerate(closing) if token in ends]:
            ids, tail = {*named, closing[found[0]]}, tuple(closing[found[0] + 1 :])
            end, call_tail = _call_end(render, calls, ids, special)
            tails = dict.fromkeys([tail, tail if call_tail is None else call_tail])
            is_open = bool(calls) and call_tail is None
            return TurnEnds(frozenset(ids | end), tuple(closing), tuple(tails), {}, is_open)
    following = _next_roles(render, calls)
    ending = {role: _up_to(tokens, named) for role, tokens in following.items()}
    if ending.get("user"):
        known = {role: tokens for role, tokens in ending.items() if tokens}
        return TurnEnds(frozenset(named), tuple(closing), ((),), known, "tool" not in known)
    text = [place for place, token in enumerate(closing) if tokenizer.decode([token]).strip()]
    if text:
        ids = frozenset({*named, closing[text[-1]]})
        return TurnEnds(ids, tuple(closing), (tuple(closing[text[-1] + 1 :]),), {}, False)
    opening = [_up_to(tokens, special)[-1:] for tokens in following.values()]
    names = tokenizer.convert_ids_to_tokens(list(dict.fromkeys(sum(opening, ()))))
    remedy = (
        f"if the model itself ends its turn with {' or '.join(names)}, which the template puts"
        f" before the next message, set data.end_tokens: {names}"
        if names
        else "name a template that closes a turn with data.chat_template"
    )
    raise UserError(
        f"{origin}: the chat template puts nothing after an assistant turn, so its end cannot be"
        f" learnt: {remedy}"
    )


def _up_to(tokens: tuple[int, ...], ends: Collection[int]) -> tuple[int, ...]:
    """Return the tokens up to and including the first end token; none where there is no such."""
    place = next((place for place, token in enumerate(tokens) if token in ends), None)
    return () if place is None else tokens[: place + 1]


def _call_end(
    render: RenderIds, calls: list[dict[str, Any]], ids: set[int], special: set[int]
) -> tuple[set[int], tuple[int, ...] | None]:
    """Return the tokens that end a turn with calls, and those that may follow; none where unknown.

    Behind a call there are marks of the call too, so the last end token or special token ends it.
    """
    try:
        closing = _common_suffix([render([_USER, call]).tolist() for call in calls])
    except RowSkipped:
        return set(), None
    for ends in (ids, special):
        if found := [place for place, token in enumerate(closing) if token in ends]:
            return {closing[found[-1]]}, tuple(closing[found[-1] + 1 :])
    return set(), None


def _next_roles(render: RenderIds, calls: list[dict[str, Any]]) -> dict[str, tuple[int, ...]]:
    """Return the tokens with which a template opens the message behind a turn, by its role."""
    answer = {"role": "assistant", "content": ANSWERS[0]}
    pairs = {"user": ([_USER, answer], {"role": "user", "content": "So?"})}
    if calls:
        result = {"role": "tool", "name": "f", "tool_call_id": "abcdefghi", "content": "1"}
        pairs["tool"] = ([_USER, calls[0]], result)
    found = {}
    for role, (messages, following) in pairs.items():
        try:
            before, after = render(messages), render([*messages, following])
        except RowSkipped:
            continue
        if len(after) > len(before) and np.array_equal(after[: len(before)], before):
            found[role] = tuple(after[len(before) :][:_LONGEST_OPENING].tolist())
    return found


def _common_suffix(turns: list[list[int]]) -> list[int]:
    """Return the longest list of tokens in which all turns end."""
    return list(os.path.commonprefix([turn[::-1] for turn in turns]))[::-1]


@dataclasses.dataclass(frozen=True)
class Prefill:
    """The text at the end of a generation prompt that a rendered turn lacks; usually empty.

    Attributes:
        text: the text.
        opener: its first mark; empty where it does not begin with a mark.
    """

    text: str = ""
    opener: str = ""

    def continuation(self, prompt: str, turn: str) -> str | None:
        """Return the text that the model writes after a prompt, or None if the two differ.

        Args:
            prompt: rendered history with generation prompt.
            turn: rendered history and turn.
        """
        if turn.startswith(prompt):
            return turn[len(prompt) :]
        if not self.text or not prompt.endswith(self.text):
            return None
        history = prompt.removesuffix(self.text)
        if not turn.startswith(history):
            return None
        rest = turn[len(history) :]
        # a turn that opens a thought of its own does not follow the prompt's empty one
        return None if self.opener and rest.startswith(self.opener) else rest


def find_prefill(render: Callable[..., str], *, marks: Collection[str]) -> Prefill:
    """Find the text at the end of a generation prompt that a rendered turn lacks.

    A prompt that opens a thought and leaves it open is no prefill: the model would write the rest
    of the thought, and a turn without it is none that follows the prompt.

    Args:
        render: `Rendering.text`.
        marks: the vocabulary's marks.
    """
    try:
        prompt = render([_USER], prompt=True)
        turns = {
            answer: render([_USER, {"role": "assistant", "content": answer}]) for answer in ANSWERS
        }
    except RowSkipped:
        return Prefill()
    shared = _before_marks(prompt, len(os.path.commonprefix([prompt, *turns.values()])), marks)
    asked = prompt.rfind(_USER["content"]) + len(_USER["content"])
    text = prompt[shared:]
    # what the model writes between the prefill and its answer
    between = {turn[shared:].partition(answer)[0] for answer, turn in turns.items()}
    if shared < asked or len(between) > 1 or not _is_closed(text, marks):
        return Prefill()
    begin = between.pop()
    if any(mark in text and mark in begin for mark in marks):
        # the turn has the same marks: the prompt does not merely add some
        return Prefill()
    openers = (mark for mark in marks if text.startswith(mark))
    return Prefill(text, max(openers, key=len, default=""))


def find_opener(render: Callable[..., str]) -> str:
    """Return the start of a thought that ends a prompt; nothing where a turn follows it as it is.

    Args:
        render: `Rendering.text`.
    """
    try:
        prompt, turn = render([_USER], prompt=True), render([_USER, _ANSWER])
    except RowSkipped:
        return ""
    found = opened_thought(prompt)
    follows = turn.startswith(prompt) and not turn.startswith(prompt + closer_of(found))
    return "" if follows else found


def opened_thought(prompt: str) -> str:
    """Return the opening of a thought with which a generation prompt ends; empty for none."""
    found = _OPENED_THOUGHT.search(prompt[-_LONGEST_TAG:])
    return found[0] if found else ""


def closer_of(opener: str) -> str:
    """Return the tag that closes a thought."""
    return f"</{opener.strip()[1:]}"


def _before_marks(text: str, place: int, marks: Collection[str]) -> int:
    """Return a place in a text, moved to the beginning of the mark that it lies within."""
    for mark in marks:
        first = text.find(mark, max(place - len(mark) + 1, 0), place + len(mark) - 1)
        if 0 <= first < place:
            return first
    return place


def _is_closed(text: str, marks: Collection[str]) -> bool:
    """Return whether a text ends in a mark that closes something."""
    found = [mark for mark in marks if mark in text]
    last = [mark for mark in found if text.rstrip().endswith(mark)]
    return bool(last) and (len(found) > 1 or last[0].startswith("</"))

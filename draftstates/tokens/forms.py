"""The forms in which a template takes calls, reasoning and parts, and what it drops.

Templates differ in them. Probes with a mark in their content show them, once for each template.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from draftstates.tokens.content import MARK
from draftstates.tokens.parts import REASONING_KEYS
from draftstates.tokens.rows import RowSkipped

_NAME, _ID = "fkx", "abcdefghi"
_TAGS = re.compile(rf"(<[^<>\s]+>)\s*{MARK}\s*(</[^<>\s]+>)")
_USER = {"role": "user", "content": "Hi"}
_ANSWER = {"role": "assistant", "content": "Yes"}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "d",
        "parameters": {"type": "object", "properties": {}},
    },
}

Message = dict[str, Any]
Render = Callable[..., str]


@dataclasses.dataclass(frozen=True)
class CallForm:
    """The form in which a template takes calls.

    Attributes:
        content: content of a message that has calls and no text.
        as_text: whether arguments are JSON text; otherwise they are an object.
    """

    content: str | None = ""
    as_text: bool = False

    def formed(self, message: Message) -> Message:
        """Return a message with its calls in this form."""
        calls = message["tool_calls"]
        if self.as_text:
            # written as models write it
            texts = [
                json.dumps(call["function"]["arguments"], ensure_ascii=False) for call in calls
            ]
            calls = [
                {**call, "function": {**call["function"], "arguments": text}}
                for call, text in zip(calls, texts, strict=True)
            ]
        return {**message, "content": message["content"] or self.content, "tool_calls": calls}


# what the server hands to the template
SERVERS_FORM = CallForm()


@dataclasses.dataclass(frozen=True)
class Forms:
    """What a template renders of messages, and in which form it takes them.

    Attributes:
        takes_parts: whether the content may be a list of parts.
        calls: form of calls; None where the template shows none.
        reasoning: key under which it reads the reasoning of an answer, and of a turn with calls;
            None where it shows none.
        ignored: kinds of content that it drops.
        result_tags: the tags that it writes around a tool's result, if any.
    """

    takes_parts: bool
    calls: CallForm | None
    reasoning: tuple[str | None, str | None]
    ignored: frozenset[str]
    result_tags: tuple[str, str] | None

    def formed(self, message: Message) -> Message:
        """Return a message, its reasoning under `reasoning_content`, in the template's form."""
        content = message["content"]
        if isinstance(content, list) and not (self.takes_parts and message["role"] != "tool"):
            message = {**message, "content": " ".join(part["text"] for part in content)}
        if message["role"] == "tool":
            return self._without_tags(message)
        if message.get("tool_calls"):
            message = (self.calls or SERVERS_FORM).formed(message)
        if "reasoning_content" in message:
            key = self.reasoning[bool(message.get("tool_calls"))]
            if key != "reasoning_content":
                message = dict(message)
                thought = message.pop("reasoning_content")
                message.update({key: thought} if key else {})
        return message

    def _without_tags(self, message: Message) -> Message:
        """Return a tool's result without the tags that the template writes, as Hermes has them."""
        if self.result_tags is None:
            return message
        (first, last), text = self.result_tags, message["content"].strip()
        if not (text.startswith(first) and text.endswith(last)):
            return message
        return {**message, "content": text[len(first) : -len(last)].strip()}

    def lost(self, messages: list[Message]) -> set[str]:
        """Return the kinds of content that the template drops, of those that the messages have.

        Args:
            messages: messages of the chat format.
        """
        return {kind for message in messages for kind in _kinds(message)} & self.ignored

    def with_thoughts(self) -> "Forms":
        """Return the forms of a template whose prompt opens a thought and that shows none itself.

        The thought follows the prompt, so it lies beside the answer; the template ignores it there.
        """
        shown = {"reasoning", "reasoning beside tool calls"}
        keys = (REASONING_KEYS[0], REASONING_KEYS[0])
        return dataclasses.replace(self, reasoning=keys, ignored=self.ignored - shown)

    def calling(self) -> list[Message]:
        """Return assistant messages that differ in their call; none where calls are not shown."""
        if self.calls is None:
            return []
        return [self.calls.formed(_call(name, text)) for name, text in (("f", "1"), ("g", "x y"))]


def find_forms(render: Render) -> Forms:
    """Probe what a template renders.

    Args:
        render: `Rendering.text`.
    """
    forms = [CallForm(content, as_text) for as_text in (False, True) for content in ("", None)]
    shown = [_shown_of_call(render, form) for form in forms]
    # the first that shows most, and the name at least
    calls = forms[shown.index(max(shown))] if max(shown) else None
    reasoning = (
        _reasoning_key(render, _ANSWER),
        _reasoning_key(render, calls.formed(_call(_NAME, "1"))) if calls else None,
    )
    ignored = (
        kind
        for kind, probe in _probes(calls or SERVERS_FORM, reasoning)
        # where a template refuses a probe, it refuses such a row by itself
        if MARK not in (_rendered(render, probe) or MARK)
    )
    return Forms(
        takes_parts=_takes_parts(render),
        calls=calls,
        reasoning=reasoning,
        ignored=frozenset(ignored),
        result_tags=_result_tags(render, calls or SERVERS_FORM),
    )


def _call(name: str, text: str, content: str = "") -> Message:
    function = {"name": name, "arguments": {"q": text}}
    calls = [{"id": _ID, "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _rendered(render: Render, messages: list[Message]) -> str | None:
    try:
        return render(messages, tools=[_TOOL])
    except RowSkipped:
        return None


def _shown_of_call(render: Render, form: CallForm) -> int:
    """Return 0 where a call is not shown, 1 where its name is, 2 where its arguments are too."""
    name, arguments = (
        MARK in (_rendered(render, [_USER, form.formed(probe)]) or "")
        for probe in (_call(MARK, "1"), _call(_NAME, MARK))
    )
    return name + (name and arguments)


def _reasoning_key(render: Render, message: Message) -> str | None:
    for key in REASONING_KEYS:
        if MARK in (_rendered(render, [_USER, {**message, key: MARK}]) or ""):
            return key
    return None


def _result_tags(render: Render, form: CallForm) -> tuple[str, str] | None:
    result = {"role": "tool", "name": _NAME, "tool_call_id": _ID, "content": MARK}
    text = _rendered(render, [_USER, form.formed(_call(_NAME, "1")), result])
    found = _TAGS.search(text or "")
    return (found[1], found[2]) if found else None


def _takes_parts(render: Render) -> bool:
    parts = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    try:
        return render([parts], prompt=True) == render([_USER], prompt=True)
    except RowSkipped:
        return False


def _probes(
    form: CallForm, reasoning: tuple[str | None, str | None]
) -> Iterator[tuple[str, list[Message]]]:
    """Give conversations with a mark in one kind of content each."""
    for role in ("system", "developer"):
        yield role, [{"role": role, "content": MARK}, _USER, _ANSWER]
    result = {"role": "tool", "name": _NAME, "tool_call_id": _ID, "content": MARK}
    yield "tool", [_USER, form.formed(_call(_NAME, "1")), result, _ANSWER]
    yield "tool calls", [_USER, form.formed(_call(MARK, "1"))]
    yield "tool calls beside text", [_USER, form.formed(_call(MARK, "1", "Yes"))]
    yield "text beside tool calls", [_USER, form.formed(_call(_NAME, "1", MARK))]
    key, with_call = (key or REASONING_KEYS[0] for key in reasoning)
    yield "reasoning", [_USER, {**_ANSWER, key: MARK}]
    yield (
        "reasoning beside tool calls",
        [_USER, {**form.formed(_call(_NAME, "1")), with_call: MARK}],
    )


def _kinds(message: Message) -> Iterator[str]:
    """Give the kinds of content that a message has."""
    yield message["role"]
    if message.get("tool_calls"):
        yield "tool calls"
        if message["content"]:
            yield "tool calls beside text"
            yield "text beside tool calls"
        if message.get("reasoning_content"):
            yield "reasoning beside tool calls"
    elif message.get("reasoning_content"):
        yield "reasoning"

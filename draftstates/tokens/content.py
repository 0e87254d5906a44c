"""The content of a conversation, and the search for every piece of it in what is rendered.

A template is a program and may leave out anything without a word. So each piece (text, reasoning,
a call's name and arguments, a tool's description) is looked for in the text of the turn that it
belongs to. Where it does not stand there as it is, its words must stand there in their order, and a
mark in its place must appear when the conversation is rendered again. Otherwise it is left out.
"""

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

from draftstates.tokens.rendering import Rendering
from draftstates.tokens.rows import RowSkipped, shown

MARK = "Qx7Vk2Zr"
_THINK = re.compile(r"(</?think>)")
_WORD = re.compile(r"\w+")
_Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of a message.

    Attributes:
        kind: `reasoning`, `content`, `tool calls`, or a key of the message that need not be
            rendered.
        path: where it lies in the message.
        text: what must be found.
    """

    kind: str
    path: _Path
    text: str


class ContentCheck:
    """The check that every piece of one conversation is rendered, turn by turn.

    Attributes:
        not_used: names of what is left out though the row is kept.
    """

    def __init__(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        rendering: Rendering,
        *,
        reasoning_key: str | None,
        may_drop: frozenset[str],
        not_used: set[str],
    ) -> None:
        self.not_used = not_used
        self._messages = messages
        self._tools = tools
        self._rendering = rendering
        self._reasoning_key = reasoning_key
        self._may_drop = may_drop
        self._next = 0
        self._text = ""

    def see(self, place: int, prompt: str, answer: str) -> None:
        """Look for the messages since the last turn, and for the turn itself.

        Args:
            place: the turn's number.
            prompt: the history, rendered up to the generation prompt.
            answer: the turn as it follows the prompt.

        Raises:
            RowSkipped: `not_rendered`: a piece is left out.
        """
        if not self._next and self._tools:
            self._find_tools(prompt)
        at = start = _common_length(self._text, prompt)
        for index in range(self._next, place):
            at = self._find(index, place, prompt, at, start)
        self._find(place, place, answer, 0, 0)
        self._next, self._text = place + 1, prompt + answer

    def _find(self, index: int, place: int, text: str, at: int, start: int) -> int:
        """Look for a message's pieces in the text, in their order, and return where they end."""
        message = self._messages[index]
        content = message["content"]
        if len(message) == 2 and isinstance(content, str) and "think>" not in content:
            # most messages are a role and text alone
            found = text.find(content, at)
            if found >= 0:
                return found + len(content)
        for piece in _pieces(message, self._reasoning_key):
            found = _find_text(text, piece.text, at)
            if found < 0:
                found = at if _find_text(text, piece.text, start) >= 0 else -1
            elif index == place and piece.kind == "content":
                # the calls stand behind the text, or the turn is none that the model wrote
                start = found
            if found >= 0:
                at = found
            elif not self._is_shown(piece, index, place, text[start:]):
                self._miss(piece, index, place)
        return at

    def _is_shown(self, piece: _Piece, index: int, place: int, text: str) -> bool:
        """Return whether a piece is rendered in another form than its own."""
        if piece.kind.startswith("messages[]") or (piece.kind == "reasoning" and index < place):
            return False
        return _has_words(text, piece.text) and self._appears(piece, index, place)

    def _appears(self, piece: _Piece, index: int, place: int) -> bool:
        """Return whether a mark in the piece's place is rendered."""
        messages = list(self._messages[: place + 1])
        messages[index] = _replaced(messages[index], piece.path)
        try:
            return MARK in self._rendering.text(messages, tools=self._tools)
        except RowSkipped:
            return False

    def _miss(self, piece: _Piece, index: int, place: int) -> None:
        """Name a piece that is left out, or refuse its row."""
        if piece.kind.startswith("messages[]"):
            self.not_used.add(piece.kind)
        elif piece.kind == "reasoning" and index < place:
            # the server would not see it either
            self.not_used.add("reasoning of earlier turns, which the template leaves out")
        elif piece.kind == "reasoning" and "reasoning" in self._may_drop:
            self.not_used.add("reasoning")
        else:
            raise RowSkipped(
                "not_rendered",
                f"the chat template leaves out {piece.kind} of message {index}"
                f" ({self._messages[index]['role']}), or puts it before the text:"
                f" {shown(piece.text)}",
                (piece.kind,),
            )

    def _find_tools(self, prompt: str) -> None:
        """Name what the template leaves out of the tools."""
        for key, text in _tool_pieces(self._tools):
            if _find_text(prompt, text, 0) < 0 and not all(
                line.strip() in prompt for line in text.splitlines()
            ):
                self.not_used.add(f"tools[]: {key}")


def renamed(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool with the mark as its name."""
    if isinstance(tool.get("function"), dict):
        return {**tool, "function": {**tool["function"], "name": MARK}}
    return {**tool, "name": MARK}


def tools_are_quoted(tools: list[dict[str, Any]], messages: list[dict[str, Any]]) -> bool:
    """Return whether the messages hold the tools as text, as Hermes' system prompts do."""
    texts = [message["content"] for message in messages if isinstance(message["content"], str)]
    names = [(tool.get("function") or tool).get("name") for tool in tools]
    return all(
        isinstance(name, str) and any(f'"{name}"' in text or f"'{name}'" in text for text in texts)
        for name in names
    )


def _common_length(one: str, other: str) -> int:
    """Return the length of the common beginning of two texts."""
    if other.startswith(one):
        return len(one)
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def _find_text(text: str, piece: str, at: int) -> int:
    """Return where a piece ends in the text, as it is or as JSON writes it; -1 if it is missing."""
    piece = piece.strip()
    found = text.find(piece, at)
    if found >= 0:
        return found + len(piece)
    for written in (json.dumps(piece, ensure_ascii=False)[1:-1], json.dumps(piece)[1:-1]):
        found = text.find(written, at)
        if found >= 0:
            return found + len(written)
    return -1


def _has_words(text: str, piece: str) -> bool:
    """Return whether the words of a piece stand in the text, in their order."""
    if piece == "null":
        # templates write it in ways of their own
        return True
    text, at = text.lower(), 0
    for word in _WORD.findall(piece.lower()):
        at = text.find(word, at)
        if at < 0:
            return False
        at += len(word)
    return True


def _pieces(message: dict[str, Any], reasoning_key: str | None) -> Iterator[_Piece]:
    for key in ("name", "tool_call_id"):
        if key in message:
            yield _Piece(f"messages[].{key}", (key,), message[key])
    if reasoning_key and message.get(reasoning_key):
        yield _Piece("reasoning", (reasoning_key,), message[reasoning_key])
    # some templates show calls beside no content only
    content = message["content"] or ""
    if isinstance(content, list):
        for index, part in enumerate(content):
            yield _Piece("content", ("content", index, "text"), part["text"])
    elif message["role"] == "assistant" and "think>" in content:
        parts = _THINK.split(content)
        for index in range(0, len(parts), 2):
            thought = parts[index + 1 : index + 2] == ["</think>"]
            yield _Piece(
                "reasoning" if thought else "content", ("content", "think", index), parts[index]
            )
    else:
        yield _Piece("content", ("content",), content)
    for index, call in enumerate(message.get("tool_calls", ())):
        path: _Path = ("tool_calls", index)
        if "id" in call:
            yield _Piece("messages[].tool_calls[].id", (*path, "id"), str(call["id"]))
        function = call["function"]
        yield _Piece("tool calls", (*path, "function", "name"), function["name"])
        yield from _arguments(function["arguments"], (*path, "function", "arguments"))


def _arguments(value: Any, path: _Path) -> Iterator[_Piece]:
    """Yield the keys and values of a call's arguments."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield _Piece("tool calls", (*path, "key", key), key)
            yield from _arguments(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _arguments(item, (*path, index))
    else:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        yield _Piece("tool calls", path, text)


def _tool_pieces(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield what the tools say: key and text of each value, or the key where it is no text."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name == "type":
                # each template has a notation of its own for types
                continue
            if isinstance(item, (bool, int, float)) or item is None:
                yield name, name
            yield from _tool_pieces(item, name)
            if key == "properties":
                yield "properties", name
    elif isinstance(value, list):
        for item in value:
            yield from _tool_pieces(item, key)
    elif isinstance(value, str) and value.strip():
        yield key, value


def _replaced(message: dict[str, Any], path: _Path) -> dict[str, Any]:
    """Return a copy of a message with the mark at a path."""
    if path[:2] == ("content", "think"):
        parts = _THINK.split(message["content"])
        parts[int(path[2])] = MARK
        return {**message, "content": "".join(parts)}
    return _with_mark(message, path)


def _with_mark(value: Any, path: _Path) -> Any:
    if not path:
        return MARK
    step, rest = path[0], path[1:]
    if step == "key" and len(rest) == 1 and isinstance(value, dict):
        return {MARK if key == rest[0] else key: item for key, item in value.items()}
    if isinstance(value, list):
        return [
            _with_mark(item, rest) if index == step else item for index, item in enumerate(value)
        ]
    return {key: _with_mark(item, rest) if key == step else item for key, item in value.items()}

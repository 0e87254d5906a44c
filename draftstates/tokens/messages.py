"""The reader of a row's messages: any of the usual shapes becomes chat messages.

A message of the chat format and of ShareGPT is one chat message. Anthropic's blocks of one message
may become several (results of tools, then text). Several items of OpenAI's Responses may become one
(reasoning, text and calls of a turn). Reasoning lies under `reasoning_content` afterwards, whatever
its name was.
"""

from collections.abc import Mapping
from typing import Any

from draftstates.tokens.flags import ENDING_KEYS, FLAGS, endings, is_excluded, was_cut
from draftstates.tokens.layouts import ANSWERS, QUESTIONS
from draftstates.tokens.parts import (
    REASONING_KEYS,
    joined,
    one_thought,
    read_block,
    read_thoughts,
    result_message,
    text_of,
    without_thought,
)
from draftstates.tokens.rows import RowSkipped, shown
from draftstates.tokens.tools import from_json, is_empty, read_calls, same_calls

ROLES = {
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("developer",), "developer"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(
        ("assistant", "gpt", "chatgpt", "bot", "bing", "bard", "model", "ai"), "assistant"
    ),
    **dict.fromkeys(
        ("tool", "observation", "function", "function_response", "tool_response", "ipython"), "tool"
    ),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
}
_CALL_ROLES = ("function_call", "tool_call")
# the keys of a whole exchange, which Parquet may give in another order
_EXCHANGE = {
    **dict.fromkeys(QUESTIONS + ("input",), "user"),
    **dict.fromkeys(ANSWERS, "assistant"),
    **ROLES,
}
_ORDER = ("system", "developer", "user", "assistant", "tool")
_CONTENT_KEYS = ("content", "value", "text")
# items of Responses that are no messages
_ITEMS = ("reasoning", "function_call", "function_call_output")
# the keys of a message that holds a role and text alone
_PLAIN = frozenset(("role", "content"))
_PLAIN_SHAREGPT = frozenset(("from", "value"))


class MessageReader:
    """A list of chat messages in the making.

    Attributes:
        messages: chat messages so far; the server's keys and no others.
        unsupervised: numbers of the messages that the row excludes from what is learnt.
        open_turns: numbers of the messages that the model did not end itself.
        not_used: names of keys and values that no message holds.
    """

    def __init__(self, columns: Mapping[str, str], roles: Mapping[str, str]) -> None:
        self.messages: list[dict[str, Any]] = []
        self.unsupervised: set[int] = set()
        self.open_turns: set[int] = set()
        self.not_used: set[str] = set()
        self._roles = {name.lower(): role for name, role in roles.items()}
        self._role_keys = (columns.get("role", "role"), "role", "from", "type")
        self._content_keys = (columns.get("content", "content"), *_CONTENT_KEYS)
        # whether the last message is reasoning alone, whose text may come in the next item
        self._thought = False

    def read(self, item: object, index: int, *, learn: bool = True) -> None:
        """Add one entry of a row's list of messages.

        Args:
            item: the entry.
            index: its number, for messages.
            learn: whether the row lets it be learnt.

        Raises:
            RowSkipped: it is no message; the error has reason and detail.
        """
        where = f"message {index}"
        if isinstance(item, str):
            item = from_json(item) or item
        if not isinstance(item, dict):
            raise RowSkipped("bad_message", f"{where}: expected an object, found {shown(item)}")
        if self._read_plain(item):
            if not learn:
                self.unsupervised.add(len(self.messages) - 1)
            return
        before = len(self.messages)
        role_key, _ = _first(item, self._role_keys)
        if role_key == "type" and item["type"] in _ITEMS:
            self._read_item(item, item["type"], where)
        elif role_key is None and _is_exchange(item):
            # {"human": ..., "assistant": ...}
            for name in sorted(item, key=lambda name: _ORDER.index(_EXCHANGE[name])):
                if not is_empty(item[name]):
                    self.read({"role": _EXCHANGE[name], "content": item[name]}, index)
        else:
            self._read_message(item, where)
        if not learn:
            # an item may have been added to the message before
            self.unsupervised.update(range(min(before, len(self.messages) - 1), len(self.messages)))
        self._read_flags(item, where)

    def end_last(self, reason: object, where: str) -> None:
        """Take note of why the row's last answer ended.

        Args:
            reason: the engine's finish reason, or one for each assistant message.
            where: the column, for messages.

        Raises:
            RowSkipped: `bad_columns`: the list of reasons fits no assistant messages.
        """
        turns = [
            index for index, message in enumerate(self.messages) if message["role"] == "assistant"
        ]
        if isinstance(reason, list):
            if len({was_cut(found) for found in reason}) == 1:
                # several answers of which the row has one, and all ended alike
                reason = reason[:1]
            if len(reason) not in (1, len(turns)):
                raise RowSkipped(
                    "bad_columns",
                    f"column {where}: expected a reason for each of {len(turns)} assistant"
                    f" messages, found {len(reason)}",
                )
            reasons = reason
        else:
            reasons = [reason]
        for place, found in zip(turns[-len(reasons) :], reasons, strict=False):
            self._end(place, found, where)

    def _read_plain(self, item: dict[str, Any]) -> bool:
        """Add a message that is a role and text alone, as most are; return whether it is one."""
        keys = item.keys()
        if keys == _PLAIN:
            given, content = item["role"], item["content"]
        elif keys == _PLAIN_SHAREGPT:
            given, content = item["from"], item["value"]
        else:
            return False
        if not isinstance(content, str) or not isinstance(given, str):
            return False
        given = given.lower()
        role = self._roles.get(given) or ROLES.get(given)
        if role is None or given in _CALL_ROLES or self._thought:
            return False
        self.messages.append({"role": role, "content": content})
        return True

    def _role(self, given: object, where: str) -> str:
        role = None
        if isinstance(given, str):
            role = self._roles.get(given.lower()) or ROLES.get(given.lower())
        if role is None:
            raise RowSkipped(
                "unknown_role",
                f"{where}: expected one of {', '.join([*ROLES, *self._roles])}, found"
                f" {shown(given)}; data.roles gives another name its role",
            )
        return role

    def _read_message(self, item: dict[str, Any], where: str) -> None:
        role_key, given = _first(item, self._role_keys)
        content_key, content = _first(item, self._content_keys)
        if role_key is None:
            raise RowSkipped(
                "bad_message",
                f"{where}: expected a role under {' or '.join(dict.fromkeys(self._role_keys))},"
                f" found the keys {shown(sorted(map(str, item)), 200)}",
            )
        role = self._role(given, where)
        used = {role_key, content_key, "type", "status", "tool_calls", "function_call"}
        message: dict[str, Any] = {"role": role}
        thoughts = read_thoughts(item, where) if role == "assistant" else {}
        used.update(thoughts)
        calls = self._calls(item, where)
        if str(given).lower() in _CALL_ROLES and str(given).lower() not in self._roles:
            calls, content = read_calls(_wrapped(content), where, self.not_used), ""
        for key in ("name", "tool_call_id", "tool_use_id", "call_id"):
            value = item.get(key)
            if is_empty(value) or (role == "user" and key == "name"):
                # the server drops a user's name too
                continue
            if not isinstance(value, str):
                raise RowSkipped(
                    "bad_message", f"{where}: {key}: expected text, found {shown(value)}"
                )
            message["name" if key == "name" else "tool_call_id"] = value
            used.add(key)
        if role == "assistant" and is_empty(content) and isinstance(item.get("refusal"), str):
            content = item["refusal"]
            used.add("refusal")
        channel = item.get("channel") or "final"
        self._name_unused(item, used | {"channel"}, role, where)
        if role == "assistant" and channel == "analysis" and isinstance(content, str):
            # Harmony's thoughts are messages of their own
            self._add_thought(content)
            return
        if channel != "final":
            raise RowSkipped(
                "bad_message", f"{where}: channel: expected analysis or final, found {channel!r}"
            )
        self._add(message, content, thoughts, calls, where)

    def _add(
        self,
        message: dict[str, Any],
        content: object,
        thoughts: Mapping[str, str],
        calls: list[dict[str, Any]],
        where: str,
    ) -> None:
        """Add a message, or the several messages that its blocks are."""
        role = message["role"]
        reasoning = list(thoughts.values())
        if isinstance(content, list):
            texts, more, block_calls = self._blocks(content, message, where)
            reasoning = one_thought(reasoning, more, where)
            calls = same_calls(block_calls, calls, where)
            content = texts
            if texts is None:
                # every block was a tool's result
                return
            if role == "assistant" and isinstance(texts, list):
                # the blocks of an answer are what the model wrote in one go
                content = "".join(part["text"] for part in texts)
        if content is None and role == "assistant" and (calls or reasoning):
            # the server does the same before it renders
            content = ""
        if not isinstance(content, (str, list)):
            raise RowSkipped(
                "bad_message", f"{where} ({role}): expected text, found {shown(content)}"
            )
        if (calls or reasoning) and role != "assistant":
            raise RowSkipped(
                "bad_message", f"{where} ({role}): expected no calls and no reasoning, found some"
            )
        if role == "assistant" and self._thought:
            # the text that follows an item of reasoning
            pending = self.messages.pop()
            reasoning.insert(0, pending["reasoning_content"])
        if thought := "\n".join(text for text in reasoning if text):
            content = without_thought(content, thought, where)
            message["reasoning_content"] = thought
        message["content"] = content
        if calls:
            message["tool_calls"] = calls
        self._thought = False
        self.messages.append(message)

    def _calls(self, item: dict[str, Any], where: str) -> list[dict[str, Any]]:
        given, legacy = (
            [] if is_empty(value) else read_calls(_wrapped(value), where, self.not_used)
            for value in (item.get("tool_calls"), item.get("function_call"))
        )
        return same_calls(given, legacy, where)

    def _blocks(
        self, content: list[Any], message: dict[str, Any], where: str
    ) -> tuple[Any, list[str], list[dict[str, Any]]]:
        """Return text, reasoning and calls of a list of parts; add messages of tools' results.

        The text is None where there is nothing but results of tools.
        """
        texts: list[dict[str, str]] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        results = False
        for part in content:
            kind, value = read_block(part, message["role"], where, self.not_used)
            if kind == "result":
                results, self._thought = True, False
                if texts:
                    self.messages.append({"role": message["role"], "content": joined(texts)})
                    texts = []
                self.messages.append(value)
            elif kind == "text":
                if calls and value.strip():
                    raise _out_of_order(where, "text", "a call")
                texts.append({"type": "text", "text": value})
            elif kind == "reasoning":
                if calls or any(text["text"].strip() for text in texts):
                    raise _out_of_order(where, "reasoning", "text or a call")
                thoughts.append(value)
            else:
                calls += value
        if results and not texts:
            return None, thoughts, calls
        return joined(texts), thoughts, calls

    def _read_item(self, item: dict[str, Any], kind: str, where: str) -> None:
        """Add an item of Responses that is no message."""
        used = {"type", "status"}
        if kind == "reasoning":
            key = next(
                (key for key in ("content", "summary", "text") if not is_empty(item.get(key))), ""
            )
            text = text_of(item.get(key)) if key else ""
            if text is None:
                raise RowSkipped(
                    "bad_message", f"{where}: {key}: expected text, found {shown(item[key])}"
                )
            self._name_unused(item, used | {key}, "assistant", where)
            self._add_thought(text)
            return
        if kind == "function_call":
            self._name_unused(
                item, used | {"name", "arguments", "call_id", "namespace"}, "assistant", where
            )
            call = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not is_empty(item.get("call_id")):
                call["id"] = item["call_id"]
            calls = read_calls([call], where, self.not_used)
            if not (self.messages and self.messages[-1]["role"] == "assistant"):
                self.messages.append({"role": "assistant", "content": ""})
            last = self.messages[-1]
            last["tool_calls"] = [*last.get("tool_calls", ()), *calls]
        else:
            self._name_unused(item, used | {"output", "call_id"}, "tool", where)
            self.messages.append(
                result_message(item.get("output"), item.get("call_id"), where, self.not_used)
            )
        self._thought = False

    def _add_thought(self, text: str) -> None:
        """Add reasoning whose text or calls may come in the next item."""
        if not text:
            return
        if self._thought:
            text = f"{self.messages.pop()['reasoning_content']}\n{text}"
        self.messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        self._thought = True

    def _read_flags(self, item: dict[str, Any], where: str) -> None:
        """Take note of whether the last message is learnt, and of how it ended."""
        if not self.messages:
            return
        last = len(self.messages) - 1
        answer = self.messages[last]["role"] == "assistant"
        if is_excluded(item, answer=answer, where=where, not_used=self.not_used):
            self.unsupervised.add(last)
        for key, reason in endings(item):
            self._end(last, reason, f"messages[].{key}")

    def _end(self, place: int, reason: object, where: str) -> None:
        if is_empty(reason):
            return
        cut = was_cut(reason)
        if self.messages[place]["role"] != "assistant":
            self.not_used.add(f"{where} of a message that is not an answer")
        elif cut is None:
            self.not_used.add(f"{where} of an unknown kind")
        elif cut:
            self.open_turns.add(place)

    def _name_unused(self, item: dict[str, Any], used: set[Any], role: str, where: str) -> None:
        if not is_empty(item.get("train_detail")):
            raise RowSkipped(
                "bad_message",
                f"{where}: train_detail: parts of a message cannot be learnt; use train for the"
                " whole message",
            )
        for key, value in item.items():
            if key in used or key in FLAGS or key in ENDING_KEYS or is_empty(value):
                continue
            self.not_used.add(
                f"messages[].{key}"
                + (f" ({role})" if key in REASONING_KEYS or key == "name" else "")
            )


def _first(item: dict[str, Any], keys: tuple[str, ...]) -> tuple[str | None, Any]:
    """Return the first key that is not empty, else the first that is not null, and its value."""
    given = [key for key in keys if item.get(key) is not None]
    chosen = next((key for key in given if not is_empty(item[key])), given[0] if given else None)
    return chosen, item.get(chosen)


def _is_exchange(item: dict[str, Any]) -> bool:
    """Return whether a message's keys are roles, or a question and its answer, each once."""
    roles = {_EXCHANGE.get(key) for key in item}
    each_once = len(roles) == len(item) and None not in roles
    # a question alone may be another thing
    return each_once and (len(item) > 1 or not ROLES.keys().isdisjoint(item))


def _wrapped(value: object) -> object:
    """Return the calls of a turn that holds one call, or a list of calls, as JSON text."""
    calls = from_json(value)
    return calls if isinstance(calls, list) else [calls]


def _out_of_order(where: str, kind: str, earlier: str) -> RowSkipped:
    return RowSkipped(
        "bad_message",
        f"{where}: expected reasoning, then text, then calls, found {kind} after {earlier}",
    )

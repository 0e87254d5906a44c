"""A dataset's row, in any of the usual layouts, as one list of chat messages."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from draftstates.tokens.reasons import RowSkipped, shown

ROLES = {
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("developer",), "developer"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "bing", "bard", "model", "ai"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response", "tool_response", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
}
_CALL_ROLES = ("function_call", "tool_call")
_MESSAGE_COLUMNS = ("messages", "conversations", "conversation")
_KEPT_KEYS = ("name", "tool_call_id", "reasoning_content", "tool_calls")  # as the server keeps them; a user's name it drops


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as a chat template takes them: `role`, `content` and what else the chat format knows; and the tools offered."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class TokenRow:
    """A row that is already tokenised: ids [T] and a mask of 0 and 1 [T], not checked yet."""

    input_ids: list[Any]
    loss_mask: list[Any]


def parse_row(value: object, *, layout: str = "auto", columns: Mapping[str, str] | None = None) -> Conversation | TokenRow:
    """Read a row.

    Args:
        value: the row's object, or its JSON text as bytes.
        layout: one of `options.FORMATS`; `auto` goes by the columns that the row has.
        columns: what the source calls the columns (our name -> its name).

    Raises:
        RowSkipped: the row is none, with reason and detail.
    """
    row = _parsed(value)
    columns = columns or {}
    if layout == "auto":
        layout = _layout_of(row, columns)
    if layout == "tokens":
        return TokenRow(_column(row, columns, "input_ids", list), _column(row, columns, "loss_mask", list))
    if layout in ("messages", "sharegpt"):
        messages = _chat(row, columns)
    elif layout == "alpaca":
        messages = _alpaca(row, columns)
    else:
        messages = _completion(row, columns)
    return Conversation(messages, _tools(row.get(columns.get("tools", "tools"))))


def _parsed(value: object) -> dict[str, Any]:
    if isinstance(value, RowSkipped):
        raise value
    if isinstance(value, bytes):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowSkipped("broken_json", str(error)) from None
    if not isinstance(value, dict):
        raise RowSkipped("not_an_object", f"expected an object, found {shown(value)}")
    return value


def _layout_of(row: dict[str, Any], columns: Mapping[str, str]) -> str:
    def has(*names: str) -> bool:
        return all(columns.get(name, name) in row for name in names)

    if has("input_ids", "loss_mask"):
        return "tokens"
    if columns.get("messages", "") in row or any(name in row for name in _MESSAGE_COLUMNS):
        return "messages"
    if has("instruction", "output"):
        return "alpaca"
    if has("prompt", "completion") or has("prompt", "response"):
        return "completion"
    raise RowSkipped("unknown_format", f"the columns {shown(sorted(map(str, row)))} fit no known layout")


def _column(row: dict[str, Any], columns: Mapping[str, str], name: str, kind: type, *, optional: bool = False) -> Any:
    value = row.get(columns.get(name, name))
    if value is None and optional:
        return kind()
    if not isinstance(value, kind):
        raise RowSkipped("bad_columns", f"column {columns.get(name, name)}: expected {kind.__name__}, found {shown(value)}")
    return value


def _chat(row: dict[str, Any], columns: Mapping[str, str]) -> list[dict[str, Any]]:
    name = columns.get("messages") or next((name for name in _MESSAGE_COLUMNS if name in row), "messages")
    listed = row.get(name)
    if not isinstance(listed, list):
        raise RowSkipped("bad_columns", f"column {name}: expected a list of messages, found {shown(listed)}")
    messages = [_message(item, index, columns) for index, item in enumerate(listed)]
    system = _column(row, columns, "system", str, optional=True)
    if system and messages:
        if messages[0]["role"] == "system":
            raise RowSkipped("bad_columns", "a system prompt in the column and another in the messages")
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _message(item: object, index: int, columns: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise RowSkipped("bad_message", f"message {index}: expected an object, found {shown(item)}")
    given = _first(item, (columns.get("role"), "role", "from"))
    role = ROLES.get(given.lower()) if isinstance(given, str) else None
    if role is None:
        raise RowSkipped("unknown_role", f"message {index}: expected one of {', '.join(ROLES)}, found {shown(given)}")
    message: dict[str, Any] = {"role": role, "content": _first(item, (columns.get("content"), "content", "value", "text"))}
    message.update({key: item[key] for key in _KEPT_KEYS if item.get(key) is not None and (key != "name" or role != "user")})
    if given.lower() in _CALL_ROLES:
        message["tool_calls"], message["content"] = _calls_in_text(message["content"]), ""
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], index)
    if role == "assistant" and message.get("tool_calls") and message["content"] is None:
        message["content"] = ""  # as the server does before it renders
    _check_content(message, index)
    return message


def _first(item: dict[str, Any], names: tuple[str | None, ...]) -> Any:
    return next((item[name] for name in names if name is not None and name in item), None)


def _check_content(message: dict[str, Any], index: int) -> None:
    content = message["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") in ("text", "input_text") and isinstance(part.get("text"), str)):
            raise RowSkipped("bad_message", f"message {index} ({message['role']}): expected text, found {shown(content)}")
    for key in ("name", "tool_call_id", "reasoning_content"):
        if not isinstance(message.get(key, ""), str):
            raise RowSkipped("bad_message", f"message {index}: {key}: expected text, found {shown(message[key])}")


def _calls_in_text(text: object) -> list[Any]:
    """ShareGPT's `function_call` turns hold one call, or a list of them, as JSON text."""
    calls = _from_json(text)
    return [{"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])]


def _from_json(value: object) -> object:
    """Text parsed as JSON, None where it is none; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _tool_calls(calls: object, index: int) -> list[dict[str, Any]]:
    """Calls as the server hands them to the template: arguments as an object, not as JSON text."""
    if not isinstance(calls, list):
        raise RowSkipped("bad_tools", f"message {index}: tool_calls: expected a list, found {shown(calls)}")
    parsed = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowSkipped("bad_tools", f"message {index}: expected a function with a name, found {shown(call)}")
        arguments = _from_json(function.get("arguments", {}))
        if not isinstance(arguments, dict):
            found = shown(function.get("arguments"))
            raise RowSkipped("bad_tools", f"message {index}: arguments: expected a JSON object, found {found}")
        parsed.append({**call, "function": {**function, "arguments": arguments}})
    return parsed


def _tools(value: object) -> list[dict[str, Any]] | None:
    if value is None or value in ("", []):
        return None
    tools = _from_json(value)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowSkipped("bad_tools", f"tools: expected a list of objects, found {shown(value)}")
    return tools or None


def _alpaca(row: dict[str, Any], columns: Mapping[str, str]) -> list[dict[str, Any]]:
    instruction, output = _column(row, columns, "instruction", str), _column(row, columns, "output", str)
    given = _column(row, columns, "input", str, optional=True)
    system = _column(row, columns, "system", str, optional=True)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": f"{instruction}\n\n{given}" if given else instruction})
    return [*messages, {"role": "assistant", "content": output}]


def _completion(row: dict[str, Any], columns: Mapping[str, str]) -> list[dict[str, Any]]:
    answer = columns.get("completion") or ("completion" if "completion" in row else "response")
    sides = []
    for name, role in ((columns.get("prompt", "prompt"), "user"), (answer, "assistant")):
        value = row.get(name)
        if isinstance(value, str):
            value = [{"role": role, "content": value}]
        if not isinstance(value, list):
            raise RowSkipped("bad_columns", f"column {name}: expected text or a list of messages, found {shown(value)}")
        sides += value
    return [_message(item, index, columns) for index, item in enumerate(sides)]

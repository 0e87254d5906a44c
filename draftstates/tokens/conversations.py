"""The parser of a dataset's row: any of the usual layouts becomes one list of chat messages."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from draftstates.tokens.rows import RowSkipped, shown

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
_MESSAGE_COLUMNS = ("messages", "conversations", "conversation")
# the server keeps the same keys; it drops only the `name` of a user's message
_KEPT_KEYS = (
    "name",
    "tool_call_id",
    "reasoning_content",
    "tool_calls",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as a chat template takes it.

    Attributes:
        messages: messages with `role`, `content` and the other keys of the chat format.
        tools: tools that are offered to the model.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class TokenRow:
    """A row that is already tokenised; its values are not checked yet.

    Attributes:
        input_ids: ids [T].
        loss_mask: 0 or 1 [T].
    """

    input_ids: list[Any]
    loss_mask: list[Any]


def parse_row(
    value: object, *, layout: str = "auto", columns: Mapping[str, str] | None = None
) -> Conversation | TokenRow:
    """Read a row's conversation or tokens.

    Args:
        value: the row's object, or its JSON text as bytes.
        layout: `format` of `config.RowOptions`; `auto` decides by the row's columns.
        columns: the source's names of columns (standard name -> the source's name).

    Raises:
        RowSkipped: the row holds no conversation and no tokens; the error has reason and detail.
    """
    row = _parsed(value)
    columns = columns or {}
    if layout == "auto":
        layout = _layout_of(row, columns)
    if layout == "tokens":
        return TokenRow(
            _column(row, columns, "input_ids", list), _column(row, columns, "loss_mask", list)
        )
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
    raise RowSkipped(
        "unknown_format", f"the columns {shown(sorted(map(str, row)))} fit no known layout"
    )


def _column(
    row: dict[str, Any],
    columns: Mapping[str, str],
    name: str,
    kind: type,
    *,
    optional: bool = False,
) -> Any:
    value = row.get(columns.get(name, name))
    if value is None and optional:
        return kind()
    if not isinstance(value, kind):
        raise RowSkipped(
            "bad_columns",
            f"column {columns.get(name, name)}: expected {kind.__name__}, found {shown(value)}",
        )
    return value


def _chat(row: dict[str, Any], columns: Mapping[str, str]) -> list[dict[str, Any]]:
    name = columns.get("messages") or next(
        (name for name in _MESSAGE_COLUMNS if name in row), "messages"
    )
    listed = row.get(name)
    if not isinstance(listed, list):
        raise RowSkipped(
            "bad_columns", f"column {name}: expected a list of messages, found {shown(listed)}"
        )
    messages = [_message(item, index, columns) for index, item in enumerate(listed)]
    system = _column(row, columns, "system", str, optional=True)
    if system and messages:
        if messages[0]["role"] == "system":
            raise RowSkipped(
                "bad_columns", "a system prompt in the column and another in the messages"
            )
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _message(item: object, index: int, columns: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise RowSkipped("bad_message", f"message {index}: expected an object, found {shown(item)}")
    given = _first(item, (columns.get("role"), "role", "from"))
    role = ROLES.get(given.lower()) if isinstance(given, str) else None
    if role is None:
        raise RowSkipped(
            "unknown_role",
            f"message {index}: expected one of {', '.join(ROLES)}, found {shown(given)}",
        )
    message: dict[str, Any] = {
        "role": role,
        "content": _first(item, (columns.get("content"), "content", "value", "text")),
    }
    message.update(
        {
            key: item[key]
            for key in _KEPT_KEYS
            if item.get(key) is not None and (key != "name" or role != "user")
        }
    )
    if given.lower() in _CALL_ROLES:
        message["tool_calls"], message["content"] = _calls_in_text(message["content"]), ""
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], index)
    if role == "assistant" and message.get("tool_calls") and message["content"] is None:
        # the server does the same before it renders
        message["content"] = ""
    _check_content(message, index)
    return message


def _first(item: dict[str, Any], names: tuple[str | None, ...]) -> Any:
    return next((item[name] for name in names if name is not None and name in item), None)


def _check_content(message: dict[str, Any], index: int) -> None:
    content = message["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        if not (
            isinstance(part, dict)
            and part.get("type") in ("text", "input_text")
            and isinstance(part.get("text"), str)
        ):
            raise RowSkipped(
                "bad_message",
                f"message {index} ({message['role']}): expected text, found {shown(content)}",
            )
    for key in ("name", "tool_call_id", "reasoning_content"):
        if not isinstance(message.get(key, ""), str):
            raise RowSkipped(
                "bad_message", f"message {index}: {key}: expected text, found {shown(message[key])}"
            )


def _calls_in_text(text: object) -> list[Any]:
    """Return the calls of a ShareGPT `function_call` turn.

    Such a turn holds one call, or a list of calls, as JSON text.
    """
    calls = _from_json(text)
    return [
        {"type": "function", "function": call}
        for call in (calls if isinstance(calls, list) else [calls])
    ]


def _from_json(value: object) -> object:
    """Return text parsed as JSON, or None where it is not JSON; return other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _tool_calls(calls: object, index: int) -> list[dict[str, Any]]:
    """Return the calls as the server hands them to the template.

    The arguments become an object where they are JSON text.
    """
    if not isinstance(calls, list):
        raise RowSkipped(
            "bad_tools", f"message {index}: tool_calls: expected a list, found {shown(calls)}"
        )
    parsed = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowSkipped(
                "bad_tools",
                f"message {index}: expected a function with a name, found {shown(call)}",
            )
        arguments = _from_json(function.get("arguments", {}))
        if not isinstance(arguments, dict):
            found = shown(function.get("arguments"))
            raise RowSkipped(
                "bad_tools", f"message {index}: arguments: expected a JSON object, found {found}"
            )
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
    instruction, output = (
        _column(row, columns, "instruction", str),
        _column(row, columns, "output", str),
    )
    given = _column(row, columns, "input", str, optional=True)
    system = _column(row, columns, "system", str, optional=True)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append(
        {"role": "user", "content": f"{instruction}\n\n{given}" if given else instruction}
    )
    return [*messages, {"role": "assistant", "content": output}]


def _completion(row: dict[str, Any], columns: Mapping[str, str]) -> list[dict[str, Any]]:
    answer = columns.get("completion") or ("completion" if "completion" in row else "response")
    sides = []
    for name, role in ((columns.get("prompt", "prompt"), "user"), (answer, "assistant")):
        value = row.get(name)
        if isinstance(value, str):
            value = [{"role": role, "content": value}]
        if not isinstance(value, list):
            raise RowSkipped(
                "bad_columns",
                f"column {name}: expected text or a list of messages, found {shown(value)}",
            )
        sides += value
    return [_message(item, index, columns) for index, item in enumerate(sides)]

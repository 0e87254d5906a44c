"""Tools and tool calls of a row, from any of the usual shapes, as the chat format has them."""

from typing import Any

from draftstates.tokens.rows import RowSkipped, parse_json, shown

# other names that public data sets use for a call's arguments
_ARGUMENTS = ("arguments", "parameters", "args", "input")
_SCHEMAS = ("parameters", "input_schema", "inputSchema")


def from_json(value: object) -> object:
    """Return text parsed as JSON, or None where it is not JSON; return other values unchanged.

    Raises:
        RowSkipped: `broken_json`: an object has a key twice; `too_deep`.
    """
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError:
        return None


def is_empty(value: object) -> bool:
    """Return whether a field says as much as a missing one: null, or empty text or container."""
    return value is None or (isinstance(value, (str, list, dict)) and not value)


def without_nulls(value: Any) -> Any:
    """Return a value without the keys that are null.

    A column of Parquet or Arrow gives every object every key, and null where its row has none. So
    a null key cannot be told from a missing one, and neither is rendered.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def read_tools(value: object, name: str = "tools") -> list[dict[str, Any]] | None:
    """Return the tools that are offered to the model, or None where there are none.

    Args:
        value: a list of tools, one tool, JSON text of either, or a list of JSON texts.
        name: the column's name, for messages.

    Raises:
        RowSkipped: `bad_tools`: it is something else.
    """
    if is_empty(value) or value == "null":
        return None
    listed = from_json(value)
    if isinstance(listed, dict) and ("name" in listed or "function" in listed):
        listed = [listed]
    if is_empty(listed) and listed is not None:
        return None
    if not isinstance(listed, list):
        raise RowSkipped("bad_tools", f"{name}: expected a list of objects, found {shown(value)}")
    tools = [from_json(tool) for tool in listed]
    if not all(isinstance(tool, dict) for tool in tools):
        raise RowSkipped("bad_tools", f"{name}: expected a list of objects, found {shown(value)}")
    return [_tool(without_nulls(tool)) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    """Return a tool in the chat format; other formats have no `function` around it."""
    if "function" in tool or not isinstance(tool.get("name"), str):
        return tool
    function = {key: item for key, item in tool.items() if key not in ("type", *_SCHEMAS)}
    for key in _SCHEMAS:
        if key in tool:
            function["parameters"] = tool[key]
    return {"type": "function", "function": function}


def read_calls(value: object, where: str, not_used: set[str]) -> list[dict[str, Any]]:
    """Return calls as the server hands them to the template: the arguments are an object.

    Args:
        value: a list of calls, one call, or JSON text of either.
        where: the message, for messages.
        not_used: names of what is left out; nulls in arguments are added.

    Raises:
        RowSkipped: `bad_tools`: it is something else, or a call has no name or no arguments that
            are a JSON object.
    """
    calls = from_json(value)
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list):
        raise RowSkipped("bad_tools", f"{where}: tool_calls: expected a list, found {shown(value)}")
    return [_call(from_json(call), where, not_used) for call in calls]


def same_calls(
    calls: list[dict[str, Any]], others: list[dict[str, Any]], where: str
) -> list[dict[str, Any]]:
    """Return the calls of a message that may name them in two places.

    Raises:
        RowSkipped: `bad_tools`: both places have calls, and they differ.
    """
    one, other = ([call["function"] for call in found] for found in (calls, others))
    if one and other and one != other:
        raise RowSkipped("bad_tools", f"{where}: expected the calls once, found others beside them")
    return calls or others


def _call(call: object, where: str, not_used: set[str]) -> dict[str, Any]:
    function = None
    if isinstance(call, dict):
        given = call.get("function")
        # the call itself, where nothing is around it
        function = call if given is None else given
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowSkipped(
            "bad_tools", f"{where}: expected a function with a name, found {shown(call)}"
        )
    assert isinstance(call, dict)
    key = next((key for key in _ARGUMENTS if function.get(key) is not None), "arguments")
    arguments = _arguments(function.get(key), where, not_used)
    kept = {} if is_empty(call.get("id")) else {"id": call["id"]}
    if function is not call:
        # the server drops them too
        not_used.update(
            f"messages[].tool_calls[].{name}"
            for name, item in call.items()
            if name not in ("function", "type", "id") and not is_empty(item)
        )
    ignored = {"name", "arguments", key, "type", "id"} if function is call else {"name", key}
    extra = {
        name: item for name, item in function.items() if name not in ignored and item is not None
    }
    not_used.update(f"messages[].tool_calls[].function.{name}" for name in extra)
    return {
        "type": "function",
        **kept,
        "function": {"name": function["name"], "arguments": arguments},
    }


def _arguments(value: object, where: str, not_used: set[str]) -> dict[str, Any]:
    if is_empty(value) or (isinstance(value, str) and value.strip() in ("", "null")):
        return {}
    parsed = from_json(value)
    if isinstance(value, str) and isinstance(parsed, str):
        # some dumps hold the text of the text
        parsed = from_json(parsed)
    if not isinstance(parsed, dict):
        raise RowSkipped(
            "bad_tools", f"{where}: arguments: expected a JSON object, found {shown(value)}"
        )
    if isinstance(value, str):
        return parsed
    found = without_nulls(parsed)
    if found != parsed:
        not_used.add("messages[].tool_calls[].function.arguments: null")
    return found

"""The messages for faults of a configuration: key, rule, help, value."""

import datetime
import difflib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

LARGEST = (1 << 63) - 1
_MOST_LEVELS = 100
_TYPES = {
    "int_type": "integer",
    "float_type": "number",
    "string_type": "string",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "list_type": "a list",
}
_OR_NULL = {"literal_error": ", null"} | dict.fromkeys(_TYPES, " or null")
_RULES = {
    "literal_error": "one of {expected}",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "too_short": "at least {min_length} entry",
    "string_too_short": "some text",
    "string_pattern_mismatch": "text like {pattern}",
}


def broken_rule(rule: str) -> PydanticCustomError:
    """Return the error for a broken rule: `expected <rule> (<help of the key>), found <value>`."""
    return PydanticCustomError("rule", "{rule}", {"rule": rule})


def refusal(text: str, *, key: str | None = None) -> PydanticCustomError:
    """Return an error with a text of its own.

    Args:
        text: expected and found value.
        key: the key at fault, where several keys of a section were compared.
    """
    return PydanticCustomError("refusal", "{text}", {"text": text, "key": key})


def not_plain(value: Any, path: str = "", level: int = 0) -> Iterator[str]:
    """Yield a message for each value that YAML can hold but JSON, arithmetic or a file cannot.

    Such values are dates, sets, NaN, numbers beyond 64 bits, and what is nested too deeply. A
    message begins with the key's path.
    """
    here = path or "the configuration"
    if level > _MOST_LEVELS:
        yield f"{here}: expected at most {_MOST_LEVELS} levels, found more"
    elif isinstance(value, Mapping):
        for name, part in value.items():
            if not isinstance(name, str):
                yield (
                    f"{_join(path, str(name))}: expected text as a key's name, found"
                    f" {type(name).__name__}: put it in quotes"
                )
            yield from not_plain(part, _join(path, str(name)), level + 1)
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from not_plain(part, f"{path}[{index}]", level + 1)
    elif isinstance(value, str) and not _is_unicode(value):
        yield f"{here}: expected text that UTF-8 can hold, found {value!r}"
    elif isinstance(value, datetime.date):
        yield f"{here}: expected text, found a date: put it in quotes, '{value}'"
    elif isinstance(value, int) and abs(value) > LARGEST:
        yield f"{here}: expected a number of at most {LARGEST}, found a larger one"
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{here}: expected a finite number, found {value}"
    elif value is not None and not isinstance(value, str | int | float):
        yield f"{here}: expected text, numbers, lists and mappings, found {type(value).__name__}"


def _is_unicode(text: str) -> bool:
    """Return whether UTF-8 can hold a text: it cannot hold half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def problems(error: ValidationError, schema: Mapping[str, Any]) -> list[str]:
    """Return a message for each fault, with the key's path and the expected value.

    Args:
        error: error of pydantic with all faults.
        schema: the configuration's JSON schema, for the keys' help.
    """
    return sorted({_problem(details, schema) for details in error.errors(include_url=False)})


def _problem(error: ErrorDetails, schema: Mapping[str, Any]) -> str:
    place = [part for part in error["loc"] if part != "[key]"]
    path, context = key_path(place), error.get("ctx", {})
    if error["type"] == "missing":
        return f"{path}: missing"
    if error["type"] == "extra_forbidden" or error["loc"][-1:] == ("[key]",):
        return f"{path}: unknown key{_suggestion(str(place[-1]), _names(schema, place[:-1]))}"
    if error["type"] == "refusal":
        return f"{_join(path, context['key']) if context['key'] else path}: {context['text']}"
    node = _node(schema, place)
    rule = _rule(error, context)
    if _takes_null(node):
        rule += _OR_NULL.get(error["type"], ", or null")
    described = f"{rule} ({node['description']})" if "description" in node else rule
    return f"{path or 'the configuration'}: expected {described}, found {_shown(error['input'])}"


def _rule(error: ErrorDetails, context: Mapping[str, Any]) -> str:
    """Return the broken rule."""
    kind = error["type"]
    if kind == "rule":
        return context["rule"]
    if kind == "list_type" and isinstance(error["input"], str):
        return f"a list: [{error['input']}]"
    if kind in _TYPES:
        return _TYPES[kind]
    if kind not in _RULES:
        return error["msg"]
    values = {
        name: f"{value:g}" if isinstance(value, float) else value for name, value in context.items()
    }
    text = _RULES[kind].format(**values)
    return text.replace("'", "").replace(" or ", ", ") if kind == "literal_error" else text


def _node(schema: Mapping[str, Any], place: Iterable[int | str]) -> Mapping[str, Any]:
    """Return the part of the schema that declares a key.

    This part has the key's own help, not the help of the key's type.
    """
    node = schema
    for part in place:
        inner = _followed(node, schema)
        below = (
            inner.get("items") if isinstance(part, int) else inner.get("properties", {}).get(part)
        )
        node = below or inner.get("additionalProperties") or {}
        node = node if isinstance(node, Mapping) else {}
    return node


def _followed(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a part of the schema with its reference resolved and its alternative null left out."""
    for choice in node.get("anyOf", []):
        if choice.get("type") != "null":
            return _followed(choice, schema)
    if "$ref" in node:
        return schema["$defs"][node["$ref"].rpartition("/")[2]]
    return node


def _takes_null(node: Mapping[str, Any]) -> bool:
    return any(choice.get("type") == "null" for choice in node.get("anyOf", []))


def _names(schema: Mapping[str, Any], place: list[int | str]) -> list[str]:
    """Return the names of the keys that a section can have."""
    section = _followed(_node(schema, place), schema)
    return list(section.get("properties") or section["propertyNames"]["enum"])


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _suggestion(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else f" (known here: {', '.join(known)})"


def key_path(parts: Iterable[int | str]) -> str:
    """Return names and indices as a path, such as `shards[3].tokens`."""
    path = ""
    for part in parts:
        path = f"{path}[{part}]" if isinstance(part, int) else _join(path, str(part))
    return path


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name

"""What is wrong with a configuration, in words that name the key."""

import datetime
import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema

_LARGEST = (1 << 63) - 1


def not_plain(value: Any, path: str = "") -> Iterator[str]:
    """What YAML can hold but JSON, arithmetic or a file cannot, each with its key's path: dates, sets, NaN, numbers beyond 64 bits."""
    here = path or "the configuration"
    if isinstance(value, Mapping):
        for name, part in value.items():
            if not isinstance(name, str):
                yield f"{_join(path, str(name))}: expected text as a key's name, found {type(name).__name__}: put it in quotes"
            yield from not_plain(part, _join(path, str(name)))
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from not_plain(part, f"{path}[{index}]")
    elif isinstance(value, datetime.date):
        yield f"{here}: expected text, found a date: put it in quotes, '{value}'"
    elif isinstance(value, int) and abs(value) > _LARGEST:
        yield f"{here}: expected a number of at most {_LARGEST}, found a larger one"
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{here}: expected a finite number, found {value}"
    elif value is not None and not isinstance(value, str | int | float):
        yield f"{here}: expected text, numbers, lists and mappings, found {type(value).__name__}"


def _whole(_: object, value: object) -> bool:
    """JSON Schema takes 1.0 for an integer; here 1 and 1.0 would be two parameters and two capture keys."""
    return isinstance(value, int) and not isinstance(value, bool)


def _matches(_: object, pattern: str, value: object, __: object) -> Iterator[jsonschema.ValidationError]:
    """As JSON Schema means it: in Python `$` alone would let a newline through at the end."""
    if isinstance(value, str) and (not re.search(pattern, value) or value.endswith("\n")):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


_VALIDATOR = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    validators={"pattern": _matches},
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", _whole),
)


def problems(config: Any, schema: dict[str, Any]) -> Iterator[str]:
    """What in a configuration breaks the schema, each with its key's path and what was expected."""
    for error in _VALIDATOR(schema).iter_errors(config):
        path = _path(error.absolute_path)
        if error.validator == "additionalProperties":
            for name in sorted(set(error.instance) - set(error.schema["properties"])):
                yield f"{_join(path, name)}: unknown key{_suggestion(name, error.schema['properties'])}"
        elif error.validator == "required":
            for name in sorted(set(error.validator_value) - set(error.instance)):
                yield f"{_join(path, name)}: missing"
        else:
            yield f"{path or 'the configuration'}: expected {_expected(error)}, found {_shown(error.instance)}"


def _expected(error: jsonschema.ValidationError) -> str:
    """What would have been right: the rule that was broken, then the key's own description."""
    value = error.validator_value
    rules = {
        "type": lambda: " or ".join(value) if isinstance(value, list) else str(value),
        "enum": lambda: "one of " + ", ".join("null" if choice is None else str(choice) for choice in value),
        "minimum": lambda: f"at least {value}",
        "exclusiveMinimum": lambda: f"more than {value}",
        "maximum": lambda: f"at most {value}",
        "exclusiveMaximum": lambda: f"less than {value}",
        "minItems": lambda: f"at least {value} entry",
        "minLength": lambda: "some text",
        "uniqueItems": lambda: "no entry twice",
        "pattern": lambda: f"text like {value}",
        "anyOf": lambda: "",
    }
    rule = rules.get(error.validator, lambda: error.message)()
    description = error.schema.get("description", "")
    return " (".join(part for part in (rule, description) if part) + (")" if rule and description else "")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def _suggestion(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else f" (known here: {', '.join(known)})"


def _path(parts: Any) -> str:
    path = ""
    for part in parts:
        path = f"{path}[{part}]" if isinstance(part, int) else _join(path, part)
    return path


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name

"""The types of the configuration's keys: allowed values, and numbers from text."""

import datetime
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    WrapValidator,
)

from draftstates.config_problems import LARGEST, broken_rule, refusal

# Python refuses to read thousands of digits: more than 18 digits stay text, and are refused
_NUMBER = re.compile(r"[0-9]{1,18}(\.[0-9]+)?")
_BINARY = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, **_BINARY}
_SIZE = re.compile(rf"^([0-9]{{1,18}}(?:\.[0-9]+)?) ?({'|'.join(_UNITS)})$")
# no control characters, which rewrite a terminal's lines, and no ends of lines
PATH = r"^[^{}\x00-\x1f\x7f-\x9f\u2028\u2029]+$"
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class Section(BaseModel):
    """An immutable part of the configuration."""

    # validators are built when first used: a job uses few of the classes made of sections
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    def plain(self) -> dict[str, Any]:
        """Return the section as text, numbers, lists and mappings, every key present."""
        return self.model_dump(mode="json")

    def as_text(self) -> str:
        """Return the section as JSON in a fixed order, for a rule's parameters."""
        return json.dumps(self.plain(), sort_keys=True)


def _number(value: object) -> object:
    """Return text that spells a number as a number: Snakemake passes --config's values as text."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return float(value) if "." in value else int(value)
    return value


def _size(value: object) -> object:
    """Return text such as 4GiB as a number of bytes, and other values unchanged."""
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        return int(float(match[1]) * _UNITS[match[2]])
    return _number(value)


def _path(value: object) -> object:
    """Return text as a path, or None, which is refused, where the text cannot be a path."""
    if isinstance(value, str):
        return Path(value) if re.fullmatch(PATH, value) else None
    return value


def _date(value: object) -> object:
    """Return text such as 2024-07-26 as a date, and other values unchanged."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", value):
        return datetime.date.fromisoformat(value)
    return value


def _only(rule: str, read: Callable[[object], object] = lambda value: value) -> WrapValidator:
    """Return a validator whose only message is `rule`, for any fault of a value.

    Args:
        rule: the rule, as the message names it.
        read: function from the configured value to a value that the type accepts.
    """

    def check(value: object, accept: Callable[[object], object]) -> object:
        try:
            return accept(read(value))
        except ValueError:
            # pydantic's ValidationError is a ValueError
            raise broken_rule(rule) from None

    return WrapValidator(check)


def _ascending(value: object, accept: Callable[[object], Any]) -> Any:
    layers = accept(value)
    if isinstance(layers, list) and layers != sorted(layers):
        raise refusal(f"expected ascending numbers, found {layers}")
    return layers


def _all_different(values: list[Any]) -> list[Any]:
    if len(set(values)) < len(values):
        raise broken_rule("no entry twice")
    return values


FROM_TEXT = BeforeValidator(_number)
_BYTES_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": 1, "maximum": LARGEST},
        {"type": "string", "pattern": _SIZE.pattern},
    ]
}
Natural = Annotated[int, Field(ge=0), FROM_TEXT]
Count = Annotated[int, Field(ge=1), FROM_TEXT]
Positive = Annotated[float, Field(gt=0), FROM_TEXT]
Fraction = Annotated[float, Field(ge=0, le=1), FROM_TEXT]
Name = Annotated[str, Field(pattern=NAME)]
Bytes = Annotated[
    int,
    Field(ge=1, le=LARGEST),
    _only("a number of bytes, at least 1, or text such as 512MiB or 4GB", _size),
    WithJsonSchema(_BYTES_SCHEMA),
]
ConfiguredPath = Annotated[
    Path,
    _only("a path without control characters, { and }, which are Snakemake's wildcards", _path),
    WithJsonSchema({"type": "string", "pattern": PATH}),
]
Date = Annotated[datetime.date, _only("a date such as '2024-07-26'", _date)]
_DISTINCT = Field(json_schema_extra={"uniqueItems": True})
LayerNumbers = Annotated[
    list[Natural], Field(min_length=1), _DISTINCT, AfterValidator(_all_different)
]
SampleIds = Annotated[
    list[Annotated[str, Field(pattern="^[0-9a-f]{32}$")]], _DISTINCT, AfterValidator(_all_different)
]
Layers = Annotated[
    Literal["eagle3"]
    | Annotated[dict[Literal["dflash"], Count], Field(min_length=1)]
    | Annotated[list[Natural], _DISTINCT, AfterValidator(_all_different)],
    _only("eagle3, {dflash: layers of the drafter} or a list of different layer numbers"),
    WrapValidator(_ascending),
]
Dtype = Literal["bfloat16", "float16", "float32"]
FinalNorm = Literal["post_norm", "pre_norm"]


def as_schema(section: type[Section], *, title: str) -> str:
    """Return the JSON schema of a section for people: as YAML, with units in sizes."""
    body = _readable(section.model_json_schema())
    parts = {"$defs": body.pop("$defs")}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    text = yaml.safe_dump(
        {**head, **body, **parts},
        sort_keys=False,
        allow_unicode=True,
        width=100,
        # a mapping or list that holds only scalars stands on one line
        default_flow_style=None,
    )
    return f"# Made by `make schema` from draftstates/config.py: change that file instead.\n{text}"


def _readable(node: Any) -> Any:
    """Return a part of a schema without the titles that pydantic makes, and sizes with units."""
    if isinstance(node, list):
        return [_readable(part) for part in node]
    if not isinstance(node, dict):
        return node
    readable = {
        name: _readable(node[name])
        # people read the description first
        for name in sorted(node, key=lambda name: name != "description")
        if not (name == "title" and isinstance(node[name], str))
    }
    if isinstance(node.get("default"), int) and node.get("anyOf") == _BYTES_SCHEMA["anyOf"]:
        readable["default"] = _with_unit(node["default"])
    return readable


def _with_unit(size: int) -> str:
    unit = max((unit for unit in _BINARY if size % _BINARY[unit] == 0), key=_BINARY.__getitem__)
    return f"{size // _BINARY[unit]}{unit}"

"""Documents: records that have a JSON file of their own.

pydantic compares the file with the record's annotations.
"""

import functools
import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

import xxhash
from pydantic import (
    ConfigDict,
    FailFast,
    GetCoreSchemaHandler,
    Strict,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import CoreSchema

from draftstates.config_problems import key_path
from draftstates.errors import UserError
from draftstates.files import publish_json, read_document

_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "dataclass_type": "an object",
}
_SHOWN = 60
_Item = TypeVar("_Item")
# a JSON list as a tuple; a column of a million values is refused for its first fault
Items = Annotated[tuple[_Item, ...], Strict(False), FailFast()]
_adapter = functools.cache(TypeAdapter)


class InvalidField(ValueError):
    """A value of a document that is not what its record declares.

    Attributes:
        problem: what was expected and what was found.
        place: names and indices that lead to the value.
    """

    def __init__(self, problem: str, *place: str | int) -> None:
        super().__init__(f"{key_path(place) or 'the document'}: {problem}")
        self.problem, self.place = problem, place


class Record:
    """A dataclass of a document, or of a part of one; other names in a JSON object are ignored."""

    __pydantic_config__: ClassVar = ConfigDict(strict=True)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        # fields are strict, but the record itself is read from a JSON object
        return {**handler(source), "strict": False}


class Document(Record):
    """A record that has a file of its own.

    Attributes:
        FORMAT: value of the file's field `format`.
        VERSION: value of its field `format_version`.
        WHAT: noun for messages.
        SEALED: whether the file holds a digest of itself, so that a later change is noticed.
    """

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int] = 2
    WHAT: ClassVar[str]
    SEALED: ClassVar[bool] = False

    @classmethod
    def remedy(cls, path: Path) -> str:
        """Return what the user does about a file that cannot be used, with the command."""
        raise NotImplementedError

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file.

        Raises:
            UserError: it cannot be read, has another format or version, was changed since it was
                written, or a field is missing or of another type.
        """
        remedy = cls.remedy(path)
        document = read_document(
            path, what=cls.WHAT, format=cls.FORMAT, version=cls.VERSION, remedy=remedy
        )
        if cls.SEALED and document.get("digest") != (digest := sealed(document)["digest"]):
            raise UserError(
                f"{path}: changed since it was written: expected digest {digest} of its content,"
                f" found {document.get('digest')}; {remedy}"
            )
        try:
            return cls.from_document(document)
        except (InvalidField, UserError) as error:
            raise UserError(f"{path}: expected {cls.WHAT}: {error}; {remedy}") from error

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Self:
        """Return the record of a document.

        Raises:
            InvalidField: a field is missing or of another type.
            UserError: fields that do not go together.
        """
        try:
            return _adapter(cls).validate_python(document)
        except ValidationError as error:
            raise _first_problem(error) from None

    def document(self) -> dict[str, Any]:
        """Return the record as its file holds it."""
        # fields that hold their default, None, are left out
        fields = _adapter(type(self)).dump_python(self, mode="json", exclude_defaults=True)
        content = {"format": self.FORMAT, "format_version": self.VERSION, **fields}
        return sealed(content) if self.SEALED else content

    def publish(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        publish_json(self.document(), path)


def sealed(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document with a digest of all its other fields."""
    content = {name: value for name, value in document.items() if name != "digest"}
    text = json.dumps(content, sort_keys=True)
    return {**content, "digest": xxhash.xxh3_128_hexdigest(text.encode())}


def _first_problem(error: ValidationError) -> InvalidField:
    """Return the first fault that pydantic found."""
    details = error.errors(include_url=False)[0]
    place, kind = details["loc"], details["type"]
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, InvalidField):
        return InvalidField(cause.problem, *place, *cause.place)
    if kind == "missing":
        return InvalidField("expected a value, found none", *place)
    expected = f"expected {_EXPECTED[kind]}" if kind in _EXPECTED else details["msg"]
    shown = repr(details["input"])
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
    return InvalidField(f"{expected}, found {shown}", *place)

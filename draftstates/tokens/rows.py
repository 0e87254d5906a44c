"""The reader of a source's rows, and the reasons why a row gives no sample.

Rows are read one by one in bounded memory, from files of any supported kind.
"""

import dataclasses
import io
import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftstates.errors import UserError
from draftstates.tokens.hub_data import is_record, open_record
from draftstates.tokens.sources import COMPRESSED, SAVED

# reasons why a row gives no sample: a closed list, so that the accounting can be read
REASONS = {
    "broken_json": "the row is not valid JSON",
    "too_deep": "the row nests lists or objects more than 100 levels deep",
    "too_large": "the row is larger than 256 MiB",
    "not_an_object": "the row is not an object with named columns",
    "unknown_format": "none of the known column layouts fits the row",
    "bad_columns": "a column does not hold what it must",
    "empty": "there are no messages",
    "bad_message": "a message is not an object with a role and text",
    "unknown_role": "a message has a role that is none of the known ones",
    "bad_tools": "the tools or tool calls are not what the chat format allows",
    "bad_text": "the text holds lone surrogates, which no tokenizer can encode",
    "no_assistant": "there is no assistant turn with a message before it",
    "not_rendered": (
        "the chat template would leave something out without a word: a role, reasoning, the tools,"
        " tool calls or text"
    ),
    "template_error": "the chat template refused the conversation",
    "prompt_not_prefix": (
        "the template's generation prompt is not the beginning of the turn as the template"
        " renders it"
    ),
    "no_turn_end": "the template does not close an assistant turn with an end token",
    "rewritten_history": (
        "the template renders a turn in another way once it is history, and the configuration says"
        " skip"
    ),
    "no_supervised_tokens": "no token after the first is supervised",
    "doubled_bos": "the sample begins with two beginning-of-sequence tokens",
    "bad_tokens": "token ids or mask are not numbers in range, or differ in length",
    "too_long": "more tokens than max_tokens",
    "duplicate": "another row of the source gave the same tokens and mask",
    "not_sampled": "left out by the source's weight",
    "no_prompt": "there is no message that the target model could answer",
    "truncated": "the answer was cut at its most tokens, and the configuration says skip",
    "degenerate": (
        "the answer is empty, and so it is where it ends without text or repeats one token and the"
        " configuration says skip_degenerate"
    ),
}

# Reasons that say nothing about the row's quality; they do not count towards
# `max_skipped_fraction`.
BENIGN = frozenset({"too_long", "duplicate", "not_sampled", "truncated", "degenerate"})
_CHUNK = 1 << 20
# deeper rows would exceed Python's stack in one step or another
_MOST_LEVELS = 100
# a row is held in memory
_MOST_BYTES = 256 << 20
_BATCH_ROWS = 256
_BATCH_VALUES = 1 << 20
_BLANK = re.compile(r"[ \t\r\n]*")


class RowSkipped(Exception):
    """A row that gives no sample.

    Attributes:
        reason: a key of `REASONS`.
        detail: what was expected and what was found.
        kinds: kinds of content that are not rendered, where that is the reason.
    """

    def __init__(self, reason: str, detail: str, kinds: tuple[str, ...] = ()) -> None:
        # all arguments: without them the error could not be pickled between processes
        super().__init__(reason, detail, kinds)
        self.reason = reason
        self.detail = detail
        self.kinds = kinds

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


def shown(value: object, limit: int = 60) -> str:
    """Return the `repr` of a value from a dataset, short enough for a message."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise RowSkipped(
            "broken_json", f"expected each key once, found {shown(twice)} twice in one object"
        )
    return found


# a decoder that is made once is as fast as json's own
_DECODER = json.JSONDecoder(object_pairs_hook=_with_each_key_once)
_PLAIN_DECODER = json.JSONDecoder()


def parse_json(text: str | bytes) -> Any:
    """Return the value of JSON text.

    Args:
        text: the text; bytes are UTF-8, with or without a mark of that.

    Raises:
        RowSkipped: `broken_json`: an object has a key twice, and only one value could be read;
            `too_deep`: it is nested too deeply.
        ValueError: it is not JSON.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise _too_deep() from None
    _check_levels(value, text)
    return value


def _check_levels(value: object, text: str, start: int = 0, end: int | None = None) -> None:
    """Refuse a value that is nested too deeply.

    Args:
        value: the value.
        text: the value's JSON is text[start:end].

    Raises:
        RowSkipped: `too_deep`.
    """
    if text.count("[", start, end) + text.count("{", start, end) <= _MOST_LEVELS:
        return
    level = [value]
    for _ in range(_MOST_LEVELS + 1):
        level = [
            inner
            for item in level
            if isinstance(item, (dict, list))
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> RowSkipped:
    return RowSkipped("too_deep", f"expected at most {_MOST_LEVELS} levels, found more")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One row of a source.

    Attributes:
        number: number of the row, from 0 over all files of the source.
        where: file and line (or row), for people.
        value: the row's object; or JSON text that is still to be parsed (bytes); or, for a row that
            cannot be read, the reason.
    """

    number: int
    where: str
    value: dict[str, Any] | bytes | RowSkipped | object


def read_rows(paths: list[Path], *, limit: int | None = None) -> Iterator[Row]:
    """Yield the rows of the files, in order, at most `limit`.

    A file holds JSON lines, a JSON array (both also .gz and .zst), Parquet or Arrow; a folder is
    one that `save_to_disk` made. A blank line is not a row. A line that is not JSON, or too large,
    gives a row with the reason; a damaged Parquet or Arrow file is an error.

    Raises:
        UserError: a file is missing, not a regular file, of an unknown kind, compressed but empty,
            cannot be read, or changed while it was read.
    """
    number = 0
    for path in paths:
        try:
            _check_kind(path)
            before = path.stat()
            for place, value in _read_file(path):
                yield Row(number, f"{path}, {place}", value)
                number += 1
                if number == limit:
                    return
            _check_unchanged(path, before)
        except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
            raise UserError(f"{path}: cannot be read: {error}") from error


def _check_kind(path: Path) -> None:
    """Refuse a path whose reading might not end.

    A pipe would wait for a writer; a device might never end.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file")
    if not (path.is_file() or path.is_dir()):
        raise UserError(
            f"{path}: expected a regular file, found a pipe, socket or device: write its content to"
            " a file first"
        )
    if path.suffix in COMPRESSED and not path.stat().st_size:
        raise UserError(
            f"{path}: expected compressed data, found an empty file: get it again, or leave it out"
        )


def _check_unchanged(path: Path, before: os.stat_result) -> None:
    """Refuse a file that another program wrote to while it was read, such as a download."""
    after = path.stat()
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise UserError(
            f"{path}: expected a complete file, found one that changed while it was read, from"
            f" {before.st_size:,} to {after.st_size:,} bytes: wait until it is written, and run"
            " again"
        )


def _read_file(path: Path) -> Iterator[tuple[str, object]]:
    if path.is_dir():
        return _read_folder(path)
    kind = path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix
    if kind in (".jsonl", ".ndjson"):
        return _read_lines(_open_text(path))
    if kind == ".json":
        return _read_hub(path) if is_record(path) else _read_json(path)
    if path.suffix in (".parquet", ".pq"):
        return _numbered(pq.ParquetFile(path).iter_batches(batch_size=_BATCH_ROWS))
    if path.suffix in (".arrow", ".feather"):
        return _numbered(_arrow_batches(path))
    raise UserError(
        f"{path}: expected .jsonl, .ndjson, .json (also .gz, .zst), .parquet, .arrow or a"
        " save_to_disk folder"
    )


def _read_hub(path: Path) -> Iterator[tuple[str, object]]:
    table = open_record(path).with_format("arrow")
    return _numbered(table.iter(batch_size=_BATCH_ROWS))


def _open_text(path: Path) -> io.BufferedReader:
    """Open a file of text.

    Raises:
        UserError: the text is UTF-16 or UTF-32.
    """
    file = io.BufferedReader(pa.input_stream(str(path), compression="detect"))
    beginning = file.peek(_CHUNK)[:64]
    # JSON holds no zero byte, and text of two bytes a character holds many
    if beginning.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in beginning:
        raise UserError(
            f"{path}: expected text in UTF-8, found UTF-16 or UTF-32; run: iconv --from-code UTF-16"
            f" --to-code UTF-8 {shlex.quote(str(path))} > {shlex.quote(path.stem + '.utf8.jsonl')}"
        )
    return file


def _read_lines(file: io.BufferedReader) -> Iterator[tuple[str, bytes | RowSkipped]]:
    line = 0
    while text := file.readline(_MOST_BYTES + 1):
        line += 1
        if len(text) > _MOST_BYTES:
            while text and not text.endswith(b"\n"):
                text = file.readline(_CHUNK)
            limit = f"expected at most {_MOST_BYTES >> 20} MiB"
            yield f"line {line}", RowSkipped("too_large", limit)
        elif text := text.strip():
            yield f"line {line}", text


def _read_json(path: Path) -> Iterator[tuple[str, object]]:
    file = _open_text(path)
    if file.peek(_CHUNK).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
        return _read_array(path, io.TextIOWrapper(file, encoding="utf-8-sig"))
    return _read_lines(file)


def _read_array(path: Path, file: io.TextIOWrapper) -> Iterator[tuple[str, object]]:
    """Yield the elements of one JSON array, parsed one at a time.

    Where the file is cut short, the last row holds the reason.
    """
    text = file.read(_CHUNK)
    while "[" not in text:
        text += file.read(_CHUNK)
    at, row = text.index("[") + 1, 0
    while True:
        at = _after_blank(text, at)
        if text[at : at + 1] == "]":
            break
        try:
            value, end = _next_element(text, at)
        except RecursionError:
            raise UserError(
                f"{path}: row {row} of the array: {_too_deep().detail}: {shown(text[at : at + 80])}"
            ) from None
        if end is None:
            if len(text) - at > _MOST_BYTES:
                raise UserError(
                    f"{path}: row {row} of the array: expected a row of at most {_MOST_BYTES:,}"
                    f" characters, found more, or no JSON: {shown(text[at : at + 80])}"
                )
            more = file.read(max(_CHUNK, len(text) - at))
            text, at = text[at:] + more, 0
            if more:
                continue
            if text.rstrip().endswith("]"):
                raise UserError(f"{path}: row {row} of the array is not JSON: {shown(text)}")
            yield (
                f"row {row}",
                RowSkipped(
                    "broken_json", f"the file is cut short in the middle of a row: {shown(text)}"
                ),
            )
            return
        yield f"row {row}", value
        row += 1
        at = end + (text[end] == ",")
    if (text[at + 1 :] + file.read(_CHUNK)).strip():
        raise UserError(f"{path}: expected nothing after the array, found more text")


def _after_blank(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    return found.end() if found else at


def _next_element(text: str, at: int) -> tuple[object, int | None]:
    """Return the element at `at` and the place of the separator behind it.

    The place is None where more text is needed to find it.

    Raises:
        RecursionError: the element is nested too deeply to find its end.
    """
    value: object
    try:
        value, end = _DECODER.raw_decode(text, at)
        _check_levels(value, text, at, end)
    except RowSkipped as skipped:
        try:
            value, end = skipped, _PLAIN_DECODER.raw_decode(text, at)[1]
        except ValueError:
            return None, None
    except ValueError:
        return None, None
    end = _after_blank(text, end)
    return (value, end) if text[end : end + 1] in (",", "]") and end < len(text) else (None, None)


def _arrow_batches(path: Path) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(str(path)) as source:
        try:
            reader: Any = pa.ipc.open_file(source)
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        except pa.ArrowInvalid:
            source.seek(0)
            batches = iter(pa.ipc.open_stream(source))
        yield from batches


def _read_folder(path: Path) -> Iterator[tuple[str, object]]:
    from datasets import Dataset, load_from_disk

    saved = [path / name for name in SAVED if (path / name).is_file()]
    for file in saved:
        _check_mapping(file)
    try:
        dataset = load_from_disk(str(path))
    except FileNotFoundError as error:
        raise UserError(f"{path}: expected a folder made by save_to_disk: {error}") from error
    except (
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:
        # the files hold JSON, but not the JSON that save_to_disk writes
        files = " or ".join(map(str, saved))
        raise UserError(
            f"{files}: not as save_to_disk writes it, save the dataset again: {error!r}"
        ) from error
    if not isinstance(dataset, Dataset):
        raise UserError(
            f"{path}: holds several splits, name one of them:"
            f" {', '.join(str(path / split) for split in dataset)}"
        )
    table = dataset.with_format("arrow")
    return _numbered(table.iter(batch_size=_BATCH_ROWS))


def _check_mapping(file: Path) -> None:
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{file}: expected JSON as save_to_disk writes it, save the dataset again: {error}"
        ) from error
    if not isinstance(found, dict):
        raise UserError(
            f"{file}: expected a JSON object as save_to_disk writes it, found {shown(found)}: save"
            " the dataset again"
        )


def _numbered(batches: Iterator[pa.RecordBatch | pa.Table]) -> Iterator[tuple[str, object]]:
    """Yield the rows of batches, few of which are Python's objects at a time."""
    row = 0
    for batch in batches:
        # offsets of a damaged file may lead outside of its memory
        batch.validate(full=True)
        step = max(1, min(_BATCH_ROWS, _BATCH_VALUES // max(1, batch.num_columns)))
        for start in range(0, batch.num_rows, step):
            for value in batch.slice(start, step).to_pylist():
                yield f"row {row}", _without_fill(value)
                row += 1


def _without_fill(value: Any) -> Any:
    """Return a value without the keys that its row did not have.

    A column gives every struct every key. A key that the row did not have is None, and must not be
    rendered.
    """
    if isinstance(value, dict):
        return {key: _without_fill(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        if value and all(isinstance(item, tuple) for item in value):
            # a column of maps, as Arrow gives it
            return _without_fill(dict(value))
        return [_without_fill(item) for item in value]
    return value

"""JSON of rows: an object with a key twice is no row, since one of the values would be lost."""

import json

import pytest
from token_kit import chat, run_source

from draftstates.errors import UserError
from draftstates.tokens.conversations import parse_row
from draftstates.tokens.rows import RowSkipped, parse_json, read_rows

TWICE = '{"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "L"%s}]}'
GOOD = {"messages": chat("Q", "A")}


@pytest.mark.parametrize(
    ("line", "key"),
    [
        (TWICE % ', "content": "A"', "content"),
        (TWICE % ', "train": false, "train": true', "train"),
        ('{"messages": [], "messages": ' + json.dumps(GOOD["messages"]) + "}", "messages"),
        (json.dumps({"messages": '[{"role": "user", "role": "system"}]'}), "role"),
        (
            json.dumps(
                {
                    "messages": [
                        GOOD["messages"][0],
                        {
                            "role": "assistant",
                            "tool_calls": [{"name": "f", "arguments": '{"a": 1, "a": 2}'}],
                        },
                    ]
                }
            ),
            "a",
        ),
        (json.dumps({**GOOD, "tools": '[{"name": "f", "name": "g"}]'}), "name"),
    ],
)
def test_a_key_that_an_object_has_twice_is_named(line: str, key: str) -> None:
    with pytest.raises(RowSkipped, match=f"broken_json: expected each key once, found '{key}'"):
        parse_row(line.encode())


def test_rows_beside_one_with_a_key_twice_are_kept(demo_model, tmp_path) -> None:
    lines = [json.dumps(GOOD), TWICE % ', "content": "A"', json.dumps({"messages": chat("Q", "B")})]
    found = run_source(tmp_path, lines)
    assert (found["kept"], found["skipped"]) == (2, {"broken_json": 1})
    # in an array too
    (tmp_path / "rows.json").write_text(f"[{', '.join(lines)}]")
    rows = [row.value for row in read_rows([tmp_path / "rows.json"])]
    assert [isinstance(value, RowSkipped) for value in rows] == [False, True, False]
    assert rows[2] == {"messages": chat("Q", "B")}


@pytest.mark.parametrize("change", ["longer", "replaced"])
def test_a_file_that_is_written_while_it_is_read_is_refused(tmp_path, change: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n" * 3)
    rows = read_rows([path])
    next(rows)
    if change == "longer":
        with path.open("a") as file:
            file.write(json.dumps(GOOD)[:9])
    else:
        (tmp_path / "new").write_text(f"{json.dumps(GOOD)}\n" * 3)
        (tmp_path / "new").replace(path)
    with pytest.raises(UserError, match="rows.jsonl: expected a complete file, found one that"):
        list(rows)
    assert len(list(read_rows([path], limit=2))) == 2


def test_a_mark_of_utf8_is_no_text() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
    assert parse_json('{"a": {"b": 1}, "b": 2}') == {"a": {"b": 1}, "b": 2}

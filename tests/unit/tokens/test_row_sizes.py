"""Rows that are deep, large or wide: each is counted or refused by name, in bounded memory.

`tests/campaign/sizes.py` has the real sizes.
"""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from token_kit import chat, run_source, template, tokenizer_folder

from draftstates.errors import UserError
from draftstates.tokens import rows, tokenise
from draftstates.tokens.rows import REASONS, Row, RowSkipped, read_rows
from draftstates.tokens.sources import TokeniseOptions
from draftstates.tokens.tokenise import Pipeline

ASKED = '{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"'
CALL = '{"type": "function", "function": {"name": "f", "arguments": %s}}'
DEEP_ROWS = {
    "messages": '{"messages": %s}',
    "content": '{"messages": [{"role": "user", "content": %s}]}',
    "other column": '{"messages": [' + ASKED + '}], "other": %s}',
    "arguments": '{"messages": [' + ASKED + f', "tool_calls": [{CALL}]' + "}]}",
    "tools": '{"messages": [' + ASKED + '}], "tools": [{"name": "f", "parameters": %s}]}',
    "template arguments": '{"messages": [' + ASKED + '}], "chat_template_kwargs": {"x": %s}}',
}


@pytest.fixture(scope="module")
def pipeline(demo_model: Path) -> Pipeline:
    made = Pipeline(tokenizer_folder("qwen3"), TokeniseOptions(max_tokens=64))
    made.__dict__["template"] = template("qwen3")
    return made


def nested(levels: int, kind: str) -> str:
    before, after = {"list": ("[", "]"), "object": ('{"a": ', "}")}[kind]
    return before * levels + "1" + after * levels


@pytest.mark.parametrize("kind", ["list", "object"])
@pytest.mark.parametrize("place", DEEP_ROWS)
@pytest.mark.parametrize("as_text", [False, True])
def test_a_row_of_any_depth_is_counted(
    pipeline: Pipeline, kind: str, place: str, as_text: bool
) -> None:
    for levels in (90, 101, 330, 480, 900, 1000, 100_000):
        deep = nested(levels, kind)
        text = DEEP_ROWS[place] % (json.dumps(deep) if as_text else deep)
        found = pipeline.process(Row(0, "here", text.encode()))
        assert bool(found.samples) != bool(found.skipped)
        if levels > 100 and not as_text:
            assert found.skipped.reason == "too_deep"
        assert found.skipped is None or found.skipped.reason in REASONS


def test_an_element_of_an_array_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("[1, " + nested(101, "list") + ", " + nested(100_000, "list") + "]")
    found = read_rows([path])
    assert next(found).value == 1
    assert isinstance(skipped := next(found).value, RowSkipped)
    assert skipped.reason == "too_deep"
    with pytest.raises(UserError, match=r"rows.json: row 2 of the array: expected at most 100 lev"):
        next(found)


@pytest.mark.parametrize("end", ["\n", ""])
def test_a_line_that_is_too_large_is_counted_and_the_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(rows, "_MOST_BYTES", 1000)
    monkeypatch.setattr(rows, "_CHUNK", 100)
    fitting = json.dumps({"messages": chat("q", "a" * 900)})
    fitting += " " * (999 - len(fitting))
    large = json.dumps({"messages": chat("q", "a" * 2000)})
    (tmp_path / "a.jsonl").write_text(f"{large}\n{fitting}\n{large}{end}")
    found = [row.value for row in read_rows([tmp_path / "a.jsonl"])]
    assert [isinstance(value, RowSkipped) and value.reason for value in found] == [
        "too_large",
        False,
        "too_large",
    ]
    assert found[1] == fitting.strip().encode()


def test_a_row_of_an_array_that_does_not_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_MOST_BYTES", 1000)
    monkeypatch.setattr(rows, "_CHUNK", 100)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"a": 1}, {"messages": chat("q", "a" * 5000)}]))
    found = read_rows([path])
    next(found)
    with pytest.raises(UserError, match=r"rows.json: row 1 of the array: .* at most 1,000 char"):
        next(found)


def test_few_values_of_a_wide_table_are_in_memory_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_BATCH_VALUES", 100)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({f"c{i}": list(range(10)) for i in range(40)}), path)
    found = [row.value for row in read_rows([path])]
    assert [value["c39"] for value in found] == list(range(10))


@pytest.mark.parametrize("workers", [1, 2])
def test_large_rows_are_handed_on_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(tokenise, "_CHUNK_BYTES", 300)
    lines = [{"messages": chat(f"q {i}", "a " * 50)} for i in range(9)]
    chunks = tokenise._chunked(Row(i, "", json.dumps(row).encode()) for i, row in enumerate(lines))
    assert max(map(len, chunks)) == 2
    assert run_source(tmp_path, lines, workers=workers)["kept"] == 9


def test_a_text_that_cannot_fit_is_not_encoded(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = pipeline.template
    huge = "x" * (loaded.most_characters * 64 + 1)
    encode = loaded.rendering._encoder.encode

    def encode_short(text: str) -> object:
        assert len(text) < len(huge), "the text was encoded"
        return encode(text)

    monkeypatch.setattr(loaded.rendering._encoder, "encode", encode_short)
    row = Row(0, "here", json.dumps({"messages": chat("q", "a", huge, "b")}).encode())
    assert pipeline.process(row).skipped.reason == "too_long"
    cutting = Pipeline(tokenizer_folder("qwen3"), TokeniseOptions(max_tokens=64, over_long="cut"))
    cutting.__dict__["template"] = loaded
    found = cutting.process(row)
    assert len(found.samples) == 1
    assert found.lost_turns == ("too_long",)
    assert "turns left out: too_long" in found.not_used

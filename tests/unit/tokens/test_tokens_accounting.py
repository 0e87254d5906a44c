"""Rows in = kept + skipped(reason); nothing is lost without a reason, and nothing half-done has a
final name.
"""

import json
import multiprocessing
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest
from token_kit import REPOSITORY, chat, run_source, template, tokenizer_folder

from draftstates.config import load
from draftstates.documents import sealed
from draftstates.errors import NO_SECOND_ATTEMPT, UserError
from draftstates.files import file_checksum
from draftstates.ids import sample_id
from draftstates.tokens import tokenise as tokeniser
from draftstates.tokens.conversations import Conversation
from draftstates.tokens.sources import TokeniseOptions, source_options
from draftstates.tokens.tokenise import tokenise_source


@pytest.fixture(autouse=True)
def loaded_once(demo_model, monkeypatch) -> None:
    """Loading a tokenizer takes longer than all else here."""
    monkeypatch.setattr(tokeniser, "ChatTemplate", lambda folder, **_: template("smollm2"))


GOOD = {"messages": chat("Hi", "Hello")}
BAD = {
    '{"messages": [': "broken_json",
    "[1, 2]": "not_an_object",
    '{"text": "plain"}': "unknown_format",
    '{"messages": "Hi"}': "bad_columns",
    '{"messages": []}': "empty",
    '{"messages": ["Hi"]}': "bad_message",
    '{"messages": [{"role": "user", "content": 7}, {"role": "assistant", "content": "x"}]}': (
        "bad_message"
    ),
    '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": null}]}': (
        "bad_message"
    ),
    '{"messages": [{"role": "narrator", "content": "x"}]}': "unknown_role",
    '{"messages": [{"role": "user", "content": "x"}]}': "no_assistant",
    '{"messages": [{"role": "user", "content": "\\ud800"},'
    ' {"role": "assistant", "content": "x"}]}': ("bad_text"),
    json.dumps({"messages": chat("x", "word " * 3000)}): "too_long",
    json.dumps({"messages": chat("x", "y"), "tools": "no list"}): "bad_tools",
    json.dumps(
        {"messages": chat("x", "y"), "tools": [{"type": "function", "function": {"name": "f"}}]}
    ): "not_rendered",
    json.dumps({"input_ids": [1, 2, 3], "loss_mask": [0, 1]}): "bad_tokens",
    json.dumps({"input_ids": [1, -2], "loss_mask": [0, 1]}): "bad_tokens",
    json.dumps({"input_ids": [1, 10**12], "loss_mask": [0, 1]}): "bad_tokens",
    json.dumps({"input_ids": [1, None], "loss_mask": [0, 1]}): "bad_tokens",
    json.dumps({"input_ids": [1, 2], "loss_mask": [0, 2]}): "bad_tokens",
    json.dumps({"input_ids": [1, 2], "loss_mask": [1, False]}): "no_supervised_tokens",
    json.dumps({"input_ids": [1, 2], "loss_mask": [0, 0]}): "no_supervised_tokens",
    json.dumps({"input_ids": [1, 1, 2], "loss_mask": [0, 0, 1]}): "doubled_bos",
    json.dumps(GOOD): "duplicate",
}


@pytest.mark.parametrize(("line", "reason"), BAD.items(), ids=lambda value: value[:40])
def test_a_bad_row_is_skipped_with_its_reason(tmp_path, line: str, reason: str) -> None:
    counts = run_source(tmp_path, [GOOD, line])
    assert counts["skipped"] == {reason: 1}
    assert (counts["rows_in"], counts["kept"]) == (2, 1)
    (example,) = counts["examples"]
    assert (example["row"], example["reason"]) == (1, reason)
    assert example["where"].endswith("rows.jsonl, line 2")
    assert example["detail"]


def test_the_sum_closes_over_all_reasons_and_workers_do_not_matter(tmp_path) -> None:
    rows = [GOOD, *BAD] + [{"messages": chat(f"Question {n}", f"Answer {n}")} for n in range(300)]
    results = []
    for workers in (1, 2):
        counts = run_source(tmp_path, rows, workers=workers)
        assert counts["rows_in"] == len(rows) == counts["kept"] + sum(counts["skipped"].values())
        assert counts["kept"] == 301
        results.append((counts, pq.read_table(tmp_path / "test.parquet")))
    assert results[0][0] == results[1][0]
    assert results[0][1].equals(results[1][1])


def test_samples_lie_in_the_sources_order_under_their_content_hash(tmp_path) -> None:
    rows = [{"messages": chat(f"Question {n}", f"Answer {n}")} for n in (3, 1, 2)]
    run_source(tmp_path, [rows[0], "broken", rows[1], rows[2]])
    table = pq.read_table(tmp_path / "test.parquet").to_pylist()
    assert [(entry["row"], entry["part"]) for entry in table] == [(0, 0), (2, 0), (3, 0)]
    assert all(
        entry["sample_id"] == sample_id(entry["input_ids"], entry["loss_mask"]) for entry in table
    )


def test_accounting_file_holds_what_is_returned(tmp_path) -> None:
    counts = run_source(tmp_path, [GOOD, "broken"])
    written = json.loads((tmp_path / "test.json").read_text())
    assert written == sealed({**counts, "checksum": file_checksum(tmp_path / "test.parquet")})
    table = pq.read_table(tmp_path / "test.parquet").to_pylist()
    assert counts["samples"] == len(table)
    assert counts["tokens"] == sum(len(entry["input_ids"]) for entry in table)
    assert counts["supervised_tokens"] == sum(sum(entry["loss_mask"]) for entry in table)


def test_duplicates_are_kept_where_the_configuration_says_so(tmp_path) -> None:
    assert run_source(tmp_path, [GOOD, GOOD], deduplicate=False)["kept"] == 2


def test_the_screen_shows_every_row_every_turn_left_out_and_every_cut(tmp_path, capsys) -> None:
    turns = ["Hi", "Hello", "Go on", "word " * 60]
    run_source(
        tmp_path,
        [
            GOOD,
            "broken",
            {"messages": chat(*turns, "x", "y")},
            {"messages": chat("a", "b", "c", "\ud800")},
        ],
        max_tokens=64,
        over_long="cut",
    )
    shown = capsys.readouterr().err
    assert "test: 4 rows in, 3 kept, 1 broken_json; 3 samples, " in shown
    assert "; turns of kept rows left out: 1 bad_text; 1 samples cut; " in shown


def test_too_many_bad_rows_stop_the_run_and_leave_nothing(tmp_path) -> None:
    rows = [GOOD, {"messages": chat("Hi", "Bye")}, "broken"]
    assert run_source(tmp_path, rows, max_skipped_fraction=0.34)["kept"] == 2
    for file in ("test.parquet", "test.json"):
        (tmp_path / file).unlink()
    with pytest.raises(UserError, match=r"1 of 3 rows are bad.*\n.*broken_json.*line 3"):
        run_source(tmp_path, rows, max_skipped_fraction=0.33)
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


def test_duplicates_and_over_long_rows_are_not_bad_rows(tmp_path) -> None:
    rows = [GOOD, GOOD, GOOD, {"messages": chat("x", "word " * 3000)}]
    assert run_source(tmp_path, rows, max_skipped_fraction=0.0)["kept"] == 1


@pytest.mark.parametrize(
    "rows", [[], ["", "   "], ["broken"]], ids=["no rows", "blank lines", "bad rows"]
)
def test_nothing_kept_is_an_error(tmp_path, rows: list[str]) -> None:
    with pytest.raises(UserError, match="not one of . rows is kept"):
        run_source(tmp_path, rows)


def test_a_missing_file_is_named(tmp_path) -> None:
    arguments = {
        "name": "s",
        "tokenizer_path": tokenizer_folder("smollm2"),
        "options": TokeniseOptions(max_tokens=64),
    }
    with pytest.raises(UserError, match="nowhere.jsonl: no such file"):
        tokenise_source(
            paths=[tmp_path / "nowhere.jsonl"],
            output=tmp_path / "o.parquet",
            accounting=tmp_path / "a.json",
            **arguments,
        )
    assert list(tmp_path.iterdir()) == []


def test_the_examples_keep_what_is_good_and_name_what_is_bad(tmp_path) -> None:
    paths, options = source_options(load(REPOSITORY / "config.yaml"), "demo")
    counts = tokenise_source(
        name="demo",
        paths=[REPOSITORY / path for path in paths],
        tokenizer_path=tokenizer_folder("smollm2"),
        options=options,
        output=tmp_path / "demo.parquet",
        accounting=tmp_path / "demo.json",
    )
    assert counts["kept"] >= 60
    reasons = (
        "bad_message",
        "broken_json",
        "duplicate",
        "empty",
        "no_assistant",
        "not_an_object",
        "too_long",
        "unknown_role",
    )
    assert counts["skipped"] == dict.fromkeys(reasons, 1)
    assert 10_000 < counts["tokens"] < 20_000


def test_a_killed_run_leaves_nothing_under_a_final_name(tmp_path) -> None:
    rows = [{"messages": chat(f"q{n}", "a")} for n in range(30_000)]
    process = multiprocessing.get_context("fork").Process(target=run_source, args=(tmp_path, rows))
    process.start()
    try:
        while not list(tmp_path.glob(".test.parquet.*.tmp")):
            assert process.is_alive()
            time.sleep(0.05)
    finally:
        process.kill()
        process.join()
    assert not (tmp_path / "test.parquet").exists()
    assert not (tmp_path / "test.json").exists()


def test_the_command_reports_an_error_in_one_line(tmp_path) -> None:
    config, data = (
        tmp_path / "config.yaml",
        {"sources": [{"name": "s", "files": ["x.jsonl"]}], "max_tokens": 64},
    )
    config.write_text(json.dumps({"data": data, "model": {"path": "m"}, "capture": {}}))
    command = [
        sys.executable,
        REPOSITORY / "scripts" / "tokenise.py",
        "--source",
        "other",
        "--config",
        config,
    ]
    command += ["--tokenizer", tmp_path, "--output", tmp_path / "o", "--accounting", tmp_path / "a"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: data.sources: no source named 'other'; there are s",
        NO_SECOND_ATTEMPT,
    ]


def test_rows_with_reasoning_and_tools_are_counted(tmp_path) -> None:
    thought = {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}
    called = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": []},
    ]
    rows = [
        Conversation(
            [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
        ),
        Conversation([{"role": "user", "content": "2 + 2"}, thought]),
        Conversation([{"role": "assistant", "content": "<think>Hm</think>4"}], tools=[{}]),
        Conversation([*called, {"role": "tool", "content": "Sun"}]),
    ]
    assert [row.kinds[1:] for row in rows] == [
        (),
        ("with_reasoning",),
        ("with_reasoning", "with_tools"),
        ("with_tools",),
    ]
    accounting = run_source(tmp_path, [GOOD, {"messages": []}])
    counted = {name: accounting[name] for name in ("conversations", "with_reasoning", "with_tools")}
    assert counted == {"conversations": 1, "with_reasoning": 0, "with_tools": 0}

"""Whatever a dataset's files and columns are like, the same conversations give the same samples."""

import gzip
import json
import os
import shutil
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from token_kit import chat, template, tokenizer_folder

from draftstates.errors import UserError
from draftstates.tokens import rows as module
from draftstates.tokens.conversations import Conversation, TokenRow, parse_row
from draftstates.tokens.rows import RowSkipped, read_rows
from draftstates.tokens.sources import TokeniseOptions
from draftstates.tokens.tokenise import Pipeline

ROWS = [{"messages": chat(f"Question {n}", f"Answer {n} ✓"), "n": n} for n in range(700)]


def written(folder, kind: str):
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    path = folder / f"rows.{kind}"
    if kind == "saved":
        Dataset.from_list(ROWS).save_to_disk(path)
    elif kind == "shuffled":
        Dataset.from_list(ROWS[::-1]).select(range(len(ROWS) - 1, -1, -1)).save_to_disk(path)
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=100)
    elif kind in ("arrow", "feather"):
        table = pa.Table.from_pylist(ROWS)
        make = pa.ipc.new_stream if kind == "arrow" else pa.ipc.new_file
        with make(path, table.schema) as writer:
            writer.write_table(table)
    elif kind.startswith("json") and not kind.startswith("jsonl"):
        pack(path, json.dumps(ROWS, indent=1))
    else:
        pack(path, lines)
    return path


def pack(path, text: str) -> None:
    with pa.output_stream(path, compression="detect") as file:
        file.write(text.encode())


KINDS = [
    "jsonl",
    "ndjson",
    "jsonl.gz",
    "jsonl.zst",
    "json",
    "json.gz",
    "json.zst",
    "parquet",
    "arrow",
    "feather",
    "saved",
    "shuffled",
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, monkeypatch, kind: str) -> None:
    # so that a JSON array is read in many pieces
    monkeypatch.setattr(module, "_CHUNK", 4096)
    found = list(read_rows([written(tmp_path, kind)]))
    assert [row.number for row in found] == list(range(len(ROWS)))
    assert [parse_row(row.value).messages for row in found] == [row["messages"] for row in ROWS]


def test_several_files_are_one_source_and_the_limit_counts_over_all(tmp_path) -> None:
    paths = [written(tmp_path, "jsonl"), written(tmp_path, "parquet")]
    assert [row.number for row in read_rows(paths)] == list(range(1400))
    assert [row.where for row in read_rows(paths, limit=702)][-2:] == [
        f"{paths[1]}, row 0",
        f"{paths[1]}, row 1",
    ]


def test_a_json_file_of_objects_one_a_line_is_read_as_lines(tmp_path) -> None:
    (tmp_path / "rows.json").write_text('{"a": 1}\n{"a": 2}\n')
    assert [json.loads(row.value) for row in read_rows([tmp_path / "rows.json"])] == [
        {"a": 1},
        {"a": 2},
    ]


@pytest.mark.parametrize("value", [7, "text", [1, [2]], {"a": {"b": "]"}}, None, 1.5e3, "é\\u00e9"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 1 << 20])
def test_an_array_may_break_anywhere_between_two_reads(
    tmp_path, monkeypatch, value: object, chunk: int
) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([value, 12345, value]).replace(", ", "  ,\n  ", 1) + "\n")
    assert [row.value for row in read_rows([path])] == [value, 12345, value]
    path.write_text(" [ ] ")
    assert list(read_rows([path])) == []


def test_an_array_that_is_cut_short_keeps_its_rows_and_says_so(tmp_path) -> None:
    text = json.dumps(ROWS[:3])
    (tmp_path / "rows.json").write_text(text[:-30])
    rows = [row.value for row in read_rows([tmp_path / "rows.json"])]
    assert rows[:2] == ROWS[:2]
    assert len(rows) == 3
    with pytest.raises(RowSkipped, match="broken_json: the file is cut short"):
        parse_row(rows[2])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "rows.json",
            b'[{"a": 1}, {broken}, {"a": 2}]',
            r"rows.json: row 1 of the array is not JSON: '\{broken\}",
        ),
        ("rows.json", b'[{"a": 1}] {"a": 2}', "rows.json: expected nothing after the array"),
        ("rows.json", b'[{"a": "\xff"}]', "rows.json: cannot be read"),
        ("rows.parquet", b"PAR1 nothing", "rows.parquet: cannot be read"),
        (
            "rows.jsonl.gz",
            gzip.compress(b'{"a": 1}\n', mtime=0)[:-6],
            "rows.jsonl.gz: cannot be read",
        ),
        ("rows.csv", b"a,b\n", "rows.csv: expected .jsonl"),
        ("rows.jsonl.gz", b"", "rows.jsonl.gz: expected compressed data, found an empty file"),
        ("rows.json.zst", b"", "rows.json.zst: expected compressed data, found an empty file"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(
    tmp_path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(read_rows([tmp_path / name]))


def test_an_empty_file_that_is_not_compressed_has_no_rows(tmp_path) -> None:
    """Writers of many parts leave some empty."""
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "none.jsonl.gz").write_bytes(gzip.compress(b""))
    assert list(read_rows([tmp_path / "rows.jsonl", tmp_path / "none.jsonl.gz"])) == []


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_what_might_never_end_is_refused_before_it_is_opened(
    tmp_path, monkeypatch, kind: str
) -> None:
    monkeypatch.setattr(module, "_open_text", lambda path: pytest.fail("opened"))
    # a socket's path must be short
    monkeypatch.chdir(tmp_path)
    path = Path("rows.jsonl")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    else:
        path.symlink_to(os.devnull)
    with pytest.raises(UserError, match="rows.jsonl: expected a regular file"):
        list(read_rows([path]))


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json"])
@pytest.mark.parametrize(
    "content",
    ['{"_data', "[]", "", "\xff", None],
    ids=["cut", "list", "empty", "not UTF-8", "wrong"],
)
def test_a_saved_dataset_whose_description_is_damaged_is_an_error_that_names_the_file(
    tmp_path, saved, name: str, content
) -> None:
    shutil.copytree(saved, tmp_path / "data")
    wrong = {"state.json": "{}", "dataset_info.json": '{"features": 3}'}
    (tmp_path / "data" / name).write_bytes(
        (wrong[name] if content is None else content).encode("latin-1")
    )
    with pytest.raises(UserError, match=f"{tmp_path}/data/{name}.*save the dataset again"):
        list(read_rows([tmp_path / "data"]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "data"
    Dataset.from_list(ROWS[:2]).save_to_disk(folder)
    return folder


def test_a_folder_of_several_splits_asks_for_one(tmp_path) -> None:
    DatasetDict(train=Dataset.from_list(ROWS[:2]), test=Dataset.from_list(ROWS[:2])).save_to_disk(
        tmp_path / "both"
    )
    with pytest.raises(
        UserError, match=r"several splits, name one of them: .*both/train, .*both/test"
    ):
        list(read_rows([tmp_path / "both"]))
    assert len(list(read_rows([tmp_path / "both" / "train"]))) == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="expected a folder made by save_to_disk"):
        list(read_rows([tmp_path / "empty"]))


def test_keys_that_columns_fill_in_are_not_rendered(tmp_path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"city": "Rome"}}}
    other = {"type": "function", "function": {"name": "f", "arguments": {"day": "Monday"}}}
    rows = [
        {
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": None, "tool_calls": [c]},
            ]
        }
        for c in (call, other)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = [parse_row(row.value).messages for row in read_rows([tmp_path / "rows.parquet"])]
    assert [messages[0] for messages in found] == [{"role": "user", "content": "x"}] * 2
    assert [messages[1]["tool_calls"] for messages in found] == [[call], [other]]


SYSTEM = {"role": "system", "content": "S"}
LAYOUTS = {
    "messages": {"messages": chat("Q", "A", system="S")},
    "parts": {"messages": [SYSTEM, *chat("Q", "A")], "source": "x"},
    "ShareGPT": {
        "conversations": [
            {"from": r, "value": v} for r, v in (("system", "S"), ("human", "Q"), ("gpt", "A"))
        ]
    },
    "ShareGPT, other names": {
        "conversation": [
            {"from": r, "value": v} for r, v in (("SYSTEM", "S"), ("User", "Q"), ("chatgpt", "A"))
        ]
    },
    "ShareGPT, system column": {
        "system": "S",
        "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}],
    },
    "Alpaca": {"system": "S", "instruction": "Q", "input": "", "output": "A"},
    "prompt and completion": {
        "prompt": [SYSTEM, {"role": "user", "content": "Q"}],
        "completion": "A",
    },
    "prompt and response": {
        "prompt": chat("Q", system="S"),
        "response": [{"role": "assistant", "content": "A"}],
    },
}


@pytest.mark.parametrize("row", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_gives_the_same_messages(row: dict) -> None:
    assert parse_row(row) == Conversation(chat("Q", "A", system="S"))
    assert parse_row(json.dumps(row).encode()) == parse_row(row)


def test_alpaca_input_follows_the_instruction() -> None:
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    assert parse_row(row) == Conversation(chat("Add.\n\n1 2", "3"))


def test_plain_prompt_and_completion() -> None:
    assert parse_row({"prompt": "Q", "completion": "A"}) == Conversation(chat("Q", "A"))


def test_columns_of_other_names() -> None:
    row = {"dialogue": [{"speaker": "human", "said": "Q"}, {"speaker": "gpt", "said": "A"}]}
    columns = {"messages": "dialogue", "role": "speaker", "content": "said"}
    assert parse_row(row, columns=columns) == Conversation(chat("Q", "A"))
    alpaca = {"task": "Q", "answer": "A"}
    assert parse_row(
        alpaca, layout="alpaca", columns={"instruction": "task", "output": "answer"}
    ) == Conversation(chat("Q", "A"))
    pair = {"q": "Q", "a": "A"}
    assert parse_row(pair, columns={"prompt": "q", "completion": "a"}) == Conversation(
        chat("Q", "A")
    )
    tokens = {"ids": [1, 2], "mask": [0, 1]}
    assert parse_row(tokens, columns={"input_ids": "ids", "loss_mask": "mask"}) == TokenRow(
        [1, 2], [0, 1]
    )


def test_sharegpt_calls_and_results() -> None:
    turns = [
        ("human", "Q"),
        ("function_call", '{"name": "f", "arguments": {"a": 1}}'),
        ("observation", "R"),
        ("gpt", "A"),
    ]
    row = {
        "conversations": [{"from": role, "value": text} for role, text in turns],
        "tools": '[{"type": "function"}]',
    }
    parsed = parse_row(row)
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert parsed.messages == [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "R"},
        {"role": "assistant", "content": "A"},
    ]
    assert parsed.tools == [{"type": "function"}]


@pytest.mark.parametrize("content", ["", None])
def test_arguments_as_text_become_an_object_and_no_content_is_empty_text(
    content: str | None,
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": content, "tool_calls": [call]}
    _, parsed = parse_row({"messages": [{"role": "user", "content": "Q"}, message]}).messages
    assert parsed["content"] == ""
    assert parsed["tool_calls"][0]["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"system": "S", "messages": chat("Q", "A", system="T")}, "bad_columns"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": "f()"}]}, "bad_tools"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}],
                    }
                ]
            },
            "bad_tools",
        ),
        ({"conversations": [{"from": "function_call", "value": "no JSON"}]}, "bad_tools"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "bad_message",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "reasoning_content": 7}]},
            "bad_message",
        ),
        ({"instruction": None, "output": "A"}, "bad_columns"),
        ({"prompt": "Q", "completion": 7}, "bad_columns"),
        ({"input_ids": "1 2", "loss_mask": [1]}, "bad_columns"),
    ],
)
def test_what_fits_no_layout_has_a_reason(row: dict, reason: str) -> None:
    with pytest.raises(RowSkipped) as caught:
        parse_row(row)
    assert caught.value.reason == reason


def test_rows_that_come_as_tokens_are_kept_as_they_are(demo_model) -> None:
    pipeline = Pipeline(tokenizer_folder("smollm2"), TokeniseOptions(max_tokens=8))
    pipeline.__dict__["template"] = template("smollm2")
    (row,) = [module.Row(0, "x", {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0]})]
    ((_, sample),) = pipeline.process(row).samples
    assert (sample.input_ids.tolist(), sample.loss_mask.tolist()) == ([5, 6, 7], [0, 1, 0])


def test_weight_keeps_a_share_by_content_whatever_the_format_and_the_other_rows(
    tmp_path, demo_model
) -> None:
    pipeline = Pipeline(tokenizer_folder("smollm2"), TokeniseOptions(max_tokens=128, weight=0.3))
    pipeline.__dict__["template"] = template("smollm2")

    def kept(kind: str, rows: list[int]) -> set[int]:
        found = list(read_rows([written(tmp_path, kind)]))
        return {
            row.number
            for row in (found[number] for number in rows)
            if pipeline.process(row).samples
        }

    everything = kept("jsonl", list(range(400)))
    assert 0.2 * 400 < len(everything) < 0.4 * 400
    assert kept("parquet", list(range(100, 400))) == {
        number for number in everything if number >= 100
    }

"""Sources of token rows, which need no template; rows that bring arguments for the template."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from token_kit import SMOLLM2, chat, run_source, tokenizer_folder

from draftstates.errors import UserError
from draftstates.tokens.sources import TokeniseOptions
from draftstates.tokens.tokenise import NO_RENDERER, tokenise_source


def run(folder: Path, rows: list[Any], *, tokenizer: Path, **options: Any) -> dict[str, Any]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tokenise_source(
        name="test",
        paths=[folder / "rows.jsonl"],
        tokenizer_path=tokenizer,
        options=TokeniseOptions(**{"max_tokens": 64, "max_skipped_fraction": 1.0, **options}),
        output=folder / "test.parquet",
        accounting=folder / "test.json",
    )


def tokens(*ids: int) -> dict[str, list[int]]:
    return {"input_ids": list(ids), "loss_mask": [0, *[1] * (len(ids) - 1)]}


@pytest.fixture
def without_tokenizer(tmp_path) -> Path:
    """Return the folder of a model that has no tokenizer."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 1000, "bos_token_id": 1}))
    return folder


@pytest.mark.parametrize("layout", ["auto", "tokens"])
def test_rows_of_tokens_need_no_template_and_no_tokenizer(
    tmp_path, without_tokenizer, layout
) -> None:
    rows = [tokens(1, 2, 999), tokens(1, 2, 1000), tokens(1, 1, 5)]
    found = run(tmp_path, rows, tokenizer=without_tokenizer, format=layout)
    assert (found["kept"], found["skipped"]) == (1, {"bad_tokens": 1, "doubled_bos": 1})
    assert found["renderer"] == NO_RENDERER


def test_ids_may_be_any_below_the_models_vocabulary(tmp_path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in tokenizer_folder("qwen3").glob("tokenizer*"):
        (model / file.name).symlink_to(file)
    (model / "config.json").write_text(json.dumps({"vocab_size": 151936}))
    # the tokenizer has 151,669 tokens
    found = run(tmp_path, [tokens(1, 151935), tokens(1, 151936)], tokenizer=model)
    assert (found["kept"], found["skipped"]) == (1, {"bad_tokens": 1})


def test_conversations_without_a_tokenizer_are_refused_at_once(tmp_path, without_tokenizer) -> None:
    with pytest.raises(UserError, match="expected a tokenizer"):
        run(tmp_path, [{"messages": chat("Hi", "Hello")}], tokenizer=without_tokenizer)


def test_what_rendered_is_recorded(tmp_path) -> None:
    found = run(tmp_path, [{"messages": chat("Hi", "Hello")}], tokenizer=SMOLLM2)
    assert found["renderer"] == json.loads((tmp_path / "test.json").read_text())["renderer"]
    metadata = pq.read_metadata(tmp_path / "test.parquet").metadata
    assert metadata[b"draftstates.renderer"] == b"template" == found["renderer"].encode()


# Arguments of rows.


def test_a_row_brings_arguments_for_the_template(tmp_path) -> None:
    messages = chat("Hi", "Hello")
    rows = [
        {"messages": messages},
        {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": messages, "chat_template_kwargs": '{"enable_thinking": false}'},
        {"messages": messages, "chat_template_kwargs": {"tokenize": True}},
        {"messages": messages, "chat_template_kwargs": "no"},
    ]
    found = run_source(tmp_path, rows, tokenizer="qwen3", deduplicate=False)
    assert (found["kept"], found["skipped"]) == (3, {"bad_columns": 2})
    assert found["not_used"] == {}
    samples = pq.read_table(tmp_path / "test.parquet").to_pylist()
    supervised = [sum(sample["loss_mask"]) for sample in samples]
    # without thoughts, the prompt holds the empty thought, and the model writes the answer alone
    assert supervised[1] == supervised[2] < supervised[0]


def test_the_column_may_have_another_name(tmp_path) -> None:
    rows = [{"messages": chat("Hi", "Hello"), "kwargs": {"enable_thinking": False}}]
    columns = {"chat_template_kwargs": "kwargs"}
    plain = run_source(tmp_path, rows, tokenizer="qwen3")
    named = run_source(tmp_path, rows, tokenizer="qwen3", columns=columns)
    assert (plain["not_used"], named["not_used"]) == ({"kwargs": 1}, {})
    assert named["supervised_tokens"] < plain["supervised_tokens"]


def test_a_rows_arguments_that_the_template_cannot_take(tmp_path) -> None:
    (tmp_path / "strict.jinja").write_text(
        "{% if style == 'bad' %}{{ raise_exception('no such style') }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rows = [{"messages": chat("Hi", "Hello"), "chat_template_kwargs": {"style": "bad"}}]
    rows.append({"messages": chat("Hi", "Hello")})
    found = run_source(tmp_path, rows, chat_template=tmp_path / "strict.jinja")
    assert found["skipped"] == {"template_error": 1}
    assert "with the row's arguments" in found["examples"][0]["detail"]

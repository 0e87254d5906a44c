"""Rows of every shape become the messages that a server would be sent; no key is lost unnamed."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from token_kit import chat

from draftstates.tokens.conversations import Conversation, TokenRow, parse_row
from draftstates.tokens.rows import RowSkipped, read_rows

ASK = {"role": "user", "content": "Q"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
FLAT = {"name": "f", "arguments": '{"a": 1}'}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}
OPENAI = {
    "messages": [
        ASK,
        {"role": "assistant", "content": "", "reasoning_content": "T", "tool_calls": [CALL]},
        {"role": "tool", "content": "R"},
        {"role": "assistant", "content": "A"},
    ],
    "tools": [TOOL],
}


def messages_of(row: dict, **options) -> list[dict]:
    return parse_row(row, **options).messages


def answer(**fields) -> dict:
    """A row with one answer of these fields."""
    return {"messages": [ASK, {"role": "assistant", **fields}]}


@pytest.mark.parametrize("empty", [None, "", [], {}])
@pytest.mark.parametrize(
    "key",
    [
        "tool_calls",
        "function_call",
        "refusal",
        "audio",
        "annotations",
        "name",
        "reasoning",
        "reasoning_content",
        "thinking",
        "tool_call_id",
        "train_detail",
        "anything",
    ],
)
def test_an_empty_field_is_the_same_as_none(key: str, empty) -> None:
    found = parse_row(answer(content="Hello", **{key: empty}))
    assert found == Conversation(chat("Q", "Hello"))
    assert found.not_used == ()


@pytest.mark.parametrize("empty", [None, "", [], {}])
@pytest.mark.parametrize(
    "key", ["tools", "functions", "system", "history", "metadata", "loss_mask"]
)
def test_an_empty_column_is_the_same_as_none(key: str, empty) -> None:
    for row in ({"messages": chat("Q", "A")}, {"prompt": "Q", "completion": "A"}):
        found = parse_row({**row, key: empty})
        assert found == Conversation(chat("Q", "A"))
        assert found.not_used == ()


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "T", "content": "A"},
        {"reasoning": "T", "content": "A"},
        {"thinking": "T", "content": "A"},
        {"thinking": "T", "reasoning": "T\n", "content": "A"},
        {
            "reasoning": "T",
            "reasoning_details": [{"type": "reasoning.text", "text": "T"}],
            "content": "A",
        },
        {"thinking_blocks": [{"type": "thinking", "thinking": "T"}], "content": "A"},
        {"content": [{"type": "thinking", "thinking": "T"}, {"type": "text", "text": "A"}]},
        {
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "T"}]},
                {"type": "output_text", "text": "A"},
            ]
        },
        {"content": [{"type": "reasoning", "text": "T"}, "A"]},
    ],
)
def test_reasoning_has_one_name(fields: dict) -> None:
    _, said = messages_of(answer(**fields))
    assert said["content"] == "A"
    assert said["reasoning_content"].strip() == "T"
    assert set(said) == {"role", "content", "reasoning_content"}


RESPONSES = {
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "Q"}]}],
    "output": [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "T"}]},
        {"type": "function_call", "call_id": None, **FLAT},
        {"type": "function_call_output", "output": "R"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
    ],
    "tools": [
        {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}
    ],
}
SHAPES = {
    "OpenAI": OPENAI,
    "OpenAI as text": {key: json.dumps(value) for key, value in OPENAI.items()},
    "tools as a list of texts": {**OPENAI, "tools": [json.dumps(TOOL)]},
    "functions": {
        "messages": [
            ASK,
            {"role": "assistant", "content": None, "reasoning": "T", "function_call": FLAT},
            {"role": "function", "content": "R"},
            {"role": "assistant", "content": "A"},
        ],
        "functions": [TOOL["function"]],
    },
    "Responses": RESPONSES,
    "Responses in messages": {
        "messages": [*RESPONSES["input"], *RESPONSES["output"]],
        "tools": RESPONSES["tools"],
    },
    "Anthropic": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Q"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "T"},
                    {"type": "tool_use", "name": "f", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "content": "R"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "A"}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "stop_reason": "end_turn",
    },
    "lists by key": {
        "messages": {
            "role": ["user", "assistant", "tool", "assistant"],
            "content": ["Q", None, "R", "A"],
            "thinking": [None, "T", None, None],
            "tool_calls": [None, [FLAT], None, None],
        },
        "tools": json.dumps([TOOL]),
    },
}


@pytest.mark.parametrize("row", SHAPES.values(), ids=SHAPES)
def test_every_shape_of_a_conversation_with_tools_is_the_same(row: dict) -> None:
    found = parse_row(json.dumps(row).encode())
    assert found == Conversation(OPENAI["messages"], OPENAI["tools"])
    assert found.not_used == ()


PAIRS = [
    {"system": "S", "prompt": "Q", "completion": "A"},
    {"system_prompt": "S", "question": "Q", "response": "A"},
    {"system": "S", "input": "Q", "output": "A"},
    {"system": "S", "query": "Q", "response": "A"},
    {"system": "S", "instruction": "", "input": "Q", "output": "A"},
    {"system": "S", "prompt": [ASK], "completion": [{"role": "assistant", "content": "A"}]},
    {"instructions": "S", "input": "Q", "output": [{"role": "assistant", "content": "A"}]},
    {"system": [{"type": "text", "text": "S"}], "messages": chat("Q", "A")},
    {"system": "S", "conversation": [{"human": "Q", "assistant": "A"}]},
    {
        "system": "S",
        "messages": [{"type": "human", "content": "Q"}, {"type": "ai", "content": "A"}],
    },
    {
        "system": "S",
        "messages": [ASK],
        "choices": [{"message": {"role": "assistant", "content": "A"}}],
    },
    {"messages": chat("Q", "A", system="S"), "system": "S"},
]


@pytest.mark.parametrize("row", PAIRS)
def test_every_shape_of_a_question_and_an_answer_is_the_same(row: dict) -> None:
    found = parse_row(row)
    assert found == Conversation(chat("Q", "A", system="S"))
    assert found.not_used == ()


@pytest.mark.parametrize("history", [[["a", "b"]], '[["a", "b"]]', chat("a", "b")])
@pytest.mark.parametrize(
    "row", [{"instruction": "Q", "output": "A"}, {"prompt": "Q", "response": "A"}]
)
def test_history_stands_before_the_question(row: dict, history) -> None:
    assert messages_of({**row, "history": history, "system": "S"}) == chat(
        "a", "b", "Q", "A", system="S"
    )


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        ({"question": "Q", "answer": "A", "response": "B"}, "unknown_format", "response or answer"),
        ({"prompt": "Q", "input": "I", "completion": "A"}, "unknown_format", "prompt and input"),
        ({"messages": "Hi"}, "bad_columns", "column messages: expected a list"),
        ({"prompt": "Q", "response": "A", "history": [["a"]]}, "bad_columns", "column history"),
        ({"messages": chat("Q", "A"), "loss_mask": [1]}, "bad_columns", "each of 2 messages"),
        (
            answer(content="A", reasoning="T", thinking="U"),
            "bad_message",
            "another in each of reasoning, thinking",
        ),
        (answer(content="A", train_detail=[{"train": False}]), "bad_message", "train_detail"),
        (answer(content="A", channel="commentary"), "bad_message", "channel"),
        (answer(content="A", train="no"), "bad_message", "train: expected true or false"),
        (
            answer(
                content=[
                    {"type": "tool_use", "name": "f", "input": {}},
                    {"type": "text", "text": "A"},
                ]
            ),
            "bad_message",
            "found text after a call",
        ),
        (answer(content=[{"type": "image_url", "image_url": "u"}]), "bad_message", "image_url"),
        (answer(content=[{"type": ["text"], "text": "A"}]), "bad_message", "expected text"),
        (answer(content="A", tool_calls=[{"name": "f", "arguments": "[1"}]), "bad_tools", "JSON"),
        ({"messages": chat("Q", "A"), "tools": ["no"]}, "bad_tools", "tools: expected a list"),
        ({"messages": [{"role": "kimi", "content": "A"}]}, "unknown_role", "data.roles"),
        ({"messages": [{"content": "A", "id": 1}]}, "bad_message", "keys ['content', 'id']"),
        ({"messages": [{"input": "Q", "question": "Q"}]}, "bad_message", "expected a role"),
        ({"inputs": "Q", "targets": "A"}, "unknown_format", "name those of the messages, or"),
    ],
)
def test_what_is_in_doubt_is_refused_by_name(row: dict, reason: str, detail: str) -> None:
    with pytest.raises(RowSkipped) as caught:
        parse_row(row)
    assert caught.value.reason == reason
    assert detail in caught.value.detail


@pytest.mark.parametrize(
    "keys",
    [("input", "output"), ("question", "answer"), ("human", "assistant"), ("prompt", "response")],
)
def test_whole_exchanges_in_any_order_of_their_keys(keys: tuple[str, str]) -> None:
    rounds = [dict(zip(keys, texts, strict=True)) for texts in (("Q", "A"), ("R", "B"))]
    for items in (rounds, [dict(reversed(item.items())) for item in rounds]):
        found = parse_row({"conversation": items})
        assert (found, found.not_used) == (Conversation(chat("Q", "A", "R", "B")), ())


def test_messages_whose_key_is_their_role() -> None:
    found = parse_row({"conversation": [{"human": "Q"}, {"gpt": "A"}]})
    assert (found, found.not_used) == (Conversation(chat("Q", "A")), ())
    with pytest.raises(RowSkipped, match="bad_message: message 0: expected a role"):
        parse_row({"conversation": [{"input": "Q"}, {"output": "A"}]})


@pytest.mark.parametrize("arguments", ["", None, {}, "{}", "null"])
def test_no_arguments(arguments) -> None:
    _, said = messages_of(answer(tool_calls=[{"function": {"name": "f", "arguments": arguments}}]))
    assert said["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


def test_calls_that_stand_in_two_places_are_read_once() -> None:
    """LangChain's messages name them in the blocks and beside them."""
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
    for call in ({"tool_calls": [{"name": "f", "args": {"a": 1}}]}, {"function_call": FLAT}):
        _, said = messages_of(answer(content=[use], **call))
        assert [found["function"]["name"] for found in said["tool_calls"]] == ["f"]
    with pytest.raises(RowSkipped, match="bad_tools: message 1: expected the calls once"):
        parse_row(answer(tool_calls=[FLAT], function_call={"name": "g"}))


def test_thoughts_that_are_messages_of_their_own() -> None:
    row = {
        "messages": [
            ASK,
            {"role": "assistant", "channel": "analysis", "content": "T"},
            {"role": "assistant", "channel": "final", "content": "A"},
        ]
    }
    said = {"role": "assistant", "content": "A", "reasoning_content": "T"}
    assert parse_row(row) == Conversation([ASK, said])
    result = {"role": "user", "content": [{"type": "tool_result", "content": "R"}]}
    row["messages"].insert(2, result)
    assert [message["role"] for message in messages_of(row)] == [
        *("user", "assistant", "tool", "assistant")
    ]


def test_names_of_roles() -> None:
    row = {"messages": [ASK, {"role": "Kimi", "content": "A"}]}
    assert messages_of(row, roles={"kimi": "assistant"}) == chat("Q", "A")


@pytest.mark.parametrize(
    "flag", [{"train": False}, {"weight": 0}, {"loss": False}, {"trainable": 0}, {"loss_mask": 0}]
)
def test_an_answer_that_is_not_to_be_learnt(flag: dict) -> None:
    rest = {"role": "assistant", "content": "B", **dict.fromkeys(flag, 1)}
    found = parse_row({"messages": [*answer(content="A", **flag)["messages"], ASK, rest]})
    assert found == Conversation(chat("Q", "A", "Q", "B"), unsupervised=frozenset({1}))
    assert found.not_used == ()


def test_the_rows_mask_has_a_value_for_each_message() -> None:
    row = {"messages": chat("Q", "A", "Q", "B"), "loss_mask": [0, 0, 0, 1], "system": "S"}
    assert parse_row(row).unsupervised == {1, 2, 3}
    assert parse_row({"messages": chat("Q", "A"), "weight": 0}).unsupervised == {0, 1}


@pytest.mark.parametrize(
    "row",
    [
        answer(content="A", finish_reason="length"),
        {**answer(content="A"), "finish_reason": "length"},
        {**answer(content="A"), "finish_reason": ["length"]},
        {**answer(content="A"), "stop_reason": "max_tokens"},
        {"prompt": "Q", "completion": "A", "finish_reason": "LENGTH"},
        {
            "input": "Q",
            "output": [{"role": "assistant", "content": "A", "status": "incomplete"}],
        },
        {
            "input": "Q",
            "output": [{"role": "assistant", "content": "A"}],
            "status": "incomplete",
            "incomplete_details": {"reason": "max_output_tokens"},
        },
        {
            "messages": [ASK],
            "choices": [
                {"message": {"role": "assistant", "content": "A"}, "finish_reason": "length"}
            ],
        },
    ],
)
def test_an_answer_that_was_cut(row: dict) -> None:
    found = parse_row(row)
    assert found == Conversation(chat("Q", "A"), open_turns=frozenset({1}))
    assert found.not_used == ()


def test_an_answer_that_ended_and_one_that_ended_in_an_unknown_way() -> None:
    for ended in ({"finish_reason": "stop"}, {"finish_reason": "stop", "stop_reason": 128009}):
        assert parse_row(answer(content="A", **ended)) == Conversation(chat("Q", "A"))
    found = parse_row(answer(content="A", finish_reason="because"))
    assert found.open_turns == frozenset()
    assert found.not_used == ("messages[].finish_reason of an unknown kind",)


def test_keys_that_no_message_holds_are_named() -> None:
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Q", "cache_control": {"a": 1}}]},
            {"role": "assistant", "content": "A", "audio": {"id": 1}, "weight": 0.5},
            {"role": "user", "content": "Q", "name": "Ann", "weight": 1},
        ],
        "metadata": {"a": 1},
        "score": 0.0,
        "nothing": None,
    }
    assert parse_row(row).not_used == (
        "metadata",
        "score",
        "messages[].audio",
        "messages[].content[].cache_control",
        "messages[].name (user)",
        "messages[].weight of a message that is not an answer",
        "messages[].weight other than 0 and 1",
    )
    tokens = parse_row({"input_ids": [1, 2], "loss_mask": [0, 1], "text": "x"})
    assert tokens == TokenRow([1, 2], [0, 1])
    assert tokens.not_used == ("text",)


def test_nulls_in_arguments_are_the_same_from_every_kind_of_file(tmp_path) -> None:
    """In Parquet every object of a column has every key."""
    rows = [
        answer(tool_calls=[{"type": "function", "function": {"name": "f", "arguments": found}}])
        for found in ({"a": 1, "b": None, "c": {"d": None, "e": [None, 2]}}, {"a": None, "b": "x"})
    ]
    rows.append(answer(tool_calls=[{"function": {"name": "f", "arguments": '{"a": null}'}}]))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows[:2]), tmp_path / "rows.parquet")
    lines, columns = (
        [parse_row(row.value) for row in read_rows([tmp_path / f"rows.{kind}"])]
        for kind in ("jsonl", "parquet")
    )
    assert lines[:2] == columns
    found = [row.messages[1]["tool_calls"][0]["function"]["arguments"] for row in lines]
    # arguments as text are what the model wrote
    assert found == [{"a": 1, "c": {"e": [None, 2]}}, {"b": "x"}, {"a": None}]
    assert lines[0].not_used == ("messages[].tool_calls[].function.arguments: null",)


def test_arguments_of_a_column_of_maps(tmp_path) -> None:
    kind = pa.list_(
        pa.struct(
            [
                ("role", pa.string()),
                ("content", pa.string()),
                (
                    "tool_calls",
                    pa.list_(
                        pa.struct(
                            [
                                ("name", pa.string()),
                                ("arguments", pa.map_(pa.string(), pa.string())),
                            ]
                        )
                    ),
                ),
            ]
        )
    )
    row = [ASK, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": [("a", "1")]}]}]
    pq.write_table(pa.table({"messages": pa.array([row], kind)}), tmp_path / "rows.parquet")
    (found,) = (parse_row(row.value) for row in read_rows([tmp_path / "rows.parquet"]))
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": "1"}


def test_a_question_that_is_json_text_of_messages() -> None:
    asked = chat("Q", "A", "R", system="S")
    for items in (asked, [{"from": m["role"], "value": m["content"]} for m in asked]):
        row = {"prompt": json.dumps(items), "completion": "B"}
        assert messages_of(row) == [*asked, {"role": "assistant", "content": "B"}]
    for text in ('[{"role": "admin"}]', "[1, 2]", "[not JSON", "[]"):
        assert messages_of({"prompt": text, "completion": "B"})[0]["content"] == text

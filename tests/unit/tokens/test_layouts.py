"""A row that two layouts fit is read where they say the same, and refused where they do not."""

import json

import pytest
from token_kit import chat

from draftstates.tokens.conversations import Conversation, TokenRow, parse_row
from draftstates.tokens.rows import RowSkipped

LIST = {"messages": chat("Q is this", "The answer is A")}
ASKED = {"messages": chat("Q is this")}
TOKENS = {"input_ids": [1, 2], "loss_mask": [0, 1]}


@pytest.mark.parametrize(
    ("row", "detail"),
    [
        ({**LIST, "prompt": "Q is this", "completion": "B"}, "column completion"),
        ({**LIST, "prompt": "P", "completion": "The answer is A"}, "column prompt"),
        ({**LIST, "instruction": "P", "output": "B"}, "column instruction"),
        ({**LIST, "conversations": chat("Q", "B")}, "messages and conversations"),
        ({**LIST, **TOKENS}, "input_ids and the column messages"),
        ({**ASKED, "prompt": "P", "response": "B"}, "column prompt"),
        ({"question": "Q", "context": "C", "answer": "A"}, "question and context"),
        ({"prompt": "Q", "passage": "C", "completion": "A"}, "prompt and passage"),
        ({"question": "Q", "documents": ["C"], "answer": "A"}, "question and documents"),
        ({"instruction": "Q", "input": "I", "context": "C", "output": "A"}, "and context"),
    ],
)
def test_a_row_that_holds_two_conversations_is_refused(row: dict, detail: str) -> None:
    with pytest.raises(RowSkipped) as caught:
        parse_row(row)
    assert caught.value.reason == "unknown_format"
    assert detail in caught.value.detail


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": "Q is this\n"},
        {"prompt": "Q is this", "completion": "A"},
        {"problem": "Q is this", "solution": "The answer is A"},
        {"conversations": json.dumps(LIST["messages"])},
        {"conversation": []},
        {"prompt": "Q is this", "response": "The answer is A"},
    ],
)
def test_columns_that_say_the_same_are_no_second_conversation(more: dict) -> None:
    found = parse_row({**LIST, **more})
    assert found == Conversation(LIST["messages"])


def test_parts_of_a_question_are_looked_at() -> None:
    parts = [{"type": "text", "text": "Q is"}, {"type": "text", "text": " this"}]
    row = {"messages": [{"role": "user", "content": parts}, LIST["messages"][1]]}
    assert parse_row({**row, "prompt": "Q is this", "completion": "A"}).messages[0] == {
        "role": "user",
        "content": parts,
    }


def test_the_configuration_says_which_of_two_is_meant() -> None:
    row = {**LIST, **TOKENS, "prompt": "P", "completion": "B", "conversations": chat("R", "C")}
    assert parse_row(row, layout="messages").messages == LIST["messages"]
    assert parse_row(row, layout="completion").messages == chat("P", "B")
    assert parse_row(row, layout="tokens") == TokenRow([1, 2], [0, 1])
    named = parse_row(
        {**LIST, "conversations": chat("R", "C")}, columns={"messages": "conversations"}
    )
    assert named.messages == chat("R", "C")


@pytest.mark.parametrize("name", ["response", "completion", "output", "answer"])
@pytest.mark.parametrize("answer", ["A", [{"role": "assistant", "content": "A"}]])
def test_messages_that_end_in_a_question_have_their_answer_in_a_column(name, answer) -> None:
    found = parse_row({**ASKED, name: answer, "finish_reason": "length"})
    assert found == Conversation(chat("Q is this", "A"), open_turns=frozenset({1}))
    assert found.not_used == ()
    _, said = parse_row({**ASKED, name: answer, "reasoning": "T"}).messages
    assert said["reasoning_content"] == "T"


def test_an_answer_column_in_doubt_is_not_read() -> None:
    found = parse_row({**ASKED, "response": "A", "answer": "B"})
    assert found.messages == ASKED["messages"]
    assert found.not_used == ("response", "answer")
    assert parse_row({**ASKED, "answer": 42}).messages == ASKED["messages"]
    beside = parse_row({**LIST, "response": "B"})
    assert (beside.messages, beside.not_used) == (LIST["messages"], ("response",))


@pytest.mark.parametrize("name", ["input", "context"])
def test_the_context_of_alpaca_is_read(name: str) -> None:
    for answer in ("output", "response"):
        row = {"instruction": "Q", name: "C", answer: "A"}
        assert parse_row(row) == Conversation(chat("Q\n\nC", "A"))

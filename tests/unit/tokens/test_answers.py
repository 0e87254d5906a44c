"""An answer that comes in pieces is the one text that the model wrote."""

import pytest
from token_kit import chat, marked, targets, template, tokenise

from draftstates.tokens.conversations import Conversation, parse_row
from draftstates.tokens.rows import RowSkipped
from draftstates.tokens.sources import TokeniseOptions
from draftstates.tokens.turns import tokenise_conversation

ASK = {"role": "user", "content": "Q"}
RESULT = {"role": "tool", "content": "R"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}


def said(content: str | list = "", **fields) -> dict:
    return {"role": "assistant", "content": content, **fields}


@pytest.mark.parametrize(
    "blocks",
    [
        [{"type": "text", "text": "It is"}, {"type": "text", "text": " blue"}],
        ["It", " is blue"],
        [{"type": "output_text", "text": "It is b"}, {"type": "output_text", "text": "lue"}],
    ],
)
def test_blocks_of_an_answer_are_joined_as_they_are(demo_model, blocks) -> None:
    found = parse_row({"messages": [ASK, said(blocks)]})
    assert found == Conversation(chat("Q", "It is blue"))
    assert parse_row({"input": "Q", "output": [said(blocks)]}) == found
    for name in ("smollm2", "gemma3"):
        loaded = template(name)
        (sample,) = tokenise(loaded, found.messages)
        assert "It is blue" in marked(loaded, sample)


def test_keys_beside_a_calls_function_are_named() -> None:
    call = {**CALL, "id": "1", "index": 0, "result": "lost", "nothing": None}
    found = parse_row({"messages": [ASK, {"role": "assistant", "tool_calls": [call]}]})
    assert found.messages[1]["tool_calls"] == [{**CALL, "id": "1"}]
    assert found.not_used == ("messages[].tool_calls[].index", "messages[].tool_calls[].result")


OTHER = {"type": "function", "function": {"name": "g", "arguments": {}}}
FLAT = {"type": "function_call", "name": "f", "arguments": "{}"}
PIECES = {
    "gpt and function_call": (
        [said("A"), {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}],
        said("A", tool_calls=[CALL]),
    ),
    "items of Responses": (
        [{"type": "reasoning", "summary": ["T"]}, {"type": "message", **said("A")}, FLAT, FLAT],
        said("A", reasoning_content="T", tool_calls=[CALL, CALL]),
    ),
    "a thought, then text": (
        [said(reasoning="T"), said("A")],
        said("A", reasoning_content="T"),
    ),
    "two calls": (
        [said(tool_calls=[CALL]), said(tool_calls=[OTHER])],
        said(tool_calls=[CALL, OTHER]),
    ),
    "nothing, then text": ([said(" "), said("A")], said("A")),
    "text, then nothing": ([said("A"), said()], said("A")),
}


@pytest.mark.parametrize(("pieces", "whole"), PIECES.values(), ids=PIECES)
def test_pieces_that_have_the_order_of_an_answer_are_one(pieces, whole) -> None:
    for end, open_turns in (({}, ()), ({"finish_reason": "length"}, (3,))):
        row = {"messages": [*chat("Q", "A"), ASK, *pieces], **end}
        expected = Conversation([*chat("Q", "A"), ASK, whole], open_turns=frozenset(open_turns))
        assert parse_row(row) == expected
    learnt = [1, 1, 1, *[0] * len(pieces)]
    found = parse_row({"messages": [*chat("Q", "A"), ASK, *pieces, ASK], "loss_mask": [*learnt, 0]})
    assert found.unsupervised == {3, 4}
    assert len(found.messages) == 5


@pytest.mark.parametrize(
    "pieces",
    [
        [said("A"), said("B")],
        [said("A"), said("B", reasoning="T")],
        [said("A", train=False), said(tool_calls=[CALL])],
        [said("A", finish_reason="length"), said(tool_calls=[CALL])],
    ],
)
def test_the_earlier_of_two_texts_has_no_end_that_is_learnt(pieces) -> None:
    found = parse_row({"messages": [ASK, *pieces, RESULT, said("Z")]})
    assert [message["role"] for message in found.messages] == [
        *("user", "assistant", "assistant", "tool", "assistant")
    ]
    assert found.open_turns == {1}


def test_two_texts_in_a_row_are_rendered_so(demo_model) -> None:
    loaded = template("smollm2")
    found = parse_row({"input": "Q", "output": [said("One"), said("Two")]})
    (sample,) = tokenise_conversation(found, loaded, TokeniseOptions(max_tokens=1024))[0]
    assert targets(loaded, sample) == ["One", "Two<|im_end|>"]


@pytest.mark.parametrize("later", [said("A"), said(reasoning="T"), said("A", tool_calls=[CALL])])
def test_text_after_a_call_without_result_is_refused(later: dict) -> None:
    with pytest.raises(RowSkipped, match="bad_message: message 1: expected results after its"):
        parse_row({"messages": [ASK, said(tool_calls=[CALL]), later]})
    assert (
        parse_row({"messages": [ASK, said(tool_calls=[CALL]), RESULT, later]}).open_turns == set()
    )

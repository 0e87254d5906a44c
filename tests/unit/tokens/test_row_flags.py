"""What a row says of its answers, under the names that public data sets use, is what is learnt."""

import math

import pytest
from token_kit import chat

from draftstates.tokens.conversations import Conversation, TokenRow, parse_row
from draftstates.tokens.rows import RowSkipped

TWO = chat("Q", "A", "Q", "B")
PAIR = {"prompt": "Q", "completion": "A"}
TOKENS = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}


def said(**fields) -> dict:
    """A row with one answer of these fields."""
    return {
        "messages": [
            {"role": "user", "content": "Q"},
            {"role": "assistant", "content": "A", **fields},
        ]
    }


CUT = [
    {"finish_reason": {"type": "length", "length": 16}},
    {"finish_reason": "token_limit"},
    {"done_reason": "length"},
    {"native_finish_reason": "MAX_TOKENS"},
    {"finish_reason": "stop", "native_finish_reason": "max_tokens"},
    {"finish_details": {"type": "max_tokens"}},
    {"status": "incomplete"},
    {"status": "Incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
    {"incomplete_details": {"reason": "content_filter"}},
    {"truncated": True},
    {"truncated": "true"},
    {"is_truncated": 1},
    {"was_truncated": True},
    {"is_complete": False},
    {"is_finished": "false"},
    {"finished": 0},
    {"finish_reason": "FinishReason.LENGTH"},
    {"generation_finish_reason": "length"},
    {"finish_reason": {"type": "stop", "matched": "###"}},
    {"finish_reason": "stop", "stop_reason": "###"},
    {"finish_reason": "stop", "matched_stop": "\n\n"},
    {"prefix": True},
    {"partial": True},
    {"continue_final_message": True},
]
HELD = [
    {"meta_info": {"finish_reason": {"type": "length"}}},
    {"metadata": {"finish_reason": "length"}},
    {"response_metadata": {"stop_reason": "max_tokens"}},
    {"additional_kwargs": {"is_truncated": True}},
    {"metadata": '{"finish_reason": "length"}'},
]


@pytest.mark.parametrize("end", [*CUT, *HELD])
def test_every_way_to_say_that_an_answer_was_cut(end: dict) -> None:
    expected = Conversation(chat("Q", "A"), open_turns=frozenset({1}))
    for row in (said(**end), {**said(), **end}, {**PAIR, **end}):
        found = parse_row(row)
        assert found == expected
        assert found.not_used == () or end in HELD
    choice = {"message": said()["messages"][1], **end}
    assert parse_row({"messages": said()["messages"][:1], "choices": [choice]}) == expected


@pytest.mark.parametrize(
    "end",
    [
        {"finish_reason": {"type": "stop", "matched": 2}},
        {"finish_reason": "stop", "stop_reason": 151645, "matched_stop": 2},
        {"status": "completed", "incomplete_details": None},
        {"truncated": False, "is_complete": True, "done_reason": "stop"},
        {"is_truncated": "no", "finished": 1, "finish_reason": "FinishReason.STOP"},
    ],
)
def test_an_answer_that_ended(end: dict) -> None:
    for row in (said(**end), {**said(), **end}):
        found = parse_row(row)
        assert (found, found.not_used) == (Conversation(chat("Q", "A")), ())


def test_the_names_of_what_is_not_used_hold_no_values() -> None:
    for reason in ("because SECRET", {"type": "SECRET"}, [{"SECRET": 1}]):
        for row in (said(finish_reason=reason), {**said(), "finish_reason": reason}):
            (name,) = parse_row(row).not_used
            assert name.endswith("finish_reason of an unknown kind")
    assert parse_row(said(truncated="SECRET")).not_used == (
        "messages[].truncated of an unknown kind",
    )
    asked = {"messages": [{"role": "user", "content": "Q", "finish_reason": "SECRET"}, *TWO[1:]]}
    assert parse_row(asked).not_used == (
        "messages[].finish_reason of a message that is not an answer",
    )


@pytest.mark.parametrize("flag", ["train_on_turn", "training", "learn"])
@pytest.mark.parametrize("no", [False, 0, 0.0])
def test_more_names_for_an_answer_that_is_not_learnt(flag: str, no) -> None:
    found = parse_row({"messages": [TWO[0], {**TWO[1], flag: no}, TWO[2], {**TWO[3], flag: True}]})
    assert (found, found.not_used) == (Conversation(TWO, unsupervised=frozenset({1})), ())
    failed = parse_row({"messages": [TWO[0], {**TWO[1], "status": "failed"}, *TWO[2:]]})
    assert failed.unsupervised == {1}


def test_weights_of_a_row() -> None:
    row = {"messages": TWO, "weights": [0, 0, 0, 1]}
    assert parse_row(row).unsupervised == {0, 1, 2}
    assert parse_row({**row, "weights": [0, 0.5, 0, 2]}).unsupervised == {0, 2}
    assert parse_row({**row, "loss_mask": [0, 0, 0, 1]}).unsupervised == {0, 1, 2}
    assert parse_row({**row, "weights": 0.7}).not_used == ("weights",)


def test_history_that_is_masked() -> None:
    row = {"instruction": "Q", "output": "B", "history": [["Q", "A"]]}
    assert parse_row({**row, "mask_history": True}) == Conversation(TWO, unsupervised={1})
    assert parse_row({**row, "mask_history": False}) == Conversation(TWO)


def test_questions_are_masked_anyway() -> None:
    found = parse_row({"messages": TWO, "mask": "User"})
    assert (found, found.not_used) == (Conversation(TWO), ())


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        (said(mask=True), "bad_message", "message 1: mask"),
        (said(mask=0), "bad_message", "message 1: mask"),
        ({"messages": TWO, "mask": [0, 1, 0, 1]}, "bad_columns", "column mask"),
        ({**PAIR, "mask": "Assistant"}, "bad_columns", "column mask"),
        ({"messages": TWO, "weights": [0, 1]}, "bad_columns", "column weights"),
        ({"messages": TWO, "weights": [0, -1, 0, 1]}, "bad_columns", "column weights"),
        (
            {"messages": TWO, "weights": [0, 1, 0, 1], "loss_mask": [0, 0, 0, 1]},
            "bad_columns",
            "column weights: expected the same as loss_mask",
        ),
        ({"messages": TWO, "mask_history": "yes"}, "bad_columns", "column mask_history"),
        (said(weight=-1), "bad_message", "weight: expected a number from 0"),
        (said(weight=math.nan), "bad_message", "weight: expected a number from 0"),
        (said(loss=math.inf), "bad_message", "loss: expected a number from 0"),
        ({**PAIR, "weight": math.nan}, "bad_columns", "column weight"),
        ({**PAIR, "weight": -0.5}, "bad_columns", "column weight"),
        ({**PAIR, "train": "false"}, "bad_columns", "column train"),
        ({**PAIR, "label": False}, "no_supervised_tokens", "label: false"),
        ({**said(), "status": "failed"}, "no_supervised_tokens", "status: failed"),
        ({**TOKENS, "label": False}, "no_supervised_tokens", "label: false"),
        ({**TOKENS, "train": False}, "no_supervised_tokens", "not to be learnt"),
        ({**TOKENS, "weight": 0}, "no_supervised_tokens", "not to be learnt"),
        ({**TOKENS, "weight": -1}, "bad_columns", "column weight"),
        ({**TOKENS, "attention_mask": [1, 0, 1]}, "bad_tokens", "padding at the ends"),
        ({**TOKENS, "attention_mask": [1, 1]}, "bad_tokens", "attention_mask: expected 0 or 1"),
        ({**TOKENS, "attention_mask": [1, 1, 2]}, "bad_tokens", "attention_mask: expected 0 or 1"),
    ],
)
def test_what_is_not_wanted_or_in_doubt_is_refused_by_name(row, reason, detail) -> None:
    with pytest.raises(RowSkipped) as caught:
        parse_row(row)
    assert caught.value.reason == reason
    assert detail in caught.value.detail


def test_padding_is_left_out() -> None:
    for attention, ids, mask in (
        ([1, 1, 1], [1, 2, 3], [0, 1, 1]),
        ([0, 1, 1], [2, 3], [1, 1]),
        ([1, 1, 0], [1, 2], [0, 1]),
        ([0, 0, 0], [], []),
    ):
        found = parse_row({**TOKENS, "attention_mask": attention})
        assert (found, found.not_used) == (TokenRow(ids, mask), ())


def test_a_good_example_is_learnt() -> None:
    assert parse_row({**PAIR, "label": True}) == Conversation(chat("Q", "A"))
    assert parse_row({**PAIR, "weight": 1, "train": True}) == Conversation(chat("Q", "A"))


def test_reasons_of_several_answers_of_which_the_row_has_one() -> None:
    row = {**said(), "finish_reasons": ["length", "length"]}
    assert parse_row(row).open_turns == {1}
    assert parse_row({**row, "finish_reasons": ["stop", "eos"]}).open_turns == set()
    with pytest.raises(RowSkipped, match="a reason for each of 1 assistant messages, found 2"):
        parse_row({**row, "finish_reasons": ["stop", "length"]})

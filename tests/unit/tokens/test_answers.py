"""An answer that comes in pieces is the one text that the model wrote."""

import pytest
from token_kit import chat, marked, template, tokenise

from draftstates.tokens.conversations import Conversation, parse_row

ASK = {"role": "user", "content": "Q"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    "blocks",
    [
        [{"type": "text", "text": "It is"}, {"type": "text", "text": " blue"}],
        ["It", " is blue"],
        [{"type": "output_text", "text": "It is b"}, {"type": "output_text", "text": "lue"}],
    ],
)
def test_blocks_of_an_answer_are_joined_as_they_are(demo_model, blocks) -> None:
    said = {"role": "assistant", "content": blocks}
    found = parse_row({"messages": [ASK, said]})
    assert found == Conversation(chat("Q", "It is blue"))
    assert parse_row({"input": "Q", "output": [said]}) == found
    for name in ("smollm2", "gemma3"):
        loaded = template(name)
        (sample,) = tokenise(loaded, found.messages)
        assert "It is blue" in marked(loaded, sample)


def test_keys_beside_a_calls_function_are_named() -> None:
    call = {**CALL, "id": "1", "index": 0, "result": "lost", "nothing": None}
    found = parse_row({"messages": [ASK, {"role": "assistant", "tool_calls": [call]}]})
    assert found.messages[1]["tool_calls"] == [{**CALL, "id": "1"}]
    assert found.not_used == ("messages[].tool_calls[].index", "messages[].tool_calls[].result")

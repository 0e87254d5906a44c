"""The reasoning of an answer is read once, and a setting of the request is none."""

import pytest
from token_kit import chat, marked, real_template, template, tokenise

from draftstates.tokens.conversations import Conversation, parse_row
from draftstates.tokens.rows import RowSkipped
from draftstates.tokens.sources import TokeniseOptions
from draftstates.tokens.turns import tokenise_conversation


def answer(**fields) -> dict:
    """A row with one answer of these fields."""
    return {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", **fields}]}


@pytest.mark.parametrize("key", ["reasoning", "thinking"])
@pytest.mark.parametrize(
    "setting",
    ["on", " Off\n", "enabled", "true", "auto", "low", True, False, 1, {"effort": "high"}],
)
def test_a_setting_is_no_thought_and_is_named(key: str, setting) -> None:
    for row, name in (
        (answer(content="A", **{key: setting}), f"messages[].{key} (assistant)"),
        ({"prompt": "Q", "response": "A", key: setting}, key),
        ({"messages": chat("Q", "A"), key: setting}, key),
    ):
        found = parse_row(row)
        assert found == Conversation(chat("Q", "A"))
        assert found.not_used == (name,)


def test_text_that_is_more_than_a_setting_is_a_thought() -> None:
    for row in (
        answer(content="A", reasoning="on the one hand"),
        answer(content="A", reasoning_content="on"),
        {"prompt": "Q", "response": "A", "thinking": "high tide"},
    ):
        assert parse_row(row).messages[1]["reasoning_content"]


@pytest.mark.parametrize(
    "content",
    [
        "<think>\nT\n</think>\n\nA",
        "T</think>A",
        " <think>T</think>\nA",
        "<think>\n\n</think>\n\nA",
        [{"type": "text", "text": "<think>T"}, {"type": "text", "text": "</think>A"}],
    ],
)
@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_a_thought_that_is_given_twice_is_read_once(content, key: str) -> None:
    _, said = parse_row(answer(content=content, **{key: "\nT"})).messages
    assert (said["content"], said["reasoning_content"].strip()) == ("A", "T")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": [{"type": "text", "text": "T"}]},
        {"type": "think", "think": "T"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "T"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "T"}]},
    ],
)
def test_a_thought_is_read_from_parts_of_any_shape(part: dict) -> None:
    text = {"type": "text", "text": "A"}
    for message in (answer(content=[part, text]), answer(content="A", reasoning=part)):
        found = parse_row(message)
        _, said = found.messages
        assert (said["content"], said["reasoning_content"], found.not_used) == ("A", "T", ())


@pytest.mark.parametrize("content", ["<think>\nU\n</think>\n\nA", "U</think>A", "<think>U"])
def test_two_different_thoughts_are_refused(content: str) -> None:
    with pytest.raises(RowSkipped, match="bad_message: message 1: .* in the content's <think>"):
        parse_row(answer(content=content, reasoning="T"))


def test_blocks_that_think_otherwise_are_refused() -> None:
    blocks = [{"type": "thinking", "thinking": "U"}, {"type": "text", "text": "A"}]
    with pytest.raises(RowSkipped, match="bad_message: message 1: .* in the blocks"):
        parse_row(answer(content=blocks, reasoning="T"))


def test_text_about_the_tags_stays() -> None:
    text = "Write <think> and </think> around it."
    _, said = parse_row(answer(content=text, reasoning="T")).messages
    assert said["content"] == text


@pytest.mark.parametrize(
    "content", ["<think>\nT and", " <think>T", [{"type": "text", "text": "<think>T"}]]
)
def test_an_answer_that_ends_in_its_thought_was_cut(content) -> None:
    assert parse_row(answer(content=content)).open_turns == {1}
    assert parse_row(answer(content=content, finish_reason="stop")).open_turns == {1}
    assert parse_row(answer(content="The <think> tag")).open_turns == set()
    assert parse_row(answer(content="<think>T</think>A")).open_turns == set()


def test_qwen3_a_thought_without_end_has_no_empty_thought_before_it() -> None:
    conversation = parse_row(answer(content="<think>\nT and"))
    loaded = template("qwen3")
    (sample,), _ = tokenise_conversation(conversation, loaded, TokeniseOptions(max_tokens=512))
    text = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n⟦<think>\nT and⟧"
    assert marked(loaded, sample) == text


@pytest.mark.parametrize("content", ["<think>\nT\n</think>\n\nA", "<think>\nT"])
@pytest.mark.parametrize("name", ["deepseek-ai-DeepSeek-V3.1", "Kimi-K2-Thinking", "tencent-Hy3"])
def test_a_thought_behind_a_closed_one_is_refused(name: str, content: str) -> None:
    with pytest.raises(RowSkipped, match=r"prompt_not_prefix.*switch them on|not_rendered"):
        tokenise(real_template(name), chat("Q", content))
    assert tokenise(real_template(name), chat("Q", "The tag <think> begins it."))

"""Real chat templates, of many model families, with a tokenizer that has the marks of them all.

Each template is supported, or refused with a sentence that says what to do.
"""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
from token_kit import (
    ALL_MARKS,
    REAL_TEMPLATES,
    REFUSED,
    chat,
    marked,
    real_template,
    tokenise,
)

from draftstates.errors import UserError
from draftstates.tokens.conversations import Conversation, parse_row
from draftstates.tokens.rows import RowSkipped
from draftstates.tokens.sources import TokeniseOptions
from draftstates.tokens.template import ChatTemplate
from draftstates.tokens.turns import tokenise_conversation

# templates whose prompt opens a thought that the model has to write
THINKING = {
    "Apriel-1.6-15b-Thinker-fixed",
    "Cohere2MoE",
    "GLM-4.7-Flash",
    "MiniMax-M2",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "NVIDIA-Nemotron-Nano-v2",
    "Spark2.5",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    # it is not the model's own: see deepseek_v32.py
    "deepseek-ai-DeepSeek-V3.2",
    "llama-cpp-deepseek-r1",
}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Rome"}},
}
CALLS: list[dict[str, Any]] = [
    *chat("Rain?"),
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": "sunny"},
    {"role": "assistant", "content": "No."},
]
THOUGHT = [*chat("Hi"), {"role": "assistant", "content": "Hello", "reasoning_content": "Greet."}]


def test_there_are_templates() -> None:
    assert len(REAL_TEMPLATES) > 60


@pytest.mark.parametrize("file", REAL_TEMPLATES, ids=lambda file: file.stem)
def test_a_template_is_supported_or_refused_with_what_to_do(file: Path) -> None:
    name = file.stem
    if name in REFUSED:
        with pytest.raises(UserError, match=f"(?s){REFUSED[name]}"):
            real_template(name)
        return
    template = real_template(name)
    if name in THINKING:
        with pytest.raises(RowSkipped, match="prompt_not_prefix.*needs reasoning"):
            tokenise(template, chat("Hi", "Hello"))
    else:
        for messages in (chat("Hi", "Hello"), chat("Hi", "Hello", "And?", "Yes it is")):
            check_answers(template, messages)
    check_rest(template, THOUGHT, "Greet.")
    check_rest(template, CALLS, "Rome", "weather")


def check_answers(template: ChatTemplate, messages: list[dict[str, Any]]) -> None:
    """Check that each answer is supervised once, with an end token and what the prompt shows."""
    samples = tokenise(template, messages)
    texts = [text for sample in samples for text in targets(template, sample)]
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    assert len(texts) == len(answers)
    for text, answer in zip(texts, answers, strict=True):
        assert answer in text
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    for sample, place in zip(samples, places, strict=False):
        # the first supervised token follows the server's prompt
        prompt = template.rendering.rendered(messages[:place], prompt=True).ids.tolist()
        assert sample.input_ids[: len(prompt)].tolist() == prompt
        assert not sample.loss_mask[: len(prompt)].any() or len(samples) < len(answers)
        assert sample.loss_mask[len(prompt)] == 1
        last = int(sample.loss_mask.nonzero()[0][-1])
        assert int(sample.input_ids[last]) in template.ends.ids


def targets(template: ChatTemplate, sample: Any) -> list[str]:
    return [part.split("⟧")[0] for part in marked(template, sample).split("⟦")[1:]]


def check_rest(template: ChatTemplate, messages: list[dict[str, Any]], *pieces: str) -> None:
    """Check that pieces of the model's turns are supervised, or that a reason says why not."""
    conversation = Conversation(messages, None)
    try:
        samples, lost = tokenise_conversation(
            conversation, template, TokeniseOptions(max_tokens=4096)
        )
    except RowSkipped as skipped:
        assert skipped.reason in (
            "not_rendered",
            "template_error",
            "prompt_not_prefix",
            "no_turn_end",
        )
        return
    supervised = "".join(text for sample in samples for text in targets(template, sample))
    for piece in pieces:
        assert piece in supervised or lost


SYSTEM_LOST = "mistralai-Mistral-Nemo-Instruct-2407"


@pytest.mark.parametrize(
    "file",
    [file for file in REAL_TEMPLATES if file.stem not in REFUSED],
    ids=lambda file: file.stem,
)
def test_a_system_prompt_is_rendered_or_the_row_is_skipped(file: Path) -> None:
    template = real_template(file.stem)
    messages = chat("Hi", "Hello", system="Be kind to Zq.")
    try:
        (sample,) = tokenise(template, messages)
    except RowSkipped as skipped:
        assert skipped.reason in ("not_rendered", "template_error", "prompt_not_prefix")
        return
    assert "Be kind to Zq." in marked(template, sample)


# Families whose turns end or begin in ways of their own.


def test_glm_a_turn_ends_with_the_token_of_the_next_role() -> None:
    (sample,) = tokenise(real_template("GLM-4.6"), CALLS)
    assert marked(real_template("GLM-4.6"), sample) == (
        "[gMASK]<sop><|user|>\nRain?<|assistant|>⟦\n<think></think>\n<tool_call>weather\n"
        "<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call><|observation|>⟧\n"
        "<tool_response>\nsunny\n</tool_response><|assistant|>⟦\n<think></think>\nNo.<|user|>⟧"
    )


def test_glm_without_named_ends_the_message_says_which_to_name() -> None:
    with pytest.raises(UserError, match="set data.end_tokens: .*<|user|>"):
        ChatTemplate(ALL_MARKS, chat_template=REAL_TEMPLATES[0].parent / "GLM-4.6.jinja")


def test_glm_an_answer_that_was_cut_has_no_end() -> None:
    messages = chat("Hi", "Hello")
    cut = Conversation(messages, None, open_turns=frozenset([1]))
    (sample,), _ = tokenise_conversation(
        cut, real_template("GLM-4.6"), TokeniseOptions(max_tokens=4096)
    )
    assert marked(real_template("GLM-4.6"), sample).endswith(
        "<|assistant|>⟦\n<think></think>\nHello⟧"
    )


def test_gemma_4_the_empty_thought_of_the_prompt_is_in_the_sample() -> None:
    template = real_template("google-gemma-4-31B-it")
    first, second = tokenise(template, chat("Hi", "Hello", "And?", "Yes"))
    opened = "<|turn>model\n<|channel>thought\n<channel|>"
    assert marked(template, first).endswith(f"{opened}⟦Hello<turn|>⟧\n")
    assert marked(template, second).endswith(
        f"<|turn>model\nHello<turn|>\n<|turn>user\nAnd?<turn|>\n{opened}⟦Yes<turn|>⟧\n"
    )


def test_gemma_4_a_call_ends_in_a_token_of_its_own() -> None:
    template = real_template("google-gemma-4-31B-it")
    call, answer = tokenise(template, CALLS)
    assert marked(template, call).endswith(
        '<channel|>⟦<|tool_call>call:weather{city:<|"|>Rome<|"|>}<tool_call|><|tool_response>⟧'
    )
    assert marked(template, answer).endswith("<tool_response|>⟦No.<turn|>⟧\n")


def test_gemma_4_text_that_it_puts_behind_its_call_is_refused() -> None:
    template = real_template("google-gemma-4-31B-it")
    messages = [CALLS[0], {**CALLS[1], "content": "I look."}, *CALLS[2:]]
    with pytest.raises(RowSkipped, match="not_rendered: .* tool calls of message 1 .* before the"):
        tokenise(template, messages)
    # a template that keeps the order is used
    assert tokenise(real_template("Qwen-Qwen3-0.6B"), messages)


def test_a_thought_after_an_empty_one_is_refused() -> None:
    with pytest.raises(RowSkipped, match="prompt_not_prefix.*switch thoughts off"):
        tokenise(real_template("tencent-Hy3"), THOUGHT)


OPENED = {
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": {},
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": {"enable_thinking": True},
    "llama-cpp-deepseek-r1": {},
    "Qwen-QwQ-32B": {"enable_thinking": True},
    "deepseek-ai-DeepSeek-V3.1": {"thinking": True},
}


@functools.cache
def opening(name: str) -> ChatTemplate:
    file = REAL_TEMPLATES[0].parent / f"{name}.jinja"
    return ChatTemplate(ALL_MARKS, chat_template=file, arguments=OPENED[name])


def sample_texts(template: ChatTemplate, row: dict[str, Any], **options: Any) -> list[str]:
    conversation = parse_row(row)
    assert isinstance(conversation, Conversation)
    samples, lost = tokenise_conversation(
        conversation, template, TokeniseOptions(**{"max_tokens": 4096, **options})
    )
    assert not lost
    return [marked(template, sample) for sample in samples]


def unmarked(text: str) -> str:
    return text.replace("⟦", "").replace("⟧", "")


@pytest.mark.parametrize("name", OPENED)
def test_a_thought_that_the_prompt_opens_and_no_history_shows(name: str) -> None:
    template = opening(name)
    messages = [*chat("Hi", "Hello", "So?"), {"role": "assistant", "content": "Yes"}]
    messages[1]["reasoning_content"], messages[3]["reasoning"] = "Greet.", "Agree."
    first, second = sample_texts(template, {"messages": messages})
    lines = "\n" if template.opener == "<think>\n" else ""
    end = f"{lines}</think>{lines * 2}"
    # the server's prompt, then what the model wrote
    prompts = [template.rendering.text(messages[:place], prompt=True) for place in (1, 3)]
    assert first.startswith(f"{prompts[0]}⟦Greet.{end}Hello<")
    assert second.startswith(f"{prompts[1]}⟦Agree.{end}Yes<")
    assert "Greet." not in second
    first, second = sample_texts(template, {"messages": messages}, include_reasoning=False)
    assert f"Greet.{end}⟦Hello<" in first
    assert f"Agree.{end}⟦Yes<" in second


@pytest.mark.parametrize("name", OPENED)
@pytest.mark.parametrize(
    "text", ["<think>\nGreet.\n</think>\n\nHello", "Greet.\n</think>\n\nHello"]
)
def test_a_thought_in_the_text_follows_the_prompt_that_opens_it(name: str, text: str) -> None:
    template = opening(name)
    (sample,) = sample_texts(template, {"messages": chat("Hi", text)})
    prompt = template.rendering.text(chat("Hi"), prompt=True)
    assert sample.startswith(f"{prompt}⟦{text.removeprefix(template.opener)}<")


@pytest.mark.parametrize("name", OPENED)
@pytest.mark.parametrize("answer", [{"reasoning": "Gr"}, {"content": "<think>\nGr"}])
def test_a_thought_that_was_cut_in_the_prompts_opening(name: str, answer: dict) -> None:
    template = opening(name)
    answer = {"role": "assistant", "finish_reason": "length", **answer}
    (sample,) = sample_texts(template, {"messages": [*chat("Hi"), answer]})
    assert sample == template.rendering.text(chat("Hi"), prompt=True) + "⟦Gr⟧"


def test_a_thought_before_a_call_in_the_prompts_opening() -> None:
    template = opening("Qwen-QwQ-32B")
    called = {**CALLS[1], "reasoning": "Look."}
    first, second = sample_texts(
        template, {"messages": [CALLS[0], called, CALLS[2], {**CALLS[3], "thinking": "Dry."}]}
    )
    assert '<think>\n⟦Look.\n</think>\n\n<tool_call>\n{"name": "weather"' in first
    assert second.endswith("<think>\n⟦Dry.\n</think>\n\nNo.<|im_end|>⟧\n")


AGENT = [
    CALLS[0],
    {**CALLS[1], "reasoning": "Look."},
    CALLS[2],
    {**CALLS[3], "reasoning": "Dry."},
]


@pytest.mark.parametrize("including", [True, False])
def test_gpt_oss_an_answer_follows_the_thought_that_its_rendering_leaves_out(including) -> None:
    template = real_template("openai-gpt-oss-120b")
    (sample,) = sample_texts(template, {"messages": AGENT}, include_reasoning=including)
    look, dry = (f"<|channel|>analysis<|message|>{text}<|end|>" for text in ("Look.", "Dry."))
    call = (
        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
        '{"city": "Rome"}<|call|>'
    )
    final = "<|start|>assistant<|channel|>final<|message|>No.<|return|>"
    learnt = [look + call, dry + final]
    if not including:
        learnt = [call.removeprefix("<|start|>assistant"), "No.<|return|>"]
    assert re.findall("⟦(.*?)⟧", sample, re.DOTALL) == learnt
    asked = template.prepared(parse_row({"messages": AGENT[:3]}))
    # the server's prompt
    prompt = template.rendering.text(asked, prompt=True)
    assert unmarked(sample) == prompt + dry + final


def test_an_answer_that_was_cut_behind_a_thought_that_its_rendering_leaves_out() -> None:
    template = real_template("openai-gpt-oss-120b")
    messages = [*AGENT[:3], {"role": "assistant", "content": "No, it", "finish_reason": "length"}]
    (sample,) = sample_texts(template, {"messages": messages})
    assert "Look.<|end|>" in sample
    assert sample.endswith("<|start|>assistant⟦<|channel|>final<|message|>No, it⟧")


@pytest.mark.parametrize("name", ["LFM2.5-Instruct", "Qwen-Qwen3-0.6B"])
def test_the_server_sees_what_the_next_answer_removes_from_history(name: str) -> None:
    template = real_template(name)
    thoughts = [f"<think>\n{text}\n</think>\n\n{text}." for text in ("One", "Two")]
    rows = {
        "LFM2.5-Instruct": chat("Hi", thoughts[0], "So?", thoughts[1]),
        # two answers in a row
        "Qwen-Qwen3-0.6B": [*chat("Hi", "One."), {"role": "assistant", "content": "Two."}],
    }
    samples = sample_texts(template, {"messages": rows[name]})
    prompt = template.rendering.text(rows[name][:-1], prompt=True)
    assert "</think>" in prompt
    assert unmarked(samples[-1]).startswith(prompt + "<think>\n")
    assert samples[-1].endswith("</think>\n\nTwo.<|im_end|>⟧\n")


def test_a_thought_where_the_prompt_opens_none_is_refused() -> None:
    # after a result, this template adds no generation prompt
    template = opening("deepseek-ai-DeepSeek-R1-Distill-Llama-8B")
    messages = [*CALLS[:3], {**CALLS[3], "reasoning_content": "Dry."}]
    with pytest.raises(RowSkipped, match="not_rendered: .* reasoning of message 3"):
        sample_texts(template, {"messages": messages})


def test_deepseek_v3_1_arguments_are_text() -> None:
    template = real_template("deepseek-ai-DeepSeek-V3.1")
    (sample,) = tokenise(template, CALLS)
    assert '<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>' in marked(template, sample)

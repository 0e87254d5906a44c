"""Real tokenizers and chat templates: what exactly is a sample, and which of its tokens are targets
(in ⟦ ⟧).
"""

import pytest
from token_kit import chat, marked, server_ids, template, tokenise, tokenizer_folder

from draftstates.tokens.rows import RowSkipped
from draftstates.tokens.template import ChatTemplate

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Now",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]


def call(name: str, **arguments: str) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def thought(text: str, answer: str) -> dict:
    return {"role": "assistant", "reasoning_content": text, "content": answer}


# ChatML, SmolLM2: a default system prompt, history as it was said.


def test_smollm2(demo_model) -> None:
    loaded = template("smollm2")
    (sample,) = tokenise(loaded, chat("Hi", "Hello", "And?", "Yes"))
    assert (
        marked(loaded, sample)
        == "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging"
        " Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello<|im_end|>⟧\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n⟦Yes<|im_end|>⟧\n"
    )


# Qwen3: thoughts are dropped from history, and the last turn has one even where it is empty. So one
# sample a turn.


def test_qwen3_has_a_sample_for_each_turn_as_it_would_be_generated() -> None:
    loaded = template("qwen3")
    first, second = tokenise(
        loaded, [*chat("Hi"), thought("Greet.", "Hello"), *chat("And?"), thought("Agree.", "Yes")]
    )
    assert (
        marked(loaded, first) == "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\nGreet.\n</think>\n\nHello<|im_end|>⟧\n"
    )
    assert (
        marked(loaded, second)
        == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n⟦<think>\nAgree.\n</think>\n\n"
        "Yes<|im_end|>⟧\n"
    )


def test_qwen3_empty_thought_is_generated_or_given_as_the_template_arguments_say() -> None:
    (thinking,) = tokenise(template("qwen3"), chat("Hi", "Hello"))
    assert (
        marked(template("qwen3"), thinking)
        == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\n"
        "Hello<|im_end|>⟧\n"
    )
    loaded = template("qwen3", enable_thinking=False)
    (given,) = tokenise(loaded, chat("Hi", "Hello"))
    assert (
        marked(loaded, given)
        == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        "⟦Hello<|im_end|>⟧\n"
    )


@pytest.mark.parametrize("policy", ["last", "skip"])
def test_qwen3_rewritten_history_by_the_other_policies(policy: str) -> None:
    loaded, messages = template("qwen3"), chat("Hi", "Hello", "And?", "Yes")
    if policy == "skip":
        with pytest.raises(RowSkipped, match="rewritten_history: 2 turns"):
            tokenise(loaded, messages, rewritten_history=policy)
    else:
        (sample,) = tokenise(loaded, messages, rewritten_history=policy)
        assert sample.input_ids.tolist() == server_ids(loaded, messages)
        assert marked(loaded, sample).endswith("⟦<think>\n\n</think>\n\nYes<|im_end|>⟧\n")


@pytest.mark.parametrize("inline", [False, True])
def test_qwen3_reasoning_is_a_target_or_not_as_configured(inline: bool) -> None:
    loaded = template("qwen3")
    said = (
        chat("", "<think>\nGreet.\n</think>\n\nHello")[1] if inline else thought("Greet.", "Hello")
    )
    start = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    (whole,) = tokenise(loaded, [*chat("Hi"), said])
    assert marked(loaded, whole) == start + "⟦<think>\nGreet.\n</think>\n\nHello<|im_end|>⟧\n"
    (answer,) = tokenise(loaded, [*chat("Hi"), said], include_reasoning=False)
    assert marked(loaded, answer) == start + "<think>\nGreet.\n</think>\n\n⟦Hello<|im_end|>⟧\n"
    assert answer.input_ids.tolist() == whole.input_ids.tolist()


def test_qwen3_an_empty_answer_after_a_thought_still_has_its_end_as_target() -> None:
    loaded = template("qwen3")
    (sample,) = tokenise(
        loaded, [*chat("Hi"), thought("Nothing to say.", "")], include_reasoning=False
    )
    assert marked(loaded, sample).endswith("</think>\n\n⟦<|im_end|>⟧\n")


def test_qwen3_tool_calls_are_targets_and_results_are_not() -> None:
    loaded = template("qwen3")
    messages = [
        *chat("Rain?"),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call("weather", city="Rome"), call("weather", city="Oslo")],
        },
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "rain"},
        thought("Compare.", "Only in Oslo."),
    ]
    calls, answer = tokenise(loaded, messages, tools=TOOLS)
    called = (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
    )
    assert marked(loaded, calls).endswith(
        f"<|im_start|>assistant\n⟦<think>\n\n</think>\n\n{called}⟧\n"
    )
    assert marked(loaded, calls).startswith("<|im_start|>system\n# Tools\n")
    assert marked(loaded, answer).endswith(
        f"<|im_start|>assistant\n{called}\n<|im_start|>user\n<tool_res"
        "ponse>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n⟦<think>\nCompare.\n</think>\n\nOnly"
        " in Oslo.<|im_end|>⟧\n"
    )


def test_qwen3_arguments_as_text_or_as_object_are_the_same_call() -> None:
    loaded = template("qwen3")
    as_object = tokenise(
        loaded,
        [
            *chat("Rain?"),
            {"role": "assistant", "content": "", "tool_calls": [call("weather", city="Rome")]},
        ],
    )
    assert '"arguments": {"city": "Rome"}' in marked(loaded, as_object[0])


def test_qwen3_a_role_that_the_template_drops_is_refused() -> None:
    with pytest.raises(RowSkipped, match="not_rendered: the chat template ignores developer"):
        tokenise(
            template("qwen3"), [{"role": "developer", "content": "Be brief."}, *chat("Hi", "Hello")]
        )


# DeepSeek-V3: BOS from the template, no newline between turns.


def test_deepseek_v3() -> None:
    loaded = template("deepseek_v3")
    messages = chat("Hi", "Two\n\nlines", "And?", "Yes", system="Be kind.")
    (sample,) = tokenise(loaded, messages)
    assert (
        marked(loaded, sample) == "<｜begin▁of▁sentence｜>Be"
        " kind.<｜User｜>Hi<｜Assistant｜>⟦Two\n\nlines<｜end▁of▁sentence｜>⟧"
        "<｜User｜>And?<｜Assistant｜>⟦Yes<｜end▁of▁sentence｜>⟧"
    )
    assert sample.input_ids.tolist() == server_ids(loaded, messages)


def test_deepseek_v3_newlines_survive_although_transformers_calls_it_a_llama_tokenizer() -> None:
    from transformers import AutoTokenizer

    text = "a\n\nb"
    as_loaded = AutoTokenizer.from_pretrained(tokenizer_folder("deepseek_v3"))
    assert (
        as_loaded.decode(as_loaded(text, add_special_tokens=False)["input_ids"]) != text
        # the fault is a real one
    )
    loaded = template("deepseek_v3")
    assert loaded.tokenizer.decode(loaded.encode(text)) == text


def test_deepseek_v3_tools_which_its_template_drops_are_refused_and_calls_are_not() -> None:
    loaded = template("deepseek_v3")
    messages = [
        *chat("Rain?"),
        {"role": "assistant", "content": "", "tool_calls": [call("weather", city="Rome")]},
    ]
    with pytest.raises(RowSkipped, match="not_rendered: the chat template ignores the tools"):
        tokenise(loaded, messages, tools=TOOLS)
    (sample,) = tokenise(loaded, messages)
    # The template takes arguments as text, and calls only beside no content at all. It does not
    # close a turn with one call, so no end is supervised.
    assert marked(loaded, sample) == (
        "<｜begin▁of▁sentence｜><｜User｜>Rain?<｜Assistant｜>⟦<｜tool▁calls▁begin｜>"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        '```json\n{"city": "Rome"}\n```<｜tool▁call▁end｜>⟧'
    )


def test_deepseek_v3_text_beside_a_call_is_named_as_lost() -> None:
    beside = {"role": "assistant", "content": "Look.", "tool_calls": [call("weather", city="Rome")]}
    with pytest.raises(RowSkipped, match="ignores tool calls beside text"):
        tokenise(template("deepseek_v3"), [*chat("Rain?"), beside])


# Llama 3: a turn's end differs from the end of text, and this template opens another turn whether
# it is asked to or not.


def test_llama3() -> None:
    loaded = template("llama3")
    messages = chat("Hi", "Hello", "And?", "Yes", system="Be kind.")
    (sample,) = tokenise(loaded, messages)
    assert (
        marked(loaded, sample)
        == "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n"
        "Hi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\n"
        "And?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n⟦Yes<|eot_id|>⟧"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert loaded.tokenizer.eos_token != "<|eot_id|>"
    assert sample.input_ids.tolist() == server_ids(loaded, messages)
    assert sample.input_ids.tolist().count(loaded.tokenizer.bos_token_id) == 1


# Harmony, gpt-oss: three end tokens, channels, thoughts dropped from history.


def test_gptoss_the_last_answer_ends_otherwise_than_those_in_history() -> None:
    loaded = template("gptoss", "harmony.jinja")
    first, second = tokenise(
        loaded,
        [
            *chat("Hi", system="Be kind."),
            thought("Greet.", "Hello"),
            *chat("And?"),
            thought("Agree.", "Yes"),
        ],
    )
    start = (
        "<|start|>developer<|message|># Instructions\n\nBe"
        " kind.<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant"
    )
    assert marked(loaded, first) == (
        start + "⟦<|channel|>analysis<|message|>Greet.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hello<|return|>⟧"
    )
    assert marked(loaded, second) == (
        start + "<|channel|>final<|message|>Hello<|end|><|start|>user<|message|>And?<|end|>"
        "<|start|>assistant"
        "⟦<|channel|>analysis<|message|>Agree.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes<|return|>⟧"
    )


def test_gptoss_reasoning_left_out_of_the_targets() -> None:
    loaded = template("gptoss", "harmony.jinja")
    (sample,) = tokenise(loaded, [*chat("Hi"), thought("Greet.", "Hello")], include_reasoning=False)
    assert marked(loaded, sample).endswith(
        "Greet.<|end|><|start|>assistant<|channel|>final<|message|>⟦Hello<|return|>⟧"
    )


def test_gptoss_a_call_ends_in_a_token_of_its_own() -> None:
    messages = [
        *chat("Rain?", system="Be kind."),
        {**thought("Look.", ""), "tool_calls": [call("weather", city="Rome")]},
        {"role": "tool", "name": "weather", "content": "sun"},
        *chat("", "No.")[1:],
    ]
    loaded = template("gptoss", "harmony.jinja")
    (sample,) = tokenise(loaded, messages, tools=TOOLS)
    assert marked(loaded, sample).endswith(
        "<|start|>assistant⟦<|channel|>analysis<|message|>Look.<|end|>"
        "<|start|>assistant<|channel|>commentary"
        " to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Rome"}<|call|>⟧<|start|>functions.weather'
        " to=assistant<|channel|>commentary<|message|>"
        "sun<|end|><|start|>assistant⟦<|channel|>final<|message|>No.<|return|>⟧"
    )


# Prompts that open a thought.

OPENER = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{{"
    " m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor"
    " %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.fixture
def opener(tmp_path) -> ChatTemplate:
    (tmp_path / "opener.jinja").write_text(OPENER)
    return ChatTemplate(tokenizer_folder("qwen3"), chat_template=tmp_path / "opener.jinja")


def test_an_opener_that_the_prompt_holds_is_neither_lost_nor_doubled(opener) -> None:
    said = "<think>\nGreet.\n</think>\n\nHello"
    first, second = tokenise(opener, chat("Hi", said, "And?", said))
    start = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert marked(opener, first) == start + "<think>\n⟦Greet.\n</think>\n\nHello<|im_end|>⟧\n"
    assert marked(opener, second) == (
        start + "\n\nHello<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n⟦Greet.\n</think>\n\nHello<|im_end|>⟧\n"
    )
    assert first.input_ids[
        : len(server_ids(opener, chat("Hi"), prompt=True))
    ].tolist() == server_ids(opener, chat("Hi"), prompt=True)


def test_an_answer_without_the_thought_that_the_prompt_opens_is_refused(opener) -> None:
    with pytest.raises(RowSkipped, match="prompt_not_prefix"):
        tokenise(opener, chat("Hi", "Hello"))


def test_the_length_is_that_of_the_ids_and_not_of_what_transformers_wraps_them_in() -> None:
    loaded = template("qwen3")
    encoding = loaded.tokenizer.apply_chat_template(chat("Hi", "Hello there"))
    (sample,) = tokenise(loaded, chat("Hi", "Hello there"))
    assert len(sample.input_ids) == len(encoding["input_ids"]) != len(encoding)

"""Rows that a template has rendered already are refused, and not rendered a second time."""

import pytest
from token_kit import chat, run_source, template, tokenise

from draftstates.tokens.rows import RowSkipped

QWEN = "<|im_start|>"
RENDERED = [
    ("qwen3", None, "Hi", "<|im_start|>assistant\nA"),
    ("qwen3", None, "Hi", "\n<|im_start|>assistant\nA<|im_end|>"),
    ("qwen3", None, "Hi", "A<|im_end|>\n<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\nC"),
    ("qwen3", None, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "A"),
    ("qwen3", None, "Hi<|im_end|>\n<|im_start|>assistant\n", "A"),
    ("llama3", None, "<|begin_of_text|>Hi", "A"),
    ("llama3", None, "Hi", "<|start_header_id|>assistant<|end_header_id|>\n\nA"),
    ("deepseek_v3", None, "<｜User｜>Hi<｜Assistant｜>", "A"),
    ("deepseek_v3", None, "Hi<｜Assistant｜>", "A"),
    ("gemma3", None, "Hi", "<start_of_turn>model\nA"),
    ("gptoss", "harmony.jinja", "Hi", "<|channel|>final<|message|>A"),
    ("gptoss", "harmony.jinja", "Hi", "<|channel|>analysis<|message|>T<|end|><|start|>assistant"),
]


@pytest.mark.parametrize(("name", "file", "asked", "said"), RENDERED)
def test_text_with_the_templates_own_turn_marks_is_refused(name, file, asked, said) -> None:
    loaded = template(name, file)
    with pytest.raises(RowSkipped, match=r"bad_message: message [01] .* rendered already"):
        tokenise(loaded, chat(asked, said))
    with pytest.raises(RowSkipped, match=r"bad_message: message [01] .* rendered already"):
        parts = [{"type": "text", "text": asked}, {"type": "text", "text": "more " + asked}]
        tokenise(loaded, [{"role": "user", "content": parts}, *chat("", said)[1:]])


@pytest.mark.parametrize(
    ("name", "end"),
    [
        *((name, "<|im_end|>") for name in ("llama3", "deepseek_v3", "gemma3")),
        *((name, "<|eot_id|>\n") for name in ("qwen3", "smollm2", "deepseek_v3")),
        ("qwen3", "<|endoftext|>"),
    ],
)
def test_an_answer_with_the_end_token_of_another_model_is_refused(demo_model, name, end) -> None:
    with pytest.raises(RowSkipped, match="bad_message: message 1 .* no end token but the model's"):
        tokenise(template(name), chat("Hi", f"A{end}"))


@pytest.mark.parametrize(
    ("name", "end"),
    [("qwen3", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("gemma3", "<end_of_turn>")],
)
def test_an_answer_that_goes_on_behind_its_end_token_is_refused(name, end) -> None:
    with pytest.raises(RowSkipped, match="bad_message: message 1 .* found it within"):
        tokenise(template(name), chat("Hi", f"A{end} B{end}"))
    assert tokenise(template(name), chat(f"What is {end}?", "It ends a turn."))


@pytest.mark.parametrize(
    ("name", "asked", "said"),
    [
        ("qwen3", "Hi", "The token `<|eot_id|>` ends a turn of Llama 3."),
        ("qwen3", "What is <|im_start|>?", "It begins a turn."),
        ("qwen3", "Hi", "<think>\nT\n</think>\n\nA"),
        ("qwen3", "Hi", '<tool_call>\n{"name": "f"}\n</tool_call>'),
        ("qwen3", "Hi", "<|im_end|>"),
        ("llama3", "Hi", "A<|eot_id|>"),
        ("smollm2", "assistant", "assistant\nA"),
    ],
)
def test_text_that_the_model_may_write_is_kept(demo_model, name, asked, said) -> None:
    assert tokenise(template(name), chat(asked, said))


def test_a_rendered_row_is_counted(demo_model, tmp_path) -> None:
    rows = [{"messages": chat("Hi", f"{QWEN}assistant\nA")}, {"prompt": "Hi", "completion": "A"}]
    found = run_source(tmp_path, rows)
    assert (found["kept"], found["skipped"]) == (1, {"bad_message": 1})
    assert "message 1 (assistant): content" in found["examples"][0]["detail"]

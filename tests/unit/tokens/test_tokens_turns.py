"""What a row says of its answers is what is learnt: cut answers have no end, excluded ones no
target, and content that the template does not show is refused or counted.
"""

import json
import shutil
import time

import pytest
from token_kit import (
    chat,
    marked,
    run_source,
    targets,
    template,
    tokenise,
    tokenizer_folder,
)

from draftstates.tokens import tokenise as tokeniser
from draftstates.tokens.conversations import Conversation, parse_row
from draftstates.tokens.rows import RowSkipped
from draftstates.tokens.sources import TokeniseOptions
from draftstates.tokens.template import ChatTemplate
from draftstates.tokens.turns import tokenise_conversation

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Now"}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
QWEN3 = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def samples_of(loaded: ChatTemplate, row: dict, **options) -> list[str]:
    """Return the samples of a row with their targets in ⟦ ⟧."""
    parsed = parse_row(row)
    assert isinstance(parsed, Conversation)
    samples, lost = tokenise_conversation(
        parsed, loaded, TokeniseOptions(**{"max_tokens": 1024, **options})
    )
    assert not lost
    return [marked(loaded, sample) for sample in samples]


def answered(*answers: dict, **columns) -> dict:
    messages = []
    for fields in answers:
        messages += [{"role": "user", "content": "Hi"}, {"role": "assistant", **fields}]
    return {"messages": messages, **columns}


# Answers that are excluded


def test_an_excluded_answer_is_history_and_no_target(demo_model) -> None:
    loaded = template("smollm2")
    row = answered({"content": "One", "train": False}, {"content": "Two"})
    (sample,) = samples_of(loaded, row)
    assert "assistant\nOne<|im_end|>" in sample
    assert sample.count("⟦") == 1
    assert "⟦Two<|im_end|>⟧" in sample
    (masked,) = samples_of(
        loaded, {**answered({"content": "One"}, {"content": "Two"}), "loss_mask": [0, 0, 0, 1]}
    )
    assert masked == sample


def test_a_row_that_excludes_every_answer_is_skipped(demo_model) -> None:
    for row, options in (
        (answered({"content": "One", "weight": 0}), {}),
        (answered({"content": "One"}, {"content": "Two", "weight": 0}), {"train_on": "last"}),
    ):
        with pytest.raises(RowSkipped, match="no_supervised_tokens: the row says of each answer"):
            samples_of(template("smollm2"), row, **options)


# Answers that were cut


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "deepseek_v3", "llama3"])
def test_a_cut_answer_has_no_end(demo_model, name: str) -> None:
    loaded = template(name)
    (cut,) = samples_of(loaded, answered({"content": "Well the", "finish_reason": "length"}))
    (whole,) = samples_of(loaded, answered({"content": "Well the"}))
    assert cut.endswith("Well the⟧")
    assert whole.startswith(cut.removesuffix("⟧"))


def test_gptoss_a_cut_answer_has_no_end() -> None:
    loaded = template("gptoss", "harmony.jinja", end_tokens=("<|call|>",))
    (said,) = samples_of(loaded, answered({"content": "Well", "finish_reason": "length"}))
    assert said.endswith("<|message|>Well⟧")
    row = answered({"tool_calls": [CALL], "finish_reason": "length"})
    (called,) = samples_of(loaded, row)
    assert called.endswith('{"city": "Rome"}⟧')


def test_a_cut_answer_in_the_middle_is_closed_in_history_and_its_end_is_no_target(
    demo_model,
) -> None:
    loaded = template("smollm2")
    row = answered({"content": "One", "finish_reason": "length"}, {"content": "Two"})
    (sample,) = samples_of(loaded, row)
    assert "⟦One⟧<|im_end|>\n" in sample
    assert "⟦Two<|im_end|>⟧" in sample


@pytest.mark.parametrize(
    "fields",
    [
        {"content": "", "reasoning_content": "Hm so"},
        {"content": None, "reasoning": "Hm so"},
        {"content": "<think>\nHm so"},
    ],
)
def test_qwen3_a_thought_that_was_cut_is_not_closed(fields: dict) -> None:
    row = answered({**fields, "finish_reason": "length"})
    (sample,) = samples_of(template("qwen3"), row)
    assert sample == QWEN3 + "⟦<think>\nHm so⟧"
    with pytest.raises(RowSkipped, match="no_supervised_tokens: the answer was cut in its reason"):
        samples_of(template("qwen3"), row, include_reasoning=False)


def test_an_answer_that_was_cut_before_it_began(demo_model) -> None:
    with pytest.raises(RowSkipped, match="no_supervised_tokens: the answer was cut before"):
        samples_of(template("smollm2"), answered({"content": "", "finish_reason": "length"}))


# Answers with an end of their own


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("smollm2", "<|im_end|>"),
        ("smollm2", "<|im_end|>\n"),
        ("qwen3", "<|im_end|><|im_end|>"),
        ("deepseek_v3", "<｜end▁of▁sentence｜>"),
        ("llama3", "<|eot_id|>"),
        ("llama3", "<|end_of_text|>"),
    ],
)
def test_an_answer_that_ends_in_an_end_token_has_one(demo_model, name: str, end: str) -> None:
    loaded = template(name)
    given = samples_of(loaded, answered({"content": "Hello" + end}, {"content": "Yes" + end}))
    assert given == samples_of(loaded, answered({"content": "Hello"}, {"content": "Yes"}))


# Content that the template does not show


@pytest.mark.parametrize("key", ["reasoning", "thinking", "reasoning_content"])
def test_reasoning_that_the_template_does_not_read(
    demo_model, tmp_path, monkeypatch, capsys, key: str
) -> None:
    monkeypatch.setattr(tokeniser, "ChatTemplate", lambda *_, **__: template("smollm2"))
    rows = [answered({"content": "Hello", key: "Greet."}), answered({"content": "Plain"})]
    counts = run_source(tmp_path, rows)
    assert (counts["kept"], counts["skipped"]) == (1, {"not_rendered": 1})
    assert counts["not_rendered"] == {"reasoning": 1}
    assert "1 not_rendered, not rendered: reasoning 1;" in capsys.readouterr().err
    counts = run_source(tmp_path, rows, may_drop=["reasoning"])
    assert (counts["kept"], counts["not_used"]) == (2, {"reasoning": 1})


@pytest.mark.parametrize("key", ["reasoning", "thinking", "reasoning_content"])
def test_reasoning_is_rendered_under_the_name_that_the_template_reads(tmp_path, key: str) -> None:
    text = "{{ m.role }}: {{ m.NAME }} {{ m.content }}<|im_end|>\n"
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}" + text.replace("NAME", key) + "{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    loaded = ChatTemplate(tokenizer_folder("qwen3"), chat_template=tmp_path / "t.jinja")
    assert loaded.reasoning_key == key
    for given in ("reasoning", "thinking", "reasoning_content"):
        (sample,) = samples_of(loaded, answered({"content": "Hello", given: "Greet."}))
        assert "⟦Greet. Hello<|im_end|>⟧" in sample


def test_reasoning_that_the_template_shows_beside_calls_alone(demo_model, tmp_path) -> None:
    thought = "{{ m.reasoning_content if m.tool_calls }}"
    (tmp_path / "t.jinja").write_text(
        SHOWS_CALLS.replace("{{ m.content }}", thought + "{{ m.content }}")
    )
    loaded = ChatTemplate(tokenizer_folder("smollm2"), chat_template=tmp_path / "t.jinja")
    (sample,) = samples_of(loaded, answered({"tool_calls": [CALL], "reasoning": "Look."}))
    assert 'assistant\n⟦Look.{"name"' in sample
    row = answered({"content": "Hello", "reasoning": "Greet."})
    with pytest.raises(RowSkipped, match="not_rendered: the chat template ignores reasoning"):
        samples_of(loaded, row)
    assert samples_of(loaded, row, may_drop=["reasoning"]) == samples_of(
        loaded, answered({"content": "Hello"})
    )


def test_tools_that_the_template_does_not_show(demo_model) -> None:
    loaded = template("smollm2")
    row = answered({"content": "Hello"}, tools=TOOLS)
    with pytest.raises(RowSkipped, match="not_rendered: the chat template ignores the tools"):
        samples_of(loaded, row)
    assert samples_of(loaded, row, may_drop=["tools"]) == samples_of(
        loaded, answered({"content": "Hello"})
    )
    # Hermes quotes them in the system prompt
    system = {"role": "system", "content": '<tools>{"name": "weather"}</tools>'}
    quoted = {**row, "messages": [system, *row["messages"]]}
    assert len(samples_of(loaded, quoted)) == 1


def test_qwen3_results_that_come_with_the_templates_tags_have_them_once() -> None:
    def row(text: str) -> dict:
        return {
            "messages": [
                *chat("Hi"),
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "content": text},
                *chat("", "Yes")[1:],
            ]
        }

    loaded = template("qwen3")
    tagged = samples_of(loaded, row("<tool_response>\nsun\n</tool_response>"))
    assert tagged == samples_of(loaded, row("sun"))


# Tokenizers with two templates

SHOWS_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}"
    "{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHOWS_NONE = SHOWS_CALLS.replace("{{ c.function | tojson }}", "")


def with_named(tmp_path, templates: dict[str, str]) -> ChatTemplate:
    folder = tmp_path / "named"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_folder("smollm2") / name, folder)
    file = folder / "tokenizer_config.json"
    configured = json.loads(file.read_text())
    configured["chat_template"] = [
        {"name": name, "template": text} for name, text in templates.items()
    ]
    file.write_text(json.dumps(configured))
    return ChatTemplate(folder)


CALLS = {
    "messages": [
        *chat("Hi"),
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "sun"},
        *chat("", "Yes")[1:],
    ]
}


def test_of_two_templates_the_one_that_shows_calls_renders_them(demo_model, tmp_path) -> None:
    loaded = with_named(tmp_path, {"default": SHOWS_NONE, "tool_use": SHOWS_CALLS})
    (sample,) = samples_of(loaded, CALLS)
    assert '⟦{"name": "weather", "arguments": {"city": "Rome"}}<|im_end|>⟧' in sample
    assert samples_of(loaded, answered({"content": "Hello"})) == [QWEN3 + "⟦Hello<|im_end|>⟧\n"]


@pytest.mark.parametrize(
    "templates",
    [
        {"default": SHOWS_NONE},
        {"default": SHOWS_NONE, "tool_use": SHOWS_NONE},
        {"default": SHOWS_NONE, "tool_use": "{{ broken"},
    ],
)
def test_calls_that_no_template_shows_are_refused(
    demo_model, tmp_path, templates: dict[str, str]
) -> None:
    loaded = with_named(tmp_path, templates)
    with pytest.raises(RowSkipped, match="not_rendered: the chat template ignores tool calls"):
        samples_of(loaded, CALLS)


# The accounting


def test_what_is_not_used_is_named_once_with_its_number_of_rows(
    demo_model, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(tokeniser, "ChatTemplate", lambda *_, **__: template("smollm2"))
    rows = [
        {**answered({"content": f"Hello {n}", "id": n}), "metadata": {"n": n}} for n in range(300)
    ]
    counts = run_source(tmp_path, [*rows, answered({"content": "Hello"}), "broken"])
    assert counts["not_used"] == {"messages[].id": 300, "metadata": 300}
    shown = capsys.readouterr().err
    assert shown.count("test: metadata: 300 rows, not used\n") == 1
    many = [{**answered({"content": f"Hello {n}"}), f"key{n}": n} for n in range(300)]
    counts = run_source(tmp_path, many)
    assert len(counts["not_used"]) <= 201
    assert sum(counts["not_used"].values()) == 300


def test_arguments_that_the_template_does_not_read_are_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tokeniser, "ChatTemplate", lambda *_, **__: template("qwen3"))
    arguments = {"enable_thinking": True, "custom_instructions": "Be brief."}
    counts = run_source(
        tmp_path, [{**answered({"content": "A"}), "chat_template_kwargs": arguments}]
    )
    assert counts["not_used"] == {"chat_template_kwargs: custom_instructions": 1}


def test_the_messages_that_are_in_no_sample_are_named(demo_model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tokeniser, "ChatTemplate", lambda *_, **__: template("smollm2"))
    asked = {"messages": chat("Hi", "Hello", "And?")}
    greeted = {"messages": [*chat("", "Welcome")[1:], *chat("Hi", "Hello")]}
    lost = {"messages": chat("Hi", "Hello", "And?", "\ud800")}
    assert run_source(tmp_path, [asked, greeted, lost], deduplicate=False)["not_used"] == {
        "messages after the last answer that is learnt": 1,
        "messages[0], an answer to nothing: rendered, not supervised": 1,
        "turns left out: bad_text": 1,
    }


def test_names_of_roles_come_from_the_configuration(demo_model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tokeniser, "ChatTemplate", lambda *_, **__: template("smollm2"))
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "Kimi", "content": "Hello"}]}
    assert run_source(tmp_path, [row], roles={"kimi": "assistant"})["kept"] == 1


def test_what_the_splitting_of_rows_costs_is_counted(tmp_path, monkeypatch, capsys) -> None:
    loaded = template("qwen3")
    monkeypatch.setattr(tokeniser, "ChatTemplate", lambda *_, **__: loaded)
    split = answered({"content": "One", "reasoning": "Hm"}, {"content": "Two", "reasoning": "So"})
    counts = run_source(tmp_path, [split, answered({"content": "Three"})])
    assert counts["samples"] == 3
    # both samples of the split row begin with the first question
    asked = loaded.rendering.rendered(split["messages"][:1], prompt=True).ids
    assert counts["repeated_tokens"] == len(asked)
    share = f"{len(asked) / counts['tokens']:.0%}"
    assert (
        f"; {share} of the tokens are history that the row's sample before has too"
        in capsys.readouterr().err
    )
    assert run_source(tmp_path, [answered({"content": "Four"})])["repeated_tokens"] == 0


def test_qwen3_two_hundred_turns_with_a_thought_in_each_take_seconds() -> None:
    messages = []
    for turn in range(200):
        thought = " ".join(f"thought{turn} {word}" for word in range(60))
        messages += [
            {"role": "user", "content": " ".join(f"question{turn} {word}" for word in range(30))},
            {"role": "assistant", "content": f"answer {turn}", "reasoning_content": thought},
        ]
    start = time.process_time()
    samples = tokenise(template("qwen3"), messages, max_tokens=1 << 20)
    assert time.process_time() - start < 10
    assert len(samples) == 200
    assert all(len(targets(template("qwen3"), sample)) == 1 for sample in samples[::50])

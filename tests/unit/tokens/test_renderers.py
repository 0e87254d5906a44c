"""Renderers of the package `renderers`, and DeepSeek-V3.2's own encoding.

Where a template renders a model too, one is held to the other: samples and masks are equal. The
differences that are known are written down, each with its reason.
"""

import json
import typing
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.entrypoints.openai.encoding_dsv32 import encode_messages
from token_kit import (
    ALL_MARKS,
    END_TOKENS,
    REAL_TEMPLATES,
    chat,
    marked,
    tokenise,
    tokenizer_folder,
)

from draftstates import config
from draftstates.errors import UserError
from draftstates.tokens import deepseek_v32
from draftstates.tokens.rendering import DEEPSEEK_V32
from draftstates.tokens.rows import RowSkipped
from draftstates.tokens.template import ChatTemplate

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "the city"}},
                "required": ["city"],
            },
        },
    }
]
CALL = {
    "id": "functions.weather:0",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Rome", "days": 2}},
}
RESULT = {
    "role": "tool",
    "tool_call_id": "functions.weather:0",
    "name": "weather",
    "content": "sun",
}


def thought(text: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "reasoning_content": text, **more}


CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "plain": (chat("Hi", "Hello"), None),
    "system": (chat("Hi", "Hello", system="Be kind."), None),
    "multi": (chat("Hi", "Hello", "And?", "Yes", "So?", "No"), None),
    "reasoning": (
        [*chat("Hi"), thought("Greet.", "Hello"), *chat("And?"), thought("So.", "Yes")],
        None,
    ),
    "tools": (
        [
            *chat("Rain?", system="Be kind."),
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            RESULT,
            {"role": "assistant", "content": "No."},
        ],
        TOOLS,
    ),
    "tools and reasoning": (
        [*chat("Rain?"), thought("Look.", "", tool_calls=[CALL]), RESULT, thought("Sun.", "No.")],
        TOOLS,
    ),
}
EVERYTHING = frozenset(CONVERSATIONS)
# renderer: the tokenizer, the template that is held to it, and the conversations that differ
PAIRS: dict[str, tuple[str, str | None, frozenset[str]]] = {
    "qwen3": ("qwen3", None, frozenset()),
    "deepseek-v3": ("deepseek_v3", None, frozenset()),
    "qwen3.5": ("marked", "Qwen3.5-4B", frozenset()),
    "glm-4.5": ("marked", "GLM-4.6", frozenset()),
    "glm-5": ("marked", "GLM-4.7-Flash", frozenset()),
    "nemotron-3": ("marked", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", frozenset()),
    "laguna-xs.2": ("marked", "poolside-Laguna-XS.2", frozenset()),
    "hy3": ("marked", "tencent-Hy3", frozenset()),
    # transformers refuses `append` in this template, so SGLang refuses calls with it
    "kimi-k2": ("marked", "Kimi-K2-Instruct", frozenset({"tools"})),
    "laguna-s-2.1": ("marked", "poolside-Laguna-S-2.1", frozenset()),
    # another default system prompt: MiniMax-M2.5's; it stands before every conversation without one
    "minimax-m2": ("marked", "MiniMax-M2", EVERYTHING - {"system", "tools", "plain", "multi"}),
    # The renderer sees this template's empty thought only in a tokenizer that carries the template;
    # it shows reasoning beside text, which the template drops.
    "gemma4": ("marked", "google-gemma-4-31B-it", EVERYTHING),
}


def outcome(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
) -> list[str]:
    """Return the samples with their supervised tokens marked, or the reason why there are none."""
    try:
        return [marked(template, sample) for sample in tokenise(template, messages, tools=tools)]
    except RowSkipped as skipped:
        return [skipped.reason]


def with_begin(texts: list[str], begin: str) -> list[str]:
    """Return texts with the tokenizer's own first token in place of a renderer's."""
    return [
        text.replace(begin, "<bos_mark>", 1) if text.startswith(begin) else text for text in texts
    ]


@pytest.mark.parametrize("name", PAIRS)
def test_a_renderer_and_a_template_give_the_same_samples(name: str) -> None:
    folder, template, differing = PAIRS[name]
    ends = next(
        (ends for start, ends in END_TOKENS.items() if template and template.startswith(start)), ()
    )
    path = REAL_TEMPLATES[0].parent / f"{template}.jinja" if template else None
    folder = ALL_MARKS if folder == "marked" else tokenizer_folder(folder)
    by_template = ChatTemplate(folder, chat_template=path, renderer="template", end_tokens=ends)
    by_renderer = ChatTemplate(folder, renderer=name, end_tokens=ends)
    different = {
        kind
        for kind, (messages, tools) in CONVERSATIONS.items()
        if with_begin(outcome(by_renderer, messages, tools), "<bos>")
        != outcome(by_template, messages, tools)
    }
    assert different == differing


BEGIN = "<｜begin▁of▁sentence｜>"


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_deepseek_v4_is_rendered_as_deepseek_renders_it(kind: str) -> None:
    """The model's tokenizer carries no template; this one was written after the model's encoder."""
    messages, tools = CONVERSATIONS[kind]
    by_template = ChatTemplate(
        ALL_MARKS,
        chat_template=REAL_TEMPLATES[0].parent / "deepseek-ai-DeepSeek-V4-Flash-0731.jinja",
    )
    by_renderer = ChatTemplate(ALL_MARKS, renderer="deepseek-v4")
    found = outcome(by_renderer, messages, tools)
    assert with_begin(found, BEGIN) == outcome(by_template, messages, tools)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_deepseek_v3_2_is_rendered_as_the_server_renders_it(kind: str, thinking: bool) -> None:
    messages, tools = CONVERSATIONS[kind]
    for end in range(1, len(messages) + 1):
        part = messages[:end]
        asked = [dict(message) for message in part]
        if asked[0]["role"] != "system":
            asked.insert(0, {"role": "system", "content": ""})
        if tools:
            asked[0]["tools"] = tools
        try:
            expected = encode_messages(asked, thinking_mode="thinking" if thinking else "chat")
        except Exception:
            with pytest.raises(ValueError):
                deepseek_v32.render(part, tools=tools, thinking=thinking)
            continue
        assert deepseek_v32.render(part, tools=tools, thinking=thinking) == expected


def model(folder: Path, tokenizer: str, **settings: Any) -> Path:
    """Make a folder with a tokenizer that has no chat template, and a model's configuration."""
    source = ALL_MARKS if tokenizer == "marked" else tokenizer_folder(tokenizer)
    (folder / "tokenizer.json").symlink_to(source / "tokenizer.json")
    described = json.loads((source / "tokenizer_config.json").read_text())
    described.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_auto_takes_the_template_where_there_is_one() -> None:
    loaded = ChatTemplate(tokenizer_folder("qwen3"))
    assert (loaded.name, loaded.why) == ("template", "")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("deepseek_v4", "deepseek-v4 of renderers"), ("deepseek_v32", DEEPSEEK_V32)],
)
def test_auto_takes_the_renderer_of_the_models_type_and_says_why(tmp_path, kind, expected) -> None:
    loaded = ChatTemplate(model(tmp_path, "marked", model_type=kind))
    assert loaded.name.startswith(expected)
    assert "the tokenizer has no chat template" in loaded.why
    (sample,) = tokenise(loaded, chat("Hi", "Hello"))
    assert marked(loaded, sample) == (
        f"{BEGIN}<｜User｜>Hi<｜Assistant｜></think>⟦Hello<｜end▁of▁sentence｜>⟧"
    )


def test_auto_knows_the_language_model_of_a_wrapper(tmp_path) -> None:
    folder = model(tmp_path, "marked", text_config={"model_type": "deepseek_v4"})
    assert ChatTemplate(folder).name.startswith("deepseek-v4")


def test_auto_names_the_choices_where_a_type_has_several_formats(tmp_path) -> None:
    folder = model(tmp_path, "marked", model_type="deepseek_v3")
    with pytest.raises(
        UserError, match="data.renderer: deepseek-v3.2 or deepseek-v3 or deepseek-r1"
    ):
        ChatTemplate(folder)


def test_without_template_and_renderer_the_message_says_what_to_do(tmp_path) -> None:
    folder = model(tmp_path, "marked", model_type="llama")
    with pytest.raises(UserError, match="data.chat_template, or a renderer with data.renderer"):
        ChatTemplate(folder)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"renderer": "kimi-k2"}, "another tokenizer than this renderer needs"),
        ({"renderer": "qwen3", "arguments": {"thinkin": True}}, "data.template_arguments.*thinkin"),
        ({"renderer": DEEPSEEK_V32, "arguments": {"thinkin": True}}, "takes thinking or"),
        ({"renderer": "gpt-oss"}, "opens a thought in the prompt.*data.renderer: template"),
    ],
)
def test_a_renderer_that_cannot_be_used_is_refused(arguments, expected) -> None:
    with pytest.raises(UserError, match=f"(?s){expected}"):
        ChatTemplate(tokenizer_folder("qwen3"), **arguments)


def test_a_renderer_and_a_template_exclude_each_other() -> None:
    with pytest.raises(UserError, match="the renderer qwen3 needs no template"):
        ChatTemplate(
            tokenizer_folder("qwen3"),
            renderer="qwen3",
            chat_template=REAL_TEMPLATES[0].parent / "Qwen-Qwen3-0.6B.jinja",
        )


def test_lone_surrogates_are_a_row_of_bad_text() -> None:
    loaded = ChatTemplate(tokenizer_folder("qwen3"), renderer="qwen3")
    with pytest.raises(RowSkipped, match="bad_text"):
        tokenise(loaded, chat("\ud800", "Hello"))


def test_the_configuration_names_every_renderer_of_the_library() -> None:
    from renderers import base

    base._populate_registry()
    ours = set(typing.get_args(config.Renderer)) - {"auto", "template", DEEPSEEK_V32}
    # `default` is the template, and inkling needs images and sound
    assert ours == set(base.RENDERER_REGISTRY) - {"default", "inkling"}

"""Whatever a row holds, it is kept or skipped for a named reason, and the sum closes."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_kit import chat, template, tokenise, tokenizer_folder

from draftstates.ids import sample_id
from draftstates.tokens.accounting import RowCounter
from draftstates.tokens.rows import REASONS, Row
from draftstates.tokens.sources import TokeniseOptions
from draftstates.tokens.tokenise import Pipeline

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
COLUMNS = (
    *("messages", "conversations", "tools", "system", "instruction", "input", "output"),
    *("prompt", "completion", "response", "input_ids", "loss_mask", "question", "answer"),
    *("history", "choices", "status", "finish_reason", "stop_reason", "weight", "reasoning"),
    *("functions", "system_prompt", "context", "instructions", "attention_mask", "weights"),
    *("metadata", "is_truncated", "finished", "finish_reasons", "mask_history", "label"),
)
TEXT = st.text(max_size=12) | st.sampled_from(
    ["", "<|im_end|>", "<think>", "<think>\nx\n</think>\n\ny", "\n", "\ud800", "<tool_response>"]
)
CALL = st.fixed_dictionaries(
    {
        "function": st.fixed_dictionaries(
            {"name": TEXT, "arguments": JSON | st.just({"a": 1}) | st.just("{}")}
        )
    }
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": (
            st.sampled_from(
                [
                    "system",
                    "user",
                    "assistant",
                    "tool",
                    "developer",
                    "gpt",
                    "human",
                    "function_call",
                    "nobody",
                ]
            )
            | JSON
        )
    },
    optional={
        "content": (
            TEXT
            | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=2)
            | JSON
        ),
        "reasoning_content": TEXT | JSON,
        "tool_calls": st.lists(CALL | JSON, max_size=2) | JSON,
        "name": TEXT | JSON,
        "reasoning": TEXT | JSON,
        "thinking": TEXT | JSON | st.lists(TEXT, max_size=2),
        "function_call": CALL | JSON,
        "train": JSON | st.booleans(),
        "weight": JSON | st.sampled_from([0, 1]),
        "finish_reason": JSON | st.sampled_from(["length", "stop"]),
        "channel": JSON | st.sampled_from(["analysis", "final"]),
        "truncated": JSON | st.sampled_from(["true", 1]),
        "metadata": JSON
        | st.sampled_from(['{"finish_reason": "length"}', '{"a": 1, "a": 2}', "{"]),
        "reasoning_details": st.lists(st.fixed_dictionaries({"text": TEXT | JSON}), max_size=2),
        "type": JSON | st.sampled_from(["message", "reasoning", "function_call"]),
    },
)
PART = st.fixed_dictionaries(
    {
        "type": (
            st.sampled_from(
                [
                    *("text", "thinking", "tool_use", "tool_result", "output_text", "reasoning"),
                    *("function_call", "function_call_output", "refusal", "summary_text"),
                ]
            )
        )
    },
    optional={
        key: TEXT | JSON | st.lists(st.fixed_dictionaries({"text": TEXT}), max_size=2)
        for key in (
            "text",
            "thinking",
            "name",
            "arguments",
            "input",
            "content",
            "output",
            "summary",
        )
    },
)
MESSAGE |= st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.lists(PART, max_size=3)}
)
MESSAGE |= PART
MESSAGES = st.lists(MESSAGE, max_size=5) | st.lists(TEXT, max_size=6).map(
    lambda turns: chat(*turns)
)
TOKENS = st.lists(st.integers(-1, 60_000) | JSON, max_size=6)
ROW = (
    JSON
    | st.dictionaries(st.sampled_from(COLUMNS), JSON | MESSAGES | TEXT | TOKENS, max_size=4)
    | st.fixed_dictionaries(
        {"messages": MESSAGES},
        optional={"tools": JSON | st.just([{"type": "function", "function": {"name": "f"}}])},
    )
    | st.fixed_dictionaries(
        {"messages": MESSAGES, "loss_mask": st.lists(st.integers(0, 1) | JSON, max_size=5)},
        optional={"history": JSON, "choices": JSON, "finish_reason": JSON, "train": JSON},
    )
    | st.fixed_dictionaries({"input": MESSAGES | TEXT, "output": MESSAGES, "status": JSON})
    | st.fixed_dictionaries(
        {"input_ids": TOKENS, "loss_mask": st.lists(st.integers(0, 1), max_size=6)}
    )
)
TEMPLATES = {
    "smollm2": {},
    "qwen3": {},
    "deepseek_v3": {},
    "llama3": {},
    "gptoss": {"file": "harmony.jinja"},
}


@pytest.fixture(scope="module", params=TEMPLATES)
def loaded(request, demo_model):
    return template(request.param, **TEMPLATES[request.param])


def pipeline_of(loaded, **options) -> Pipeline:
    pipeline = Pipeline(
        tokenizer_folder("smollm2"), TokeniseOptions(**{"max_tokens": 64, **options})
    )
    pipeline.__dict__["template"] = loaded
    return pipeline


def as_line(value: object) -> bytes:
    return json.dumps(value).encode()


@given(
    st.lists(ROW.map(as_line) | st.binary(max_size=12), max_size=6),
    st.sampled_from(["skip", "cut"]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=150)
def test_any_row_is_kept_or_skipped_for_a_named_reason_and_the_sum_closes(
    loaded, lines, over_long, reasoning, deduplicate
) -> None:
    pipeline = pipeline_of(loaded, over_long=over_long, include_reasoning=reasoning)
    counts = RowCounter("s", deduplicate=deduplicate)
    for number, line in enumerate(lines):
        result = pipeline.process(Row(number, "here", line))
        assert bool(result.samples) != bool(result.skipped)
        kept = counts.add(result)
        for _, name, sample in kept:
            assert name == sample_id(sample.input_ids, sample.loss_mask)
            assert 2 <= len(sample.input_ids) == len(sample.loss_mask) <= 64
            assert sample.loss_mask.any()
    found = counts.as_dict()
    assert found["rows_in"] == len(lines) == found["kept"] + sum(found["skipped"].values())
    assert set(found["skipped"]) | set(found["lost_turns"]) <= set(REASONS)
    assert Counter(example["reason"] for example in found["examples"]) == found["skipped"]


@given(st.lists(st.text(max_size=20), min_size=2, max_size=8))
@settings(max_examples=60)
def test_every_turn_is_learned_once_after_the_history_that_the_server_would_see(
    loaded, turns
) -> None:
    messages = chat(*turns)
    learned = []
    for sample in tokenise(loaded, messages):
        mask = sample.loss_mask.tolist()
        starts = [
            index for index, target in enumerate(mask) if target and not (index and mask[index - 1])
        ]
        for start in starts:
            places = [
                place
                for place in range(1, len(messages), 2)
                if loaded.encode(loaded.rendering.text(messages[:place], prompt=True)).tolist()
                == sample.input_ids[:start].tolist()
            ]
            assert len(places) == 1
            learned += places
            end = mask.index(0, start) if 0 in mask[start:] else len(mask)
            assert sample.input_ids[end - 1] in loaded.ends.ids
    assert sorted(learned) == list(range(1, len(messages), 2))

"""Every piece of content is rendered, or named: each field of a generated row holds a marker that
occurs nowhere else, and each marker is looked for in the decoded samples.
"""

import dataclasses
import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_kit import REAL_TEMPLATES, REFUSED, real_template, template, tokenizer_folder

from draftstates.tokens.accounting import RowResult
from draftstates.tokens.content import ContentCheck
from draftstates.tokens.rows import Row
from draftstates.tokens.sources import TokeniseOptions
from draftstates.tokens.template import ChatTemplate
from draftstates.tokens.tokenise import Pipeline

TEMPLATES: dict[str, dict[str, Any]] = {
    "smollm2": {},
    "qwen3": {},
    "deepseek_v3": {},
    "llama3": {},
    "gptoss": {"file": "harmony.jinja", "end_tokens": ("<|call|>",)},
}
EARLIER = "reasoning of earlier turns, which the template leaves out"


@dataclasses.dataclass
class Marker:
    """What must become of a field.

    Attributes:
        kind: what a row is refused for that loses it.
        names: names of which one is in the accounting where the field is not in a kept sample.
        learnt: whether it must be supervised.
        excluded: whether it must not be supervised.
    """

    kind: str
    names: tuple[str, ...] = ()
    learnt: bool = False
    excluded: bool = False


class Maker:
    """A row in the making, with the markers that it holds."""

    def __init__(self, draw) -> None:
        self.draw = draw
        self.markers: dict[str, Marker] = {}

    def mark(self, kind: str, *names: str, learnt: bool = False) -> str:
        text = f"Mk{len(self.markers):03d}z"
        self.markers[text] = Marker(kind, names, learnt)
        return text

    def maybe(self) -> bool:
        return self.draw(st.booleans())

    def one_of(self, *values: Any) -> Any:
        return self.draw(st.sampled_from(values))

    def empties(self, *keys: str) -> dict[str, Any]:
        """Fields that say nothing, in any number."""
        return {key: self.one_of(None, "", []) for key in keys if self.maybe()}

    def said(self) -> str:
        """An answer's text; the words around the marker are those that templates look at."""
        return self.one_of("{}", "{}\n\nMore", " {} ", '"{}" \\ é', "1. {}<br>").format(
            self.mark("content", learnt=True)
        )

    def arguments(self) -> dict[str, Any]:
        def mark() -> str:
            return self.mark("tool calls", learnt=True)

        found: dict[str, Any] = {mark(): mark()}
        if self.maybe():
            found[mark()] = {"deep": [mark(), {"er": mark() + '"\n'}], "n": 1.5, "yes": True}
        return found

    def as_json(self, value: Any) -> Any:
        """The value, as JSON text, or as the JSON text of JSON text."""
        text = json.dumps(value)
        return self.one_of(value, text, json.dumps(text)) if isinstance(value, dict) else value

    def exclude(self, before: int) -> None:
        """Have the markers since a number not learnt."""
        for marker in list(self.markers.values())[before:]:
            marker.learnt, marker.excluded = False, True

    def tools(self) -> list[dict[str, Any]]:
        def mark(key: str) -> str:
            return self.mark("tools", f"tools[]: {key}", "tools")

        field = {"type": "string", "description": mark("description"), "enum": [mark("enum")]}
        return [
            {
                "name": mark("name"),
                "description": mark("description"),
                "parameters": {"type": "object", "properties": {mark("properties"): field}},
            }
        ]


def openai(maker: Maker) -> dict[str, Any]:
    """The chat format, with everything that servers and data sets add to it."""
    messages: list[dict[str, Any]] = []
    if maker.maybe():
        role = maker.one_of("system", "developer")
        messages.append({"role": role, "content": maker.mark(role)})
    rounds = maker.one_of(1, 2)
    for round_ in range(rounds):
        content = maker.mark("content")
        if maker.maybe():
            content = [{"type": maker.one_of("text", "input_text"), "text": content}]
        user = {"role": "user", "content": content, **maker.empties("tool_calls", "name")}
        first = len(maker.markers)
        if maker.maybe():
            user["name"] = maker.mark("name", "messages[].name (user)")
        answer = {"role": "assistant", **maker.empties("refusal", "audio", "function_call")}
        if maker.maybe():
            key = maker.one_of("reasoning", "thinking", "reasoning_content")
            answer[key] = maker.mark("reasoning", EARLIER, learnt=True)
        if maker.maybe():
            answer["annotations"] = [maker.mark("annotations", "messages[].annotations")]
        messages += [user, answer]
        if not maker.maybe():
            answer |= {"content": maker.said(), **maker.empties("tool_calls")}
            if "reasoning" not in answer and maker.maybe():
                answer["content"] = _parts(maker, answer)
            answer |= maker.one_of({}, {"finish_reason": "stop"}, {"finish_reason": "length"})
            if round_ < rounds - 1 and maker.maybe():
                answer |= maker.one_of({"train": False}, {"weight": 0}, {"loss": 0.0})
                maker.exclude(first)
            continue
        calls = [_call(maker) for _ in range(maker.one_of(1, 2))]
        answer |= {"tool_calls": calls, "content": maker.one_of(None, "", maker.said())}
        # only what was chosen is in the row
        maker.markers = {
            text: marker
            for text, marker in maker.markers.items()
            if text in json.dumps(messages, ensure_ascii=False)
        }
        result = {
            "role": "tool",
            "content": maker.mark("tool"),
            "name": calls[0]["function"]["name"],
        }
        result["tool_call_id"] = maker.mark("id", "messages[].tool_call_id")
        messages += [result, {"role": "assistant", "content": maker.said()}]
    row: dict[str, Any] = {"messages": messages, **maker.empties("tools", "system")}
    if maker.maybe():
        row["messages"] = json.dumps(messages)
    if maker.maybe():
        arguments = {"enable_thinking": True}
        row["chat_template_kwargs"] = maker.one_of(arguments, json.dumps(arguments))
    if maker.maybe():
        row["tools"] = [{"type": "function", "function": tool} for tool in maker.tools()]
    if maker.maybe():
        row["metadata"] = {"source": maker.mark("metadata", "metadata")}
    return row


def _parts(maker: Maker, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """An answer's text as parts; the thought is one of them, if no key has it."""
    parts = [{"type": maker.one_of("text", "output_text"), "text": answer["content"]}]
    if not any(answer.get(key) for key in ("reasoning", "thinking", "reasoning_content")):
        thought = maker.mark("reasoning", EARLIER, learnt=True)
        parts.insert(0, {"type": "thinking", "thinking": thought})
    return parts


def _call(maker: Maker) -> dict[str, Any]:
    arguments = maker.as_json(maker.arguments())
    return {
        "id": maker.mark("id", "messages[].tool_calls[].id"),
        "type": "function",
        "function": {"name": maker.mark("tool calls", learnt=True), "arguments": arguments},
    }


def responses(maker: Maker) -> dict[str, Any]:
    """Input and output of OpenAI's Responses."""
    asked = {"role": "user", "content": [{"type": "input_text", "text": maker.mark("content")}]}
    output: list[dict[str, Any]] = []
    if maker.maybe():
        kind, key = maker.one_of(("summary_text", "summary"), ("reasoning_text", "content"))
        thought = {"type": kind, "text": maker.mark("reasoning", EARLIER, learnt=True)}
        output.append({"type": "reasoning", "summary": [], key: [thought]})
    if maker.maybe():
        text = {"type": "output_text", "text": maker.said(), "annotations": []}
        output.append({"type": "message", "role": "assistant", "content": [text]})
    if maker.maybe() or not output:
        call = {"call_id": maker.mark("id", "messages[].tool_calls[].id"), "type": "function_call"}
        call["name"] = maker.mark("tool calls", learnt=True)
        output.append({**call, "arguments": json.dumps(maker.arguments())})
        if maker.maybe():
            said: Any = maker.mark("tool")
            if maker.maybe():
                said = [{"type": "input_text", "text": said}]
            done = {"type": "function_call_output", "call_id": "c", "output": said}
            output += [done, {"role": "assistant", "content": maker.said(), "type": "message"}]
    row = {"input": [asked], "output": output}
    row["status"] = maker.one_of("completed", "incomplete")
    if maker.maybe():
        # earlier turns are items too
        text = {"type": "output_text", "text": maker.said()}
        before = [{"role": "user", "content": maker.mark("content")}]
        row["input"] = [*before, {"type": "message", "role": "assistant", "content": [text]}, asked]
    if maker.maybe():
        row["instructions"] = maker.mark("system")
    if maker.maybe():
        row["tools"] = [{"type": "function", **tool} for tool in maker.tools()]
    return row


def anthropic(maker: Maker) -> dict[str, Any]:
    """Anthropic's blocks."""
    blocks: list[dict[str, Any]] = []
    if maker.maybe():
        thought = maker.mark("reasoning", EARLIER, learnt=True)
        signature = maker.mark("signature", "messages[].content[].signature")
        blocks.append({"type": "thinking", "thinking": thought, "signature": signature})
    if maker.maybe():
        blocks.append({"type": "text", "text": maker.said()})
    use = {"type": "tool_use", "id": maker.mark("id", "messages[].tool_calls[].id")}
    use |= {"name": maker.mark("tool calls", learnt=True), "input": maker.arguments()}
    said: Any = maker.mark("tool")
    if maker.maybe():
        said = [{"type": "text", "text": said}]
    result = {"type": "tool_result", "content": said}
    result["tool_use_id"] = maker.mark("id", "messages[].tool_call_id")
    more = [{"type": "text", "text": maker.mark("content")}] if maker.maybe() else []
    row: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": maker.mark("content")},
            {"role": "assistant", "content": [*blocks, use]},
            {"role": "user", "content": [result, *more]},
            {"role": "assistant", "content": [{"type": "text", "text": maker.said()}]},
        ],
        "stop_reason": maker.one_of("end_turn", "max_tokens"),
    }
    if maker.maybe():
        row["system"] = [{"type": "text", "text": maker.mark("system")}]
    if maker.maybe():
        row["tools"] = [{**tool, "input_schema": tool.pop("parameters")} for tool in maker.tools()]
    return row


def sharegpt(maker: Maker) -> dict[str, Any]:
    """ShareGPT, with calls as turns of their own."""
    first = len(maker.markers)
    turns = [("human", maker.mark("content")), ("gpt", maker.said())]
    flags = maker.one_of({}, {"weight": 0}, {"train": False}, {"loss": False})
    asked = len(maker.markers)
    if maker.maybe():
        call = {"name": maker.mark("tool calls", learnt=True), "arguments": maker.arguments()}
        turns += [("human", maker.mark("content")), ("function_call", json.dumps(call))]
        turns += [("observation", maker.mark("tool")), ("gpt", maker.said())]
    else:
        turns += [("human", maker.mark("content")), ("gpt", maker.said())]
    if maker.maybe():
        turns.append(
            ("human", maker.mark("content", "messages after the last answer that is learnt"))
        )
    row: dict[str, Any] = {"id": maker.mark("id", "id")}
    row["conversations"] = [{"from": role, "value": text} for role, text in turns]
    row["conversations"][1] |= flags
    if flags:
        for marker in list(maker.markers.values())[first:asked]:
            marker.excluded, marker.learnt = True, False
    if maker.maybe():
        row["system"] = maker.mark("system")
    if maker.maybe():
        row["tools"] = json.dumps(maker.tools())
    return row


def alpaca(maker: Maker) -> dict[str, Any]:
    """Alpaca, with its history and with the names that relatives use."""
    names = maker.one_of(
        ("instruction", "input", "output", "system"),
        ("instruction", "context", "response", "system_prompt"),
    )
    row: dict[str, Any] = {names[0]: maker.mark("content"), names[2]: maker.said()}
    row[names[1]] = maker.one_of("", None) if maker.maybe() else maker.mark("content")
    if maker.maybe():
        row[names[3]] = maker.mark("system")
    if maker.maybe():
        row["history"] = [[maker.mark("content"), maker.said()]]
    if maker.maybe():
        row["category"] = maker.mark("category", "category")
    return row


def hermes(maker: Maker) -> dict[str, Any]:
    """Hermes: calls, results and tools as text; the tools perhaps in a column as well."""
    name = maker.mark("tools")
    tool = {"name": name, "description": maker.mark("tools", "tools[]: description", "tools")}
    system = f"{maker.mark('system')} <tools>{json.dumps([{'name': name}])}</tools>"
    call = {"name": maker.mark("content", learnt=True), "arguments": {}}
    thought = ""
    if maker.maybe():
        thought = f"<think>\n{maker.mark('reasoning', EARLIER, learnt=True)}\n</think>\n\n"
    turns = [
        ("system", system),
        ("human", maker.mark("content")),
        ("gpt", f"{thought}<tool_call>\n{json.dumps(call)}\n</tool_call>"),
        ("tool", f"<tool_response>\n{maker.mark('tool')}\n</tool_response>"),
        ("gpt", maker.said()),
    ]
    row: dict[str, Any] = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    row["tools"] = json.dumps([{"type": "function", "function": tool}])
    return row


def toolbench(maker: Maker) -> dict[str, Any]:
    """ToolBench: thought, action and its input are an answer's text, results are a function's."""
    answer = f"Thought: {maker.mark('content', learnt=True)}\nAction: f\nAction Input: {{}}"
    turns = [
        ("system", maker.mark("system")),
        ("user", maker.mark("content")),
        ("assistant", answer),
        ("function", maker.mark("tool")),
        ("assistant", maker.said()),
    ]
    return {
        "id": "Step 1",
        "conversations": [{"from": role, "value": text} for role, text in turns],
    }


def completion(maker: Maker) -> dict[str, Any]:
    """A question and an answer, as text or as messages."""
    question, answer = maker.one_of(
        ("prompt", "completion"),
        ("prompt", "response"),
        ("question", "answer"),
        ("input", "output"),
    )
    asked, said = maker.mark("content"), maker.said()
    row: dict[str, Any] = {question: asked, answer: said}
    if question == "prompt" and maker.maybe():
        row[question] = [{"role": "user", "content": asked}]
        row[answer] = [{"role": "assistant", "content": said}]
    if maker.maybe():
        row[maker.one_of("system", "system_prompt")] = maker.mark("system")
    if maker.maybe():
        key = maker.one_of("reasoning", "reasoning_content", "thinking")
        row[key] = maker.mark("reasoning", learnt=True)
    return row


SHAPES = (openai, responses, anthropic, sharegpt, alpaca, hermes, toolbench, completion)


@pytest.fixture(scope="module", params=TEMPLATES)
def loaded(request, demo_model):
    return template(request.param, **TEMPLATES[request.param])


def processed(loaded, row: dict[str, Any], **options: Any) -> RowResult:
    pipeline = Pipeline(
        tokenizer_folder("smollm2"), TokeniseOptions(**{"max_tokens": 8192, **options})
    )
    pipeline.__dict__["template"] = loaded
    return pipeline.process(Row(0, "here", json.dumps(row).encode()))


def lost_markers(loaded, result: RowResult, markers: dict[str, Marker]) -> list[str]:
    """Return the markers of a kept row that are not where they belong and not named."""
    texts, learnt = [], []
    for _, sample in result.samples:
        texts.append(loaded.tokenizer.decode(sample.input_ids.tolist()))
        learnt.append(loaded.tokenizer.decode(sample.input_ids[sample.loss_mask == 1].tolist()))
    return [
        marker
        for marker, what in markers.items()
        if (what.excluded and any(marker in text for text in learnt))
        or (
            not any(marker in text for text in (learnt if what.learnt else texts))
            and not set(what.names) & set(result.not_used)
        )
    ]


def is_named(result: RowResult, markers: dict[str, Marker]) -> bool:
    """Return whether a refused row is refused for something that it has."""
    kinds = {marker.kind for marker in markers.values()}
    return any(kind in refused for refused in result.skipped.kinds for kind in kinds)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_every_field_is_rendered_or_named(loaded, shape, data) -> None:
    # DeepSeek-V3's template leaves the end token of a lone call to the next message
    check_row(loaded, shape, Maker(data.draw), "no_turn_end")


def check_row(loaded, shape, maker: Maker, *reasons: str) -> None:
    """Check what becomes of a row; it may also be skipped for the given reasons."""
    row = shape(maker)
    result = processed(loaded, row)
    if result.skipped and result.skipped.reason in reasons:
        return
    if result.skipped and result.skipped.reason == "template_error":
        # the template says itself what it does not take
        assert result.skipped.detail
    elif result.skipped:
        assert result.skipped.reason == "not_rendered", result.skipped
        assert is_named(result, maker.markers), (result.skipped, row)
    else:
        assert set(result.lost_turns) <= {"template_error", *reasons}
        if not result.lost_turns:
            assert lost_markers(loaded, result, maker.markers) == [], (result.not_used, row)


class Drawn(Maker):
    """A row that is drawn by a seed; the same in every run."""

    def __init__(self, seed: str) -> None:
        super().__init__(None)
        self.random = random.Random(seed)

    def maybe(self) -> bool:
        return self.random.random() < 0.5

    def one_of(self, *values: Any) -> Any:
        return self.random.choice(values)


@pytest.mark.parametrize("name", [file.stem for file in REAL_TEMPLATES if file.stem not in REFUSED])
def test_every_field_is_rendered_or_named_by_every_real_template(name: str) -> None:
    loaded = real_template(name)
    for shape in SHAPES:
        for seed in range(4):
            # an answer may not follow a prompt that opens a thought, or may not be closed
            reasons = ("prompt_not_prefix", "no_turn_end")
            check_row(loaded, shape, Drawn(f"{shape.__name__} {seed}"), *reasons)


class Fixed(Maker):
    """The row with every optional field, or with none."""

    def __init__(self, everything: bool) -> None:
        super().__init__(None)
        self.everything = everything

    def maybe(self) -> bool:
        return self.everything

    def one_of(self, *values: Any) -> Any:
        return values[0]


# what must be kept: without this, a tokeniser that refuses everything would pass
KEPT = [
    *((name, shape, False) for name in TEMPLATES for shape in (sharegpt, alpaca, completion)),
    *(("qwen3", shape, True) for shape in SHAPES),
    *(("llama3", shape, False) for shape in (openai, hermes)),
]


@pytest.mark.parametrize(("name", "shape", "everything"), KEPT)
def test_rows_of_these_shapes_are_kept(demo_model, name: str, shape, everything: bool) -> None:
    maker, loaded = Fixed(everything), template(name, **TEMPLATES[name])
    result = processed(loaded, shape(maker))
    assert result.skipped is None
    assert len(maker.markers) > 1
    assert lost_markers(loaded, result, maker.markers) == []


# templates that lose something, at times; each is found for the rows that it loses
LOSES = {
    "long text": "{{ m.content if m.content | length < 12 else '' }}",
    "text of the second message of a role": "{{ m.content if loop.index < 3 else '' }}",
    "text with a colon": "{{ m.content.split(':')[0] }}",
    "the thought before an answer": "{{ m.content.split('</think>')[-1] }}",
    "a second call": "{{ m.content }}{{ m.tool_calls[0].function if m.tool_calls }}",
    "arguments": "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}",
}
LOST_CALLS = [
    {"type": "function", "function": {"name": name, "arguments": {"city": f"Mk{name}z"}}}
    for name in ("Mkaz", "Mkbz")
]
LOST_ROWS = [
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}, *more]
    for text, more in (
        ("Mk00z, which is long", []),
        ("Hi", [{"role": "user", "content": "Mk01z"}, {"role": "assistant", "content": "Yes"}]),
        ("Mk02z: Mk03z", []),
        ("<think>Mk04z</think>Mk05z", []),
    )
] + [[{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": LOST_CALLS}]]


@pytest.fixture(scope="module")
def losing(demo_model, tmp_path_factory):
    loaded = {}
    for what, text in LOSES.items():
        file = tmp_path_factory.mktemp("losing") / "t.jinja"
        file.write_text(
            "{% for m in messages %}<|im_start|>{{ m.role }}\n" + text + "<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        )
        loaded[what] = ChatTemplate(tokenizer_folder("smollm2"), chat_template=file)
    return loaded


def lost_rows(losing, what: str) -> int:
    """Return how many rows are kept although a marker of theirs is lost."""
    lost = 0
    for messages in LOST_ROWS:
        result = processed(losing[what], {"messages": messages})
        if result.skipped:
            assert result.skipped.reason == "not_rendered"
            continue
        found = re.findall(r"Mk\w+z", json.dumps(messages))
        lost += bool(lost_markers(losing[what], result, dict.fromkeys(found, Marker("content"))))
    return lost


@pytest.mark.parametrize("what", LOSES)
def test_what_a_template_loses_now_and_then_is_found(losing, monkeypatch, what: str) -> None:
    assert lost_rows(losing, what) == 0
    monkeypatch.setattr(ContentCheck, "see", lambda *_: None)
    # the fault is a real one
    assert lost_rows(losing, what) > 0

"""Every assistant turn up to its end token is a target and nothing else is; the ids are those that
the server would see.
"""

import datetime

import numpy as np
import pytest
from token_kit import chat, server_ids, targets, template, tokenise, tokenizer_folder

from draftstates.errors import UserError
from draftstates.tokens import template as template_module
from draftstates.tokens.rows import RowSkipped
from draftstates.tokens.template import ChatTemplate

HAIKU = "An old silent pond,\na frog jumps in.\nSplash! Silence again. 🐸"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}[{{ m.role }}]\n{{ m.content }} ###END###\n{% endfor %}{% if"
    " add_generation_prompt %}[assistant]\n{% endif %}"
)


def with_template(tmp_path, text: str, tokenizer: str = "smollm2") -> ChatTemplate:
    file = tmp_path / "template.jinja"
    file.write_text(text)
    return ChatTemplate(tokenizer_folder(tokenizer), chat_template=file)


@pytest.fixture(scope="module")
def smollm2(demo_model):
    return template("smollm2")


def test_every_assistant_turn_with_its_end_token_is_a_target(smollm2) -> None:
    (sample,) = tokenise(smollm2, chat("Hi", "Hello there.", "A haiku?", HAIKU, system="Be kind."))
    assert targets(smollm2, sample) == ["Hello there.<|im_end|>", HAIKU + "<|im_end|>"]


def test_ids_are_the_templates_own(smollm2) -> None:
    messages = chat("Hi", "Hello there.", "A haiku?", HAIKU)
    (sample,) = tokenise(smollm2, messages)
    assert sample.input_ids.tolist() == server_ids(smollm2, messages)
    assert sample.input_ids.dtype == np.int32
    assert sample.loss_mask.dtype == np.uint8


def test_history_of_each_turn_is_what_the_server_would_be_sent(smollm2) -> None:
    messages = chat("Hi", "Hello", "And?", "Nothing", "Really?", "Really.")
    (sample,) = tokenise(smollm2, messages)
    starts = np.flatnonzero(np.diff(sample.loss_mask.astype(int), prepend=0) == 1)
    for start, place in zip(starts, (1, 3, 5), strict=True):
        assert sample.input_ids[:start].tolist() == server_ids(
            smollm2, messages[:place], prompt=True
        )


def test_repeated_assistant_text_is_masked_where_it_was_said(smollm2) -> None:
    (sample,) = tokenise(smollm2, chat("Say yes", "Yes", "Yes", "Yes", "Yes<|im_end|>", "Yes"))
    assert targets(smollm2, sample) == ["Yes<|im_end|>"] * 3
    user = tokenise(smollm2, chat("assistant\nYes", "Yes"))[0]
    assert targets(smollm2, user) == ["Yes<|im_end|>"]


def test_newline_after_the_end_token_is_no_target(smollm2) -> None:
    (sample,) = tokenise(smollm2, chat("Hi", "Hello"))
    assert smollm2.tokenizer.decode(sample.input_ids[-1:]) == "\n"
    assert sample.loss_mask[-1] == 0
    assert sample.loss_mask[-2] == 1


def test_last_turn_alone_as_configured(smollm2) -> None:
    messages = chat("Hi", "Hello", "And?", "Nothing")
    (sample,) = tokenise(smollm2, messages, train_on="last")
    assert targets(smollm2, sample) == ["Nothing<|im_end|>"]
    assert sample.input_ids.tolist() == server_ids(smollm2, messages)


def test_default_system_prompt_is_not_doubled(smollm2) -> None:
    given = tokenise(smollm2, chat("Hi", "Hello", system="Mine."))[0]
    default = tokenise(smollm2, chat("Hi", "Hello"))[0]
    assert smollm2.tokenizer.decode(given.input_ids).count("system") == 1
    assert smollm2.tokenizer.decode(default.input_ids).count("system") == 1


def test_empty_turns_and_two_in_a_row(smollm2) -> None:
    messages = [
        *chat("Hi", ""),
        {"role": "assistant", "content": "Still here."},
        *chat("Good", "Yes"),
    ]
    (sample,) = tokenise(smollm2, messages)
    assert targets(smollm2, sample) == ["<|im_end|>", "Still here.<|im_end|>", "Yes<|im_end|>"]


def test_messages_after_the_last_assistant_turn_are_not_sent(smollm2) -> None:
    (sample,) = tokenise(smollm2, chat("Hi", "Hello", "Are you there?"))
    assert sample.input_ids.tolist() == server_ids(smollm2, chat("Hi", "Hello"))


def test_an_assistant_turn_that_nothing_precedes_is_no_target(smollm2) -> None:
    messages = [{"role": "assistant", "content": "Welcome."}, *chat("Hi", "Hello")]
    (sample,) = tokenise(smollm2, messages)
    assert targets(smollm2, sample) == ["Hello<|im_end|>"]
    with pytest.raises(RowSkipped, match="no_assistant"):
        tokenise(smollm2, messages[:1])


@pytest.mark.parametrize(
    "text", ["  two spaces  ", "ends in newlines\n\n", "\n\nbegins with newlines", "\ttab", " "]
)
def test_whitespace_of_an_answer_is_kept(smollm2, text: str) -> None:
    messages = chat("Hi", text, "Again", "Fine")
    samples = tokenise(smollm2, messages)
    said = [target for sample in samples for target in targets(smollm2, sample)]
    assert sorted(said) == sorted([text + "<|im_end|>", "Fine<|im_end|>"])


def test_where_text_merges_with_the_prompt_the_turn_is_what_the_model_would_generate(
    tmp_path,
) -> None:
    """The prompt ends in a newline; Qwen's tokenizer makes one token of that and an answer's
    leading newline.
    """
    loaded = with_template(tmp_path, CHATML, "qwen3")
    messages = chat("Hi", "\nHello", "And?", "Yes")
    alone, rest = tokenise(loaded, messages)
    prompt = server_ids(loaded, messages[:1], prompt=True)
    # the case is a real one
    assert server_ids(loaded, messages[:2])[: len(prompt)] != prompt
    assert alone.input_ids[: len(prompt)].tolist() == prompt
    assert targets(loaded, alone) == ["\nHello<|im_end|>"]
    assert rest.input_ids.tolist() == server_ids(loaded, messages)
    assert targets(loaded, rest) == ["Yes<|im_end|>"]


def test_too_long_is_skipped_or_cut_at_a_turns_end_as_configured(smollm2) -> None:
    messages = chat(
        "Hi", "Hello", "Count", "one two three four five six seven eight nine ten " * 20
    )
    with pytest.raises(RowSkipped, match="too_long: expected at most 100 tokens, found"):
        tokenise(smollm2, messages, max_tokens=100, over_long="skip")
    (cut,) = tokenise(smollm2, messages, max_tokens=100, over_long="cut")
    assert cut.cut
    assert targets(smollm2, cut) == ["Hello<|im_end|>"]
    assert cut.loss_mask[-1] == 1
    assert cut.input_ids.tolist() == server_ids(smollm2, messages)[: len(cut.input_ids)]
    with pytest.raises(RowSkipped, match="too_long"):
        tokenise(smollm2, messages, max_tokens=10, over_long="cut")


def test_an_end_of_several_ordinary_tokens_is_a_target_as_a_whole(smollm2, tmp_path) -> None:
    loaded = with_template(tmp_path, PLAIN)
    (sample,) = tokenise(loaded, chat("Hi", "Hello ###END###", "END", "END"))
    assert targets(loaded, sample) == ["Hello ###END### ###END###", "END ###END###"]


def test_a_template_that_closes_no_turn_is_refused(smollm2, tmp_path) -> None:
    with pytest.raises(UserError, match="puts nothing after an assistant turn"):
        with_template(tmp_path, "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")


def test_a_turn_that_the_template_leaves_open_is_refused(smollm2, tmp_path) -> None:
    loaded = with_template(
        tmp_path, CHATML.replace("<|im_end|>", "{% if m.content != 'open' %}<|im_end|>{% endif %}")
    )
    assert targets(loaded, tokenise(loaded, chat("Hi", "closed"))[0]) == ["closed<|im_end|>"]
    with pytest.raises(RowSkipped, match=r"no_turn_end: expected one of <\|im_end\|>"):
        tokenise(loaded, chat("Hi", "open"))


def test_a_doubled_bos_is_refused(smollm2, tmp_path) -> None:
    once = with_template(tmp_path, "{{ bos_token }}" + CHATML)
    assert once.tokenizer.bos_token == "<|im_start|>"
    with pytest.raises(RowSkipped, match="doubled_bos: the first two tokens are both"):
        # ChatML's own mark is this tokenizer's BOS
        tokenise(once, chat("Hi", "Hello"))
    assert tokenise(smollm2, chat("Hi", "Hello"))


def test_what_the_template_would_drop_without_a_word_is_refused(smollm2) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with pytest.raises(RowSkipped, match="not_rendered: the chat template ignores the tools"):
        tokenise(smollm2, chat("Hi", "Hello"), tools=tools)
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
    }
    with pytest.raises(RowSkipped, match="not_rendered: the chat template ignores tool calls"):
        tokenise(smollm2, [*chat("Hi"), call])


def test_parts_of_text_are_one_text(smollm2) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "this?"}]
    split = tokenise(smollm2, [{"role": "user", "content": parts}, *chat("Hi", "That.")[1:]])[0]
    whole = tokenise(smollm2, chat("What is this?", "That."))[0]
    assert split.input_ids.tolist() == whole.input_ids.tolist()


def test_what_a_template_refuses_is_a_reason(smollm2, tmp_path) -> None:
    loaded = with_template(
        tmp_path,
        "{% if messages[0].content == 'no' %}{{ raise_exception('I said no') }}{% endif %}"
        + CHATML,
    )
    with pytest.raises(RowSkipped, match="template_error: .*I said no"):
        tokenise(loaded, chat("no", "Hello"))


def test_a_template_that_takes_parts_gets_them(smollm2, tmp_path) -> None:
    parts = (
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text"
        " }}{% endfor %}{% endif %}"
    )
    loaded = with_template(tmp_path, CHATML.replace("{{ m.content }}", parts))
    message = {
        "role": "user",
        "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "this?"}],
    }
    split = tokenise(loaded, [message, *chat("Hi", "That.")[1:]])[0]
    assert (
        split.input_ids.tolist()
        == tokenise(loaded, chat("What isthis?", "That."))[0].input_ids.tolist()
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "expected a file with a Jinja template, found none"),
        ("folder", "expected a file with a Jinja template, found none"),
        (b"caf\xe9", "expected a Jinja template in UTF-8: .* byte 0xe9"),
        (b"{% if %}", "the chat template cannot render .*TemplateSyntaxError"),
        (b"", "the chat template puts nothing after an assistant turn"),
    ],
)
def test_a_template_file_that_cannot_be_used_is_named_with_its_key(
    smollm2, tmp_path, content, expected: str
) -> None:
    file = tmp_path / "t.jinja"
    if content == "folder":
        file.mkdir()
    elif content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=f"^data.chat_template: {file}: {expected}"):
        ChatTemplate(smollm2.folder, chat_template=file)


def test_todays_date_in_a_template_is_the_configured_one_so_that_ids_do_not_change_from_day_to_day(
    smollm2, tmp_path
) -> None:
    file = tmp_path / "dated.jinja"
    file.write_text("Today is {{ strftime_now('%d %b %Y') }}.\n" + CHATML)
    default = ChatTemplate(smollm2.folder, chat_template=file)
    other = ChatTemplate(smollm2.folder, chat_template=file, today=datetime.date(2031, 2, 3))
    assert default.rendering.text(chat("Hi")).startswith("Today is 26 Jul 2024.\n")
    assert other.rendering.text(chat("Hi")).startswith("Today is 03 Feb 2031.\n")


def test_a_tokenizer_whose_text_is_not_what_it_would_send_is_refused(smollm2, monkeypatch) -> None:
    class Another:
        def encode(self, text: str) -> np.ndarray:
            return np.array([*smollm2.tokenizer(text)["input_ids"], 2], dtype=np.int32)

    monkeypatch.setattr(template_module, "encoder_for", lambda tokenizer: Another())
    with pytest.raises(UserError, match="other ids than its text"):
        ChatTemplate(smollm2.folder)

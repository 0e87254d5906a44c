"""The quick way of tokenising gives the ids of the `tokenizers` library, always."""

import json
import unicodedata

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from token_kit import template

from draftstates.tokens import encoder as module
from draftstates.tokens.encoder import PlainEncoder, PythonEncoder, WordEncoder, encoder_for

NAMES = ("qwen3", "deepseek_v3", "llama3", "gptoss", "smollm2")
MARKS = ("<|im_end|>", "<think>", "<｜User｜>", "<|eot_id|>", "<|", "|>")
PIECES = st.one_of(
    st.text(max_size=8),
    st.text(
        alphabet=" \n\t\r\v\f\x1c\x85\u00a0\u2028\u3000'sStTdDlLvVrReEmM1١½!?-_ſK", max_size=12
    ),
    st.text(alphabet="aéñß日本語한हिन्दी👩\u200d🏳️\u0301\u0308e", max_size=8),
    st.sampled_from(MARKS),
)


@pytest.fixture(scope="module", params=NAMES)
def both(request, demo_model):
    loaded = template(request.param, "harmony.jinja" if request.param == "gptoss" else None)
    return encoder_for(loaded.tokenizer), loaded.tokenizer.backend_tokenizer


def test_real_tokenizers_go_the_quick_way(both) -> None:
    assert isinstance(both[0], WordEncoder)


@given(st.lists(PIECES, max_size=12).map("".join))
@example("e\u0301 is é, and '\u017f is 's; 12345 \n\n \t x<|im_end|>\n<|im_end|>")
@example(
    "\U00011935\U00011930 \U0001fae9 \u1c89"
    # composed, or assigned, in some versions of Unicode alone
)
@settings(max_examples=100, deadline=None)
def test_any_text_has_the_librarys_ids(both, text: str) -> None:
    quick, library = both
    assert quick.encode(text).tolist() == library.encode(text, add_special_tokens=False).ids


def test_characters_of_every_script_have_the_librarys_ids(both) -> None:
    quick, library = both
    for start in [*range(0, 0x500, 64), *range(0x500, 0x3000, 256), *range(0x3000, 0x30000, 2048)]:
        characters = [chr(code) for code in range(start, start + 64) if not 0xD800 <= code < 0xE000]
        text = " ".join(
            f"a{character}1{character} {character}{character}\n" for character in characters
        )
        assert quick.encode(text).tolist() == library.encode(text, add_special_tokens=False).ids, (
            hex(start)
        )


def test_a_character_that_this_python_does_not_know_goes_through_the_library(both) -> None:
    quick, library = both
    assert unicodedata.category("\u0378") == "Cn"
    assert (
        quick.encode("a \u0378 b").tolist()
        == library.encode("a \u0378 b", add_special_tokens=False).ids
    )
    assert not any("\u0378" in word for word in quick._words)


def test_a_word_that_comes_again_has_the_same_ids_when_memory_was_cleared(
    both, monkeypatch
) -> None:
    monkeypatch.setattr(module, "_WORDS", 3)
    monkeypatch.setattr(module, "_PIECE_CHARACTERS", 20)
    quick, library = both
    for text in ["one two three", "four five six", "one two", "six one seven", "two four"] * 2:
        assert quick.encode(text).tolist() == library.encode(text, add_special_tokens=False).ids
    assert len(quick._words) <= 3


def changed(change) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer with one merge and one mark, changed in one point."""
    vocabulary = {mark: index for index, mark in enumerate([*module._byte_marks().values(), "He"])}
    small = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[("H", "e")]))
    small.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    small.add_special_tokens(["<|end|>"])
    parts = json.loads(small.to_str())
    change(parts)
    return tokenizers.Tokenizer.from_str(json.dumps(parts))


class Loaded:
    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend_tokenizer = backend


CHANGES = {
    "another normalizer": lambda parts: parts.update(normalizer={"type": "Lowercase"}),
    "a space before the text": lambda parts: parts["pre_tokenizer"].update(add_prefix_space=True),
    "another pre-tokenizer": lambda parts: parts.update(pre_tokenizer={"type": "Whitespace"}),
    "marks that eat spaces": lambda parts: parts["added_tokens"][0].update(rstrip=True),
    "bytes for unknown words": lambda parts: parts["model"].update(byte_fallback=True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_tokenizer_of_another_kind_goes_through_the_library(change) -> None:
    backend = changed(change)
    found = encoder_for(Loaded(backend))
    assert isinstance(found, PlainEncoder)
    assert (
        found.encode("  Hello  World").tolist()
        == backend.encode("  Hello  World", add_special_tokens=False).ids
    )


def test_a_difference_is_noticed_and_not_passed_on() -> None:
    quick = encoder_for(Loaded(changed(lambda parts: None)))
    assert isinstance(quick, WordEncoder)
    quick._words["Hello"] = np.int32(7).tobytes()
    with pytest.raises(AssertionError, match="differ for 'Hello'"):
        quick.encode("Hello")


class WrittenInPython:
    """As Kimi's tokenizer behaves: another way is taken, and a slow one, as soon as there is any
    argument but the text.
    """

    def encode(self, text: str, **arguments: bool) -> list[int]:
        assert not arguments
        return [ord(character) for character in text]


def test_a_tokenizer_written_in_python_is_asked_as_the_server_asks_it() -> None:
    assert isinstance(encoder_for(WrittenInPython()), PythonEncoder)
    assert encoder_for(WrittenInPython()).encode("ab").tolist() == [97, 98]


class AddsTokens:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(character) for character in text]


def test_a_tokenizer_written_in_python_that_would_add_a_token_is_told_not_to() -> None:
    assert encoder_for(AddsTokens()).encode("a").tolist() == [97]

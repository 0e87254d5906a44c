"""Samples on a page: chosen by their ids, each token with its text and its mask."""

from pathlib import Path

import numpy as np
import pytest
from results_tree import HOSTILE, WordTokenizer, make_results
from token_kit import chat, template, tokenise

from draftstates.errors import visible
from draftstates.paths import Results
from draftstates.report.page import as_json
from draftstates.report.shown import choose, pieces, shown_samples, turns


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("results")
    make_results(folder, shards=3)
    return {"demo": Results(folder).tokens("demo")}


def test_the_selection_is_that_of_the_least_ids_after_the_named_ones(tokens) -> None:
    every = [sample["sample_id"] for _, sample in choose(tokens)]
    assert every == sorted(every) and len(every) == 36
    few = [sample["sample_id"] for _, sample in choose(tokens, count=5)]
    assert few == every[:5]
    named = [sample["sample_id"] for _, sample in choose(tokens, named=[every[30]], count=5)]
    assert named == [every[30], *every[:5]]


def test_texts_and_masks_of_a_sample_are_those_of_its_tokens(demo_model) -> None:
    loaded = template("smollm2")
    text = "Yes: 1 < 2 &\n日本 🎉👩\u200d🔬 مرحبا"
    (sample,) = tokenise(loaded, chat("Is 1 < 2?", text, "And?", "No.", system="S"))
    ids, mask = sample.input_ids.tolist(), sample.loss_mask.tolist()
    found = pieces(loaded.tokenizer, ids)
    assert "".join(part for part, _ in found) == loaded.tokenizer.decode(ids)
    assert [token for _, of_piece in found for token in of_piece] == ids
    assert any(len(of_piece) > 1 for _, of_piece in found), "no character of several tokens"
    split = turns(loaded.tokenizer, ids, mask)
    begins = ["".join(piece[0] for piece in turn)[:18] for turn in split]
    assert [begin.split("\n")[0] for begin in begins] == [
        "<|im_start|>system",
        "<|im_start|>user\nI"[:16],
        "<|im_start|>assist",
        "<|im_start|>user\nA"[:16],
        "<|im_start|>assist",
    ]
    on = [token for turn in split for _, of_piece, is_on in turn for token in of_piece if is_on]
    assert on == sample.input_ids[sample.loss_mask == 1].tolist()


def test_long_samples_are_cut_in_their_middle_and_few_fit_the_bytes() -> None:
    ids = np.arange(20, 5020) % 300 + 20
    sample = {"sample_id": "a" * 32, "row": 3, "input_ids": ids, "loss_mask": np.ones(5000, int)}
    others = [("x", {**sample, "sample_id": f"{number:032x}"}) for number in range(50)]
    found = shown_samples(
        others, WordTokenizer(), why={f"{0:032x}": ("named", True)}, most_bytes=300_000
    )
    assert 1 < len(found) < 50
    assert found[0]["why"] == "named" and found[0]["refused"] and not found[1]["refused"]
    assert (found[0]["tokens"], found[0]["left_out"]) == (5000, 2000)
    kept = [token for turn in found[0]["turns"] for _, of_piece, _ in turn for token in of_piece]
    assert kept == [*ids[:2500].tolist(), *ids[-500:].tolist()]


def test_a_sample_larger_than_the_bytes_is_shown_alone() -> None:
    sample = {"sample_id": "a" * 32, "row": 0, "input_ids": [20] * 50, "loss_mask": [1] * 50}
    assert len(shown_samples([("x", sample)] * 2, WordTokenizer(), why={}, most_bytes=10)) == 1


def test_the_bytes_are_those_of_the_page_where_each_angle_takes_six() -> None:
    # a tag is the tokenizer's eleventh token
    sample = {"sample_id": "a" * 32, "row": 0, "input_ids": [11] * 50, "loss_mask": [1] * 50}
    samples = [("x", sample)] * 40
    found = shown_samples(samples, WordTokenizer(), why={}, most_bytes=40_000)
    assert 1 < len(found) < 40
    assert len(as_json(found).encode()) <= 40_000


@pytest.mark.parametrize("text", HOSTILE)
def test_no_invisible_character_is_left(text: str) -> None:
    left = {*"\u202e\u2028\x00\x1b"} & set(visible(text))
    assert not left
    assert visible("a\tb\n日本 👩\u200d🔬 مرحبا") == "a\tb\n日本 👩\u200d🔬 مرحبا"


def test_marks_of_direction_are_named() -> None:
    assert visible("\u202eabc\u202c\u200f\ufeff") == "⟨U+202E⟩abc⟨U+202C⟩⟨U+200F⟩⟨U+FEFF⟩"

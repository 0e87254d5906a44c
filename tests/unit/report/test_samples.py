"""People check masks by eye: what is shown as supervised is supervised."""

import pyarrow.parquet as pq
import pytest
from token_kit import chat, run_cli, run_source, template, tokenise, tokenizer_folder

from draftstates.errors import UserError
from draftstates.report.samples import (
    as_html,
    as_terminal,
    find_sample,
    html_page,
    marked,
    spread_samples,
)
from draftstates.tokens import files as output


def as_html_of(run: list[tuple[str, bool]]) -> str:
    return as_html(run, title="t")


@pytest.fixture(scope="module")
def found(demo_model):
    loaded = template("smollm2")
    (sample,) = tokenise(loaded, chat("Is 1 < 2?", "Yes: 1 < 2 &\ntrue 🎉", system="S"))
    parts = {"input_ids": sample.input_ids.tolist(), "loss_mask": sample.loss_mask.tolist()}
    return marked(loaded.tokenizer, parts)


def test_without_colour_supervised_tokens_are_in_brackets_and_ends_of_lines_are_seen(found) -> None:
    assert (
        as_terminal(found, colour=False)
        == "<|im_start|>system↵\nS<|im_end|>↵\n<|im_start|>user↵\nIs 1 <"
        " 2?<|im_end|>↵\n<|im_start|>assistant↵\n⟦Yes: 1 < 2 &↵\ntrue 🎉<|im_end|>⟧↵\n"
    )


def test_in_colour_every_line_has_its_own(found) -> None:
    text = as_terminal(found, colour=True)
    assert "\x1b[30;42mYes: 1 < 2 &↵\x1b[0m\n\x1b[30;42mtrue 🎉<|im_end|>\x1b[0m" in text
    assert "\x1b[30;42mIs" not in text


def test_html_is_escaped(found) -> None:
    page = html_page([as_html(found, title="<sample>")])
    assert "<b>Yes: 1 &lt; 2 &amp;<i>↵</i>\ntrue 🎉&lt;|im_end|&gt;</b>" in page
    assert "<h3>&lt;sample&gt;</h3>" in page
    assert "<|im_start|>" not in page


@pytest.mark.parametrize("show", [lambda run: as_terminal(run, colour=True), as_html_of])
def test_characters_that_change_how_the_rest_is_shown_are_named(show) -> None:
    shown = show([("a\x1b[2Jb\u202ec\r\x00d\u2028\tée\u0301 \u05d0👩\u200d🚀\n", True)])
    assert "a⟨U+001B⟩[2Jb⟨U+202E⟩c⟨U+000D⟩⟨U+0000⟩d⟨U+2028⟩\tée\u0301 \u05d0👩\u200d🚀" in shown


def test_the_command_finds_a_sample_by_row_and_by_id(tmp_path, demo_model, capsys) -> None:
    run_source(tmp_path, [{"messages": chat(f"Q{n}", f"A{n}")} for n in range(3)])
    (sample,) = find_sample(tmp_path / "test.parquet", row=2)
    assert find_sample(tmp_path / "test.parquet", sample_id=sample["sample_id"][:8]) == [sample]
    assert [sample["row"] for sample in spread_samples(tmp_path / "test.parquet", count=1)] == [0]
    with pytest.raises(UserError, match="expected row 9, found none"):
        find_sample(tmp_path / "test.parquet", row=9)
    with pytest.raises(UserError, match="expected sample ffff, found none"):
        find_sample(tmp_path / "test.parquet", sample_id="ffff")
    run_cli(
        "show",
        tmp_path / "test.parquet",
        "--row",
        2,
        "--tokenizer",
        tokenizer_folder("smollm2"),
    )
    shown = capsys.readouterr().out
    assert shown.startswith(f"sample {sample['sample_id']}, row 2 of test: ")
    assert "⟦A2<|im_end|>⟧" in shown
    assert "A1" not in shown
    run_cli(
        "show",
        tmp_path / "test.parquet",
        "--tokenizer",
        tokenizer_folder("smollm2"),
        "--html",
        tmp_path / "s.html",
    )
    assert "<b>A0&lt;|im_end|&gt;</b>" in (tmp_path / "s.html").read_text()


def test_some_samples_of_each_source_are_spread_over_it(
    tmp_path, demo_model, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(output, "_GROUP_ROWS", 4)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        run_source(tmp_path / name, [{"messages": chat(f"Q{n}", f"{name}{n}")} for n in range(31)])
    path = tmp_path / "a" / "test.parquet"
    assert pq.ParquetFile(path).num_row_groups > 4
    assert [sample["row"] for sample in spread_samples(path, count=4)] == [0, 10, 20, 30]
    assert len(spread_samples(path, count=99)) == 31
    paths = [path, tmp_path / "b" / "test.parquet"]
    run_cli("show", *paths, "--tokenizer", tokenizer_folder("smollm2"), "--count", 2)
    shown = capsys.readouterr().out
    assert [
        answer for answer in ("a0", "a30", "b0", "b30", "a1") if f"⟦{answer}<|im_end|>⟧" in shown
    ] == ["a0", "a30", "b0", "b30"]
    with pytest.raises(SystemExit):
        run_cli("show", *paths, "--tokenizer", tokenizer_folder("smollm2"), "--row", 2)

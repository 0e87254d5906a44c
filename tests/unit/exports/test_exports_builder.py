"""An export exists whole or not at all, is checked by reading back, and writes only what is new."""

import fcntl
import os
import shutil
from pathlib import Path

import pytest

from draftstates.errors import UserError
from draftstates.exports.builder import LEDGER, SUMMARY, Builder

# file name to text
Content = dict[str, str]


class Crash(Exception):
    """A process that dies in the middle."""


def build(
    output: Path,
    files: Content,
    *,
    identity: str = "a",
    crash_after: int | None = None,
    finish: bool = True,
) -> tuple[int, int]:
    """Export the texts; returns how many files were written and reused."""

    def check(path: Path) -> None:
        if path.read_text() not in files.values():
            raise UserError(f"{path}: reading back gave something else")

    with Builder(output, identity=identity) as builder:
        for number, (name, text) in enumerate(files.items()):
            if number == crash_after:
                raise Crash
            builder.add(name, text, lambda path, text=text: path.write_text(text), check)  # type: ignore[misc]
        if finish:
            builder.finish({"files": len(files)})
    return builder.written, builder.reused


def contents(output: Path) -> Content:
    files = (
        path for path in output.rglob("*") if path.is_file() and path.name not in (LEDGER, SUMMARY)
    )
    return {path.relative_to(output).as_posix(): path.read_text() for path in files}


FILES = {"x/0.bin": "zero", "x/1.bin": "one", "y/2.bin": "two"}


def test_an_unchanged_export_writes_nothing_and_another_identity_everything(tmp_path: Path) -> None:
    assert build(tmp_path / "out", FILES) == (3, 0)
    assert build(tmp_path / "out", FILES) == (0, 3)
    assert build(tmp_path / "out", FILES, identity="b") == (3, 0)
    assert contents(tmp_path / "out") == FILES


def test_an_inserted_and_a_removed_row_write_only_what_is_new(tmp_path: Path) -> None:
    build(tmp_path / "out", FILES)
    moved = {"x/0.bin": "new", "x/1.bin": "zero", "y/2.bin": "two"}
    assert build(tmp_path / "out", moved) == (1, 2)
    assert contents(tmp_path / "out") == moved
    assert build(tmp_path / "out", FILES) == (1, 2)
    assert contents(tmp_path / "out") == FILES


def test_the_present_export_stays_whole_until_the_next_one_is(tmp_path: Path) -> None:
    build(tmp_path / "out", FILES)
    other = {name: text + "!" for name, text in FILES.items()}
    with pytest.raises(Crash):
        build(tmp_path / "out", other, crash_after=2)
    assert contents(tmp_path / "out") == FILES
    assert build(tmp_path / "out", other) == (1, 2)
    assert contents(tmp_path / "out") == other
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_interrupted_export_goes_on_though_it_is_interrupted_again(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        build(tmp_path / "out", FILES, crash_after=2)
    assert not (tmp_path / "out").exists()
    with pytest.raises(Crash):
        build(tmp_path / "out", FILES, crash_after=0)
    assert build(tmp_path / "out", FILES) == (1, 2)


def test_what_an_interrupted_export_of_other_rows_left_does_not_stay(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        build(tmp_path / "out", {"z.bin": "z", "x/0.bin": "other", "w": "w"}, crash_after=2)
    assert build(tmp_path / "out", FILES) == (3, 0)
    assert contents(tmp_path / "out") == FILES


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    build(tmp_path / "out", FILES)
    (tmp_path / "out").rename(tmp_path / ".out.old")
    assert build(tmp_path / "out", FILES) == (0, 3)
    assert contents(tmp_path / "out") == FILES


def test_a_file_that_reads_back_wrong_gets_no_name(tmp_path: Path) -> None:
    with (
        Builder(tmp_path / "out", identity="a") as builder,
        pytest.raises(UserError, match="reading back"),
    ):

        def check(path: Path) -> None:
            raise UserError("reading back gave something else")

        builder.add("x", "content", lambda path: path.write_text("wrong"), check)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.partial" / "x").exists()


@pytest.mark.parametrize("fault", ["touched", "cut", "gone"])
def test_a_changed_file_of_the_present_export_is_written_again(tmp_path: Path, fault: str) -> None:
    build(tmp_path / "out", FILES)
    path = tmp_path / "out" / "x" / "1.bin"
    if fault == "gone":
        path.unlink()
    else:
        path.write_text("on" if fault == "cut" else "oen")
    assert build(tmp_path / "out", FILES) == (1, 2)
    assert contents(tmp_path / "out") == FILES


def test_a_linked_file_is_not_written_through(tmp_path: Path) -> None:
    build(tmp_path / "out", FILES)
    # links x/0.bin into the partial folder
    with pytest.raises(Crash):
        build(tmp_path / "out", FILES, crash_after=1)
    # and overwrites it there
    with pytest.raises(Crash):
        build(tmp_path / "out", {"x/0.bin": "other", "w": ""}, crash_after=1)
    assert contents(tmp_path / "out") == FILES


def test_a_file_system_without_links_gets_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "out", FILES)

    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    assert build(tmp_path / "out", FILES) == (0, 3)
    assert build(tmp_path / "out", FILES) == (0, 3)
    assert contents(tmp_path / "out") == FILES


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert build(tmp_path / "out", FILES) == (3, 0)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("work of years")
    with pytest.raises(UserError, match="not an export's"):
        build(tmp_path / "mine", FILES)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "work of years"


def test_an_export_that_lost_its_ledger_is_named_with_the_remedy(tmp_path: Path) -> None:
    output = tmp_path / "out"
    build(output, {"a": "x"})
    (output / LEDGER).unlink()
    with pytest.raises(UserError, match=f"lost its {LEDGER}, run: rm -r {output} && snakemake"):
        build(output, {"a": "x"})
    shutil.rmtree(output)
    assert build(output, {"a": "x"}) == (1, 0)


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    other = os.open(tmp_path / ".out.partial", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(UserError, match="another export is being written"):
        build(tmp_path / "out", FILES)
    os.close(other)
    assert build(tmp_path / "out", FILES) == (3, 0)


def test_a_full_disk_is_a_users_error(tmp_path: Path) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with (
        Builder(tmp_path / "out", identity="a") as builder,
        pytest.raises(UserError, match="No space left on device"),
    ):
        builder.add("x", "content", full, lambda path: None)

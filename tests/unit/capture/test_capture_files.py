"""Which files the server opens, and which bytes of them it writes."""

import dataclasses
import os
from pathlib import Path

import pytest
from capture_bench import Bench

from draftstates.capture.files import Destinations, is_self_tests, is_trusted
from draftstates.errors import UserError
from draftstates.extract import protocol


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"residual_layers": (1, 2)}, "residual_layers"),
        ({"final_norm": "pre_norm"}, "final_norm"),
        ({"stored_dtype": "bfloat16"}, "stored dtype"),
        ({"model_digest": "of other weights"}, "capture key"),
        ({"compute_dtype": "bfloat16"}, "capture key"),
        ({"quantization": "fp8"}, "capture key"),
    ],
)
def test_a_file_laid_out_for_another_capture_is_refused(
    tmp_path: Path, changes: dict, named: str
) -> None:
    with pytest.raises(UserError, match=f"laid out for {named}"):
        Bench(tmp_path, **changes).destinations.open(".building/shard.safetensors")


@pytest.mark.parametrize("row", [-1, 11, 12])
def test_rows_outside_the_shard_are_refused(bench: Bench, row: int) -> None:
    """They would fall on the tensors beside, on the header, or make the file longer."""
    before, file = bench.path.read_bytes(), bench.destinations.open(bench.name)
    for tensor, (_, width) in file.states.items():
        with pytest.raises(ValueError, match="12 rows"):
            file.write(tensor, row, memoryview(bytes(2 * width)))
    assert bench.path.read_bytes() == before


def test_a_file_that_was_deleted_does_not_stay_open(bench: Bench) -> None:
    """Else the server would keep the bytes of shards that were given up from the disk."""
    bench.destinations.open(bench.name)
    other = bench.path.with_name("other.safetensors")
    other.write_bytes(bench.path.read_bytes())
    bench.path.unlink()
    bench.destinations.open(f".building/{other.name}")
    open_files = [
        os.readlink(f"/proc/self/fd/{number}")
        for number in os.listdir("/proc/self/fd")
        if number_is_open(number)
    ]
    assert str(other) in open_files
    assert f"{bench.path} (deleted)" not in open_files


def number_is_open(number: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")


def test_a_destination_outside_the_root_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    bench = Bench(tmp_path / "root")
    (tmp_path / "outside.safetensors").write_bytes(bench.path.read_bytes())
    with pytest.raises(UserError, match="lies outside"):
        bench.destinations.open("../outside.safetensors")
    with pytest.raises(UserError, match="the server sees no"):
        bench.destinations.open(".building/elsewhere.safetensors")


@pytest.mark.parametrize(
    "place",
    [
        "tiny-0123abcd/shards/shard.safetensors",
        "tiny-0123abcd/shards/.building/../shard.safetensors",
        "tiny-0123abcd/shards/.building",
        ".building-of-others/shard.safetensors",
    ],
)
def test_a_published_shard_is_never_written(bench: Bench, place: str) -> None:
    """It is laid out for this capture, and a request names it: its rows must stay as they are."""
    file = bench.root / place
    (bench.root / "tiny-0123abcd/shards/.building").mkdir(parents=True)
    if place.endswith(".building"):
        file.rmdir()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bench.path.read_bytes())
    with pytest.raises(UserError, match="writes shards under construction alone"):
        bench.destinations.open(place)
    assert not list(bench.root.glob("**/*.receipts.jsonl"))


def test_a_link_and_a_second_name_of_a_published_shard_are_no_way_to_it(bench: Bench) -> None:
    published = bench.root / "published.safetensors"
    published.write_bytes(bench.path.read_bytes())
    link, other = bench.path.with_name("link"), bench.path.with_name("other")
    link.symlink_to(published)
    other.hardlink_to(published)
    with pytest.raises(UserError, match="link is a link: expected a file of its own"):
        bench.destinations.open(".building/link")
    with pytest.raises(UserError, match="expected a file of its own"):
        bench.destinations.open(".building/other")


@pytest.mark.parametrize("kind", ["link", "second name", "pipe"])
def test_receipts_are_written_to_a_file_of_their_own(bench: Bench, kind: str) -> None:
    """A link beside the shard would have the server append to any file of this user."""
    other, receipts = bench.root / "other", protocol.growing_receipts(bench.path)
    other.write_bytes(b"mine")
    if kind == "pipe":
        os.mkfifo(receipts)
    elif kind == "link":
        receipts.symlink_to(other)
    else:
        receipts.hardlink_to(other)
    with pytest.raises((UserError, OSError), match="file of its own|No such device"):
        bench.destinations.open(bench.name)
    assert other.read_bytes() == b"mine"


def test_a_folder_that_leads_out_of_the_root_is_refused(bench: Bench, tmp_path: Path) -> None:
    outside = tmp_path / "outside" / ".building"
    outside.mkdir(parents=True)
    (outside / "shard.safetensors").write_bytes(bench.path.read_bytes())
    inner = bench.root / "root"
    (inner / ".building").mkdir(parents=True)
    (inner / ".building" / "way").symlink_to(outside)
    settings = dataclasses.replace(bench.destinations._settings, root=inner)
    with pytest.raises(UserError, match="lies outside"):
        Destinations(settings).open(".building/way/shard.safetensors")


@pytest.mark.parametrize("kind", ["link", "folder", "linked folder", "owner"])
def test_a_foreign_note_is_not_trusted(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = tmp_path / ".selftest", tmp_path / "other"
    other.mkdir()
    (other / "passed-x").touch()
    note = folder / "passed-x"
    if kind == "linked folder":
        folder.symlink_to(other)
    else:
        folder.mkdir()
    if kind == "link":
        note.symlink_to(other / "passed-x")
    elif kind == "folder":
        note.mkdir()
    elif kind == "owner":
        note.touch()
        assert is_trusted(note, root=tmp_path)
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        assert is_trusted(note, root=tmp_path), "of the root's owner"
        found = note.lstat()
        monkeypatch.setattr(
            Path, "lstat", lambda _: os.stat_result((*found[:4], 4711, *found[5:10]))
        )
    assert not is_trusted(note, root=tmp_path)


def test_a_file_of_a_self_test_is_told_by_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / ".selftest").mkdir()
    (tmp_path / ".selftest" / "link").symlink_to(tmp_path / "tiny")
    own = ".selftest/.building/host/a-1/first/shard.safetensors"
    assert is_self_tests(own, root=tmp_path)
    for other in (
        "tiny/shards/.building/a-1/shard.safetensors",
        ".selftest/../tiny/shards/.building/a-1/shard.safetensors",
        ".selftest/link/.building/shard.safetensors",
        f"../{tmp_path.name}-2/{own}",
    ):
        assert not is_self_tests(other, root=tmp_path)

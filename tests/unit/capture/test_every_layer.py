"""Rows of every layer are left beside a shard under construction, and nowhere else."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from draftstates.capture.every_layer import keep_rows, read_kept_rows
from draftstates.extract.protocol import SELF_TEST, Destination

STATES = {"r_0": torch.arange(12.0).reshape(3, 4)}


def keep(root: Path, file: str) -> dict:
    """Keep three rows of a request that names this file; return its answer."""
    destination = Destination(
        file=file, first_row=0, rows=3, ids_hash="x", attempt="a", kind=SELF_TEST
    )
    batch = SimpleNamespace(extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[3])
    answer: dict = {}
    keep_rows(batch, [destination], [answer], STATES, read=[0, 1, 2], root=root)
    return answer


def test_rows_are_read_as_they_were_kept(tmp_path: Path) -> None:
    (tmp_path / ".building").mkdir()
    assert keep(tmp_path, ".building/shard") == {}
    found = read_kept_rows(tmp_path / ".building" / "shard", first_row=0)
    assert torch.equal(found["r_0"], STATES["r_0"])


@pytest.mark.parametrize("file", ["../outside", "published/shard", "/tmp/outside", ".building/.."])
def test_rows_are_kept_nowhere_else(tmp_path: Path, file: str) -> None:
    """A request for fewer rows than it has tokens opens no destination, whose name is checked."""
    root = tmp_path / "root"
    (root / "published").mkdir(parents=True)
    (root / ".building").mkdir()
    assert "rows of every layer: UserError" in keep(root, file)["error"]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_rows_are_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / ".building").mkdir()
    other = tmp_path / "other"
    other.write_text("mine")
    name = "shard.rows-0-0.safetensors"
    (tmp_path / ".building" / name).symlink_to(other)
    (tmp_path / ".building" / f".{name}.{os.getpid()}").symlink_to(other)
    assert keep(tmp_path, ".building/shard") == {}
    assert other.read_text() == "mine"
    assert read_kept_rows(tmp_path / ".building" / "shard", first_row=0)

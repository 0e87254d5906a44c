"""Sizes of rows: what people see of the states is what the file holds."""

import math
from pathlib import Path

import pytest
import torch
from captured import LAYERS, capture, tiny_model, verify, write

from draftstates.records import Verified
from draftstates.shards.layout import Shard
from draftstates.verify.sizes import STEPS_PER_DOUBLING, positions, sample_sizes


def test_positions_are_zero_and_the_powers_of_two_below_the_length() -> None:
    assert positions(1) == [0]
    assert positions(2) == [0, 1]
    assert positions(8) == [0, 1, 2, 4]
    assert positions(9) == [0, 1, 2, 4, 8]


def test_a_verified_shard_says_the_sizes_of_its_rows(tmp_path: Path) -> None:
    captured = capture(tiny_model(tmp_path / "model"))
    # a sink at position 0 of one layer, in one component
    for rows in captured.hidden:
        rows[0, 1] = 0.5
        rows[0, 1, 17] = 1000
    for again, (position, count) in zip(captured.again_hidden, captured.recaptures, strict=True):
        again[:] = captured.hidden[position][:count]
    files = write(captured, tmp_path / "shards")
    found = verify(files)
    found.publish(tmp_path / "verified.json")
    assert Verified.read(tmp_path / "verified.json") == found
    rows = sum(len(positions(len(ids))) for ids in captured.tokens)
    assert [layer.layer for layer in found.sizes] == [*(f"r_{k}" for k in LAYERS), "final"]
    assert {layer.rows for layer in found.sizes} == {rows}
    sink = found.sizes[1]
    step = str(round(math.log2(1000) * STEPS_PER_DOUBLING))
    assert sink.norms["0"] == {step: len(captured.tokens)}
    index, count = next(iter(sink.largest.items()))
    assert index == "17" and count >= len(captured.tokens)
    norms = torch.cat(
        [part[positions(len(part)), 0].float().norm(dim=-1) for part in captured.hidden]
    )
    assert found.sizes[0].norm_sum == pytest.approx(norms.sum().item(), rel=1e-3)


def test_the_largest_component_is_that_of_the_absolute_value(tmp_path: Path) -> None:
    captured = capture(tiny_model(tmp_path / "model"))
    captured.hidden[3][2, 0, 5] = -300
    files = write(captured, tmp_path / "shards")
    norms, largest = sample_sizes(Shard(files.shard), 3)
    assert largest[2, 0] == 5 and norms[2, 0] > 300


def test_a_verified_shard_names_the_samples_nearest_to_their_limits(tmp_path: Path) -> None:
    captured = capture(tiny_model(tmp_path / "model"))
    clean = verify(write(captured, tmp_path / "clean"))
    aligned = [each for each in clean.worst if each.check == "alignment"]
    assert len(aligned) == 3
    assert aligned[0].share == clean.figures.alignment_share_of_limit
    assert [each.share for each in aligned] == sorted((e.share for e in aligned), reverse=True)
    moved = next(name for name in captured.names if name != aligned[0].sample_id)
    # the most likely token has a limit near 0
    for pair in captured.top[captured.names.index(moved)][1:]:
        pair[1] -= 0.06
    near = verify(write(captured, tmp_path / "near")).worst[0]
    assert (near.check, near.sample_id) == ("alignment", moved)
    assert clean.figures.alignment_share_of_limit < near.share <= 1

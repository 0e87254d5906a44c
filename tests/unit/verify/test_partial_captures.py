"""Captures without final states, or without layers: what is captured is checked as ever, and
alignment takes the last state from the receipt where the shard has none.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from captured import Captured, Files, capture, tiny_model, verify, write

from draftstates.errors import UserError
from draftstates.shards import layout
from draftstates.verify.parity.check import sample_prompt

NO_FINAL, NO_LAYERS = {"final_state": False}, {"residual_layers": []}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def _refused(files: Files) -> str:
    with pytest.raises(UserError) as error:
        verify(files)
    return str(error.value)


def _found(message: str) -> set[tuple[str, str]]:
    """Return sample and check of each finding."""
    lines = [line.strip().split(": ") for line in message.splitlines() if line.startswith("  ")]
    return {(line[0].removeprefix("sample "), line[1]) for line in lines}


@pytest.mark.parametrize("final_norm", ["post_norm", "pre_norm"])
@pytest.mark.parametrize(
    ("section", "tensor", "layers"),
    [
        (NO_FINAL, "hidden_states", ["r_2", "r_4", "r_5"]),
        (NO_LAYERS, "final_hidden_state", ["final"]),
    ],
)
def test_a_whole_shard_passes_and_holds_nothing_else(
    model: Path,
    tmp_path: Path,
    final_norm: str,
    section: dict[str, Any],
    tensor: str,
    layers: list[str],
) -> None:
    captured = capture(model, final_norm=final_norm, **section)
    files = write(captured, tmp_path)
    verified = verify(files)
    shard = layout.Shard(files.shard)
    assert list(shard.header.states()) == [tensor]
    assert shard.header.size - files.plan.shards[0].bytes < 8192
    assert [size.layer for size in verified.sizes] == layers
    assert 0 < verified.figures.alignment_share_of_limit <= 1
    assert verified.figures.prefix_distance > 0
    hidden, final = shard.states(3)
    assert torch.equal(hidden, captured.hidden[3])
    assert final is None if section == NO_FINAL else torch.equal(final, captured.final[3])
    expected = {"r_2", "r_4", "r_5"} if section == NO_FINAL else {"post_norm", "r_8"}
    assert set(sample_prompt(shard, 3, num_layers=8).states) <= expected


def _swap(captured: Captured, name: str) -> None:
    states = getattr(captured, name)
    states[3][-1], states[4][-1] = states[4][-1].clone(), states[3][-1].clone()


@pytest.mark.parametrize("section", [NO_FINAL, NO_LAYERS])
def test_last_states_of_two_samples_swapped_at_capture_are_caught_by_alignment(
    model: Path, tmp_path: Path, section: dict[str, Any]
) -> None:
    captured = capture(model, **section)
    _swap(captured, "final")
    found = _found(_refused(write(captured, tmp_path)))
    assert {(captured.names[3], "alignment"), (captured.names[4], "alignment")} <= found
    assert {check for _, check in found} <= {"alignment", "prefix"}


@pytest.mark.parametrize(
    "last_state", [None, "", "AAAA", "no base64", "/38" + "/38A" * 42, "A" * 172]
)
def test_a_last_state_that_a_receipt_lacks_or_spoils_is_caught_by_alignment(
    model: Path, tmp_path: Path, last_state: str | None
) -> None:
    captured = capture(model, **NO_FINAL)
    files = write(captured, tmp_path)
    files.change_receipts(lambda said: said["samples"][6].update(last_state=last_state))
    assert _found(_refused(files)) == {(captured.names[6], "alignment")}


def test_a_layer_of_the_next_row_is_caught_by_prefix_without_final_states(
    model: Path, tmp_path: Path
) -> None:
    captured = capture(model, **NO_FINAL)
    position = captured.recaptures[0][0]
    captured.hidden[position][:, 1] = captured.hidden[position][:, 1].roll(1, dims=0)
    assert _found(_refused(write(captured, tmp_path))) == {(captured.names[position], "prefix")}


def test_final_rows_shifted_by_one_are_caught_without_layers(model: Path, tmp_path: Path) -> None:
    captured = capture(model, **NO_LAYERS)
    position = captured.recaptures[0][0]
    captured.final[position] = captured.final[position].roll(1, dims=0)
    found = _found(_refused(write(captured, tmp_path)))
    assert found == {(captured.names[position], check) for check in ("alignment", "prefix")}


@pytest.mark.parametrize("section", [NO_FINAL, NO_LAYERS])
@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_bad_row_is_caught_by_values(
    model: Path, tmp_path: Path, section: dict[str, Any], value: float
) -> None:
    captured = capture(model, **section)
    captured.hidden[4][2] = captured.final[4][2] = value
    assert _found(_refused(write(captured, tmp_path))) == {(captured.names[4], "values")}


def test_a_shard_with_other_tensors_than_the_plan_asks_for_is_refused(
    model: Path, tmp_path: Path
) -> None:
    """Even where its capture key is right."""
    captured = capture(model)
    files = write(captured, tmp_path)
    spec = captured.spec
    object.__setattr__(other := dataclasses.replace(spec, final_state=False), "key", spec.key)
    plan = dataclasses.replace(files.plan, capture=other)
    message = _refused(dataclasses.replace(files, plan=plan))
    assert "header: expected shape of a row {'hidden_states': (3, 64)}, found" in message

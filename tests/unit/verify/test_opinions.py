"""A second reading that differs is refused by its layer; nothing is compared with itself."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from synthetic import capture_spec

from draftstates.errors import UserError
from draftstates.model.folder import ModelFolder
from draftstates.shards import layout
from draftstates.verify import opinions

SPEC = capture_spec(
    layers=(0, 2), num_layers=4, hidden_size=8, final_norm="post_norm", stored_dtype="float32"
)
LLAMA = {"model_type": "llama"}


def _answer(opinions: dict[str, float] | None, no_capture: str = "") -> Any:
    return SimpleNamespace(opinions=opinions, no_capture=no_capture)


def test_equal_readings_pass_and_are_told() -> None:
    answers = [_answer({"r_4": 1e-9, "r_2": 0.0}), _answer({"r_4": 0.0, "r_2": 2e-9})]
    assert opinions.check(answers, spec=SPEC, text=LLAMA) == {
        "norm_distance": 1e-9,
        "own_capture_distance": 2e-9,
        "own_capture_missing": "",
    }


def test_without_a_capture_of_its_own_the_reason_is_told() -> None:
    found = opinions.check([_answer({"r_4": 0.0}, "it has none")], spec=SPEC, text=LLAMA)
    assert found["own_capture_distance"] is None
    assert found["own_capture_missing"] == "it has none"


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ({"r_4": 0.5, "r_2": 0.0}, "r_4: the model's own norm of it differs by 0.5"),
        ({"r_4": float("nan"), "r_2": 0.0}, "r_4: the model's own norm"),
        ({"r_2": 0.0}, "r_4: the model's own norm"),
        ({"r_4": 0.0, "r_2": 0.5}, "r_2 as captured differs by 0.5"),
        ({"r_4": 0.0, "r_2": float("nan")}, "r_2 as captured differs by nan"),
        (None, "plug-in is of another version"),
    ],
)
def test_another_state_is_refused_by_its_layer(found: dict | None, named: str) -> None:
    with pytest.raises(UserError, match=named):
        opinions.check([_answer({"r_4": 0.0, "r_2": 0.0}), _answer(found)], spec=SPEC, text=LLAMA)


def test_where_sglangs_own_capture_is_known_to_be_another_state_the_taps_stand() -> None:
    answers = [_answer({"r_4": 0.0, "r_2": 0.9})]
    found = opinions.check(answers, spec=SPEC, text={"model_type": "gemma3_text"})
    assert found["own_capture_distance"] is None
    assert "another state" in found["own_capture_missing"]
    with pytest.raises(UserError, match="r_4"):
        opinions.check([_answer({"r_4": 0.9})], spec=SPEC, text={"model_type": "gemma3_text"})


def test_prompts_that_differ_the_second_time_are_refused() -> None:
    opinions.check_repeat(1e-3, spec=SPEC)
    for distance in (0.2, float("nan")):
        with pytest.raises(UserError, match="captured twice, differ by"):
            opinions.check_repeat(distance, spec=SPEC)


@pytest.mark.parametrize(("stored", "refused"), [(1.0, False), (2.0, True)])
def test_r_0_is_held_against_the_embedding_on_the_disk(
    tmp_path: Path, stored: float, refused: bool
) -> None:
    table, ids = torch.randn(20, 8), np.arange(5, dtype=np.int32)
    save_file({"model.embed_tokens.weight": table}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "gemma2", "hidden_size": 8}')
    layout.create(
        tmp_path / "shard.safetensors",
        spec=SPEC,
        shard_id="s",
        sample_ids=["a"],
        lengths=[5],
        input_ids=ids,
        loss_mask=np.ones(5),
    )
    begin, width = layout.read_header(tmp_path / "shard.safetensors").states()["hidden_states"]
    rows = torch.randn(5, 2, 8)
    rows[:, 0] = table[:5] * 8**0.5 * stored
    data = bytearray((tmp_path / "shard.safetensors").read_bytes())
    data[begin : begin + 5 * width] = rows.numpy().tobytes()
    (tmp_path / "shard.safetensors").write_bytes(data)
    tokens = SimpleNamespace(input_ids=ids)
    shard, model = layout.Shard(tmp_path / "shard.safetensors"), ModelFolder(tmp_path)
    if refused:
        with pytest.raises(UserError, match="r_0 differs by .* from the embedding on the disk"):
            opinions.check_embeddings(shard, tokens, spec=SPEC, model=model)
        return
    found = opinions.check_embeddings(shard, tokens, spec=SPEC, model=model)
    assert found["embedding_distance"] < 1e-6

"""Promise 5: rows of the checkpoint pass and are recorded; rows of another model are refused.

A server's rows are those of transformers' ordinary forward pass here.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import parity_models
import pytest
import torch

from draftstates.errors import UserError
from draftstates.extract.protocol import kept_positions
from draftstates.model.digest import capture_spec
from draftstates.model.folder import ModelFolder
from draftstates.model.lengths import prompt_length
from draftstates.records import Parity
from draftstates.report.parity import parity_page
from draftstates.shards.selftest_rows import Prompt, SelftestRows
from draftstates.spec import CaptureSpec
from draftstates.verify.parity.check import Asked, ParityFailed, check_parity, limit_of

ASKED = Asked(tokens=4352, layers=None, code="0")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model with a sliding window of 16 tokens in most layers."""
    return parity_models.make("gemma3_text", tmp_path_factory.mktemp("gemma"))


def spec_of(folder: Path, **changes: str) -> CaptureSpec:
    section = {"residual_layers": [1], "final_norm": "post_norm", "stored_dtype": "float32"}
    return capture_spec(
        ModelFolder(folder),
        name=None,
        capture={**section, "compute_dtype": "float32", **changes},
    )


def rows_of(folder: Path, spec: CaptureSpec, *, tokens: int, **computed: Any) -> SelftestRows:
    """Return the rows that a right server keeps; `computed`: see `ordinary_states`."""
    input_ids = parity_models.ids(tokens)
    positions = torch.tensor(kept_positions(tokens))
    states = parity_models.ordinary_states(folder, input_ids, **computed)
    prompt = Prompt(
        input_ids=input_ids.int(),
        positions=positions,
        states={name: rows[positions] for name, rows in states.items()},
    )
    return SelftestRows(id="rows", capture_key=spec.key, prompts=(prompt,))


def check(folder: Path, rows: SelftestRows, spec: CaptureSpec, **asked: object) -> Parity:
    wanted = Asked(**{**vars(ASKED), **asked})
    return check_parity(rows, spec=spec, model=ModelFolder(folder), asked=wanted)


def test_right_rows_pass_and_the_result_says_how_far_they_reach(gemma: Path) -> None:
    spec = spec_of(gemma)
    found = check(gemma, rows_of(gemma, spec, tokens=80), spec)
    assert found.result == "all 4 layers"
    assert [layer.layer for layer in found.layers] == [*(f"r_{k}" for k in range(5)), "post_norm"]
    assert max(layer.median for layer in found.layers) < 1e-5
    assert min(min(layer.neighbours.values()) for layer in found.layers) > 0.05
    assert (found.covered, found.beyond) == ({"sliding_window": 16}, {})
    assert found.reference.endswith("in float32, 80 tokens")
    assert "Parity with the checkpoint: all 4 layers" in parity_page(found)
    assert parity_page(found).count("<tr>") == 7


def test_the_result_says_which_positions_were_compared(gemma: Path) -> None:
    spec = spec_of(gemma)
    found = check(gemma, rows_of(gemma, spec, tokens=200), spec)
    assert found.reference.endswith("200 tokens at positions 0 to 63 and 136 to 199")


def test_the_final_state_is_what_the_head_reads(gemma: Path, tmp_path: Path) -> None:
    """MiniCPM scales it behind the final norm."""
    folder = copy_with(gemma, tmp_path / "scaled", dim_model_base=16)
    spec = spec_of(folder)
    rows = rows_of(folder, spec, tokens=20)
    with pytest.raises(ParityFailed, match="post_norm: the median row differs by 3"):
        check(folder, rows, spec)
    rows.prompts[0].states["post_norm"] *= 16 / 64
    assert check(folder, rows, spec).result == "all 4 layers"


def test_a_prompt_that_is_too_short_for_a_window_names_it(gemma: Path) -> None:
    spec = spec_of(gemma)
    found = check(gemma, rows_of(gemma, spec, tokens=20), spec)
    assert (found.covered, found.beyond) == ({}, {"sliding_window": 16})
    assert "does not reach sliding_window 16" in parity_page(found)


def copy_with(folder: Path, to: Path, **values: object) -> Path:
    """Copy a checkpoint with other values in its config.json."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **values}))
    return to


@pytest.mark.parametrize(
    ("values", "first"),
    [
        # Only rows beyond the window differ, and they lie in the last part of a prompt.
        ({"sliding_window": 100}, "r_1"),
        ({"rms_norm_eps": 0.5}, "r_1"),
        ({"query_pre_attn_scalar": 64}, "r_1"),
    ],
)
def test_a_server_that_computes_another_model_is_refused_by_layer(
    gemma: Path, tmp_path: Path, values: dict, first: str
) -> None:
    """Weights are the same, and one number of the configuration is another."""
    spec = spec_of(gemma)
    rows = rows_of(copy_with(gemma, tmp_path / "other", **values), spec, tokens=80)
    with pytest.raises(ParityFailed) as caught:
        check(gemma, rows, spec)
    assert f"the server does not compute {gemma}: {first}: " in str(caught.value)
    assert "neighbouring layers: r_0 " in str(caught.value)
    assert "Nothing is published" in str(caught.value)


def test_a_window_is_missed_by_a_prompt_that_does_not_reach_it(gemma: Path, tmp_path: Path) -> None:
    """The control: it is the long prompt that sees the wrong window."""
    spec = spec_of(gemma)
    other = copy_with(gemma, tmp_path / "other", sliding_window=100)
    found = check(gemma, rows_of(other, spec, tokens=16), spec)
    assert found.beyond == {"sliding_window": 16}


def test_a_fault_of_the_last_rows_alone_is_seen(gemma: Path) -> None:
    """The median over all rows would hide it."""
    spec = spec_of(gemma)
    rows = rows_of(gemma, spec, tokens=200)
    states = rows.prompts[0].states
    assert len(states["r_2"]) == 128
    states["r_2"][70:] *= 1.5
    with pytest.raises(ParityFailed, match=r"r_2: the median row differs by 0.5"):
        check(gemma, rows, spec)


def test_a_few_wrong_rows_are_seen_where_no_router_moves_rows(gemma: Path) -> None:
    """They are too few for the median, and for the share that may be nearer to a neighbour."""
    spec = spec_of(gemma)
    rows = rows_of(gemma, spec, tokens=64)
    states = rows.prompts[0].states["r_2"]
    states[10:13] += torch.randn(3, states.shape[1]) * states[10:13].std()
    with pytest.raises(ParityFailed, match=r"r_2: one of 64 rows differs by .*, expected at most"):
        check(gemma, rows, spec)


def test_a_router_may_let_a_row_jump(tmp_path: Path) -> None:
    folder = parity_models.make("qwen3_moe", tmp_path)
    spec = spec_of(folder)
    rows = rows_of(folder, spec, tokens=64)
    rows.prompts[0].states["r_2"][10] *= 1.1
    found = check(folder, rows, spec)
    assert found.layers[2].worst > 0.05 and found.layers[2].worst_limit is None
    unreached = check(folder, rows_of(folder, spec, tokens=2), spec)
    assert unreached.unreached
    assert f"were not compared: r_1 {unreached.unreached['r_1']}" in parity_page(unreached)


def with_rotary_values_of_64_positions(model: torch.nn.Module) -> None:
    rotary = model.model.rotary_emb
    right = rotary.forward
    rotary.forward = lambda x, position_ids: right(x, position_ids.clamp(max=63))


def test_a_fault_of_later_positions_is_seen_by_the_usual_prompt(tmp_path: Path) -> None:
    folder = parity_models.make("qwen3", tmp_path)
    spec, change = spec_of(folder), with_rotary_values_of_64_positions
    usual = prompt_length(ModelFolder(folder).text, most=ASKED.tokens)
    with pytest.raises(ParityFailed, match="r_1: the median row differs"):
        check(folder, rows_of(folder, spec, tokens=usual, change=change), spec)
    short = check(folder, rows_of(folder, spec, tokens=64, change=change), spec)
    assert short.result == "all 4 layers"


def test_one_wrong_layer_is_named_and_the_others_counted(gemma: Path) -> None:
    spec = spec_of(gemma)
    rows = rows_of(gemma, spec, tokens=20)
    states = rows.prompts[0].states
    states["r_1"], states["r_2"] = states["r_2"], states["r_1"]
    with pytest.raises(ParityFailed, match="r_1: the median row .*; 1 more layers differ"):
        check(gemma, rows, spec)


def test_where_only_the_first_layers_are_asked_for_the_result_says_so(gemma: Path) -> None:
    spec = spec_of(gemma)
    found = check(gemma, rows_of(gemma, spec, tokens=20), spec, layers=2)
    assert found.result == "first 2 layers (checks.parity_layers)"
    assert [layer.layer for layer in found.layers] == ["r_0", "r_1", "r_2"]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method awq"),
        ({"model_type": "of_nobody"}, "transformers cannot read the configuration"),
    ],
)
def test_without_a_reference_the_result_is_none_and_says_why(
    gemma: Path, tmp_path: Path, values: dict, reason: str
) -> None:
    spec = spec_of(gemma)
    rows = rows_of(gemma, spec, tokens=20)
    found = check(copy_with(gemma, tmp_path / "other", **values), rows, spec)
    assert found.result.startswith("none (") and reason in found.result
    assert found.compared == 0
    found.require("auto")
    with pytest.raises(UserError, match="checks.parity: required, but parity is none"):
        found.require("required")


def test_rows_of_another_capture_are_refused(gemma: Path) -> None:
    rows = rows_of(gemma, spec_of(gemma), tokens=20)
    with pytest.raises(UserError, match="expected self-test rows of capture"):
        check(gemma, rows, spec_of(gemma, stored_dtype="bfloat16"))


def test_a_result_is_read_back_as_it_was_written(gemma: Path, tmp_path: Path) -> None:
    spec = spec_of(gemma)
    found = check(gemma, rows_of(gemma, spec, tokens=20), spec)
    found.publish(tmp_path / "parity.json")
    assert Parity.read(tmp_path / "parity.json") == found


@pytest.mark.parametrize(
    ("arguments", "computed"),
    [
        (("--quantization=fp8",), 0.1),
        (("--quantization", "w8a8_int8"), 0.1),
        (("--quant", "fp8"), 0.1),
        (("--torchao-config", "int8wo"), 0.1),
        (("--kv-cache-dtype", "fp8_e4m3"), 0.1),
        (("--kv_cache_dtype=fp8_e5m2",), 0.1),
        (("--kv-cache-dtype", "auto"), 1e-4),
        (("--attention-backend", "triton"), 1e-4),
    ],
)
def test_a_server_that_rounds_to_8_bits_has_a_limit_of_its_own(
    gemma: Path, arguments: tuple[str, ...], computed: float
) -> None:
    plain = spec_of(gemma)
    for changes, limit in (({"engine_args": arguments}, computed), ({"quantization": "fp8"}, 0.1)):
        assert limit_of(dataclasses.replace(plain, **changes), text={}).computed == limit


@pytest.mark.parametrize(
    "arguments",
    [
        ("--quantization", "mxfp4"),
        ("--quantization", "modelopt_fp4"),
        ("--quantization", "awq"),
        ("--torchao-config", "int4wo-128"),
        ("--kv-cache-dtype", "fp4_e2m1"),
    ],
)
def test_a_server_that_rounds_to_fewer_bits_is_not_judged(
    gemma: Path, arguments: tuple[str, ...]
) -> None:
    spec = dataclasses.replace(spec_of(gemma), engine_args=arguments)
    found = check(gemma, rows_of(gemma, spec, tokens=20), spec)
    expected = f"none (no limit tells the roundings of {' '.join(arguments)} from a fault)"
    assert (found.result, found.compared) == (expected, 0)


@pytest.mark.parametrize(
    ("lost", "result"),
    [
        ("r_2", "first 1 layers (the server did not capture r_2)"),
        ("r_0", "none (the server did not capture r_0)"),
        ("r_4", "first 3 layers (the server did not capture r_4)"),
        ("post_norm", "first 4 layers (the server did not capture post_norm)"),
    ],
)
def test_a_state_that_was_not_captured_is_named(gemma: Path, lost: str, result: str) -> None:
    spec = spec_of(gemma)
    rows = rows_of(gemma, spec, tokens=20)
    del rows.prompts[0].states[lost]
    found = check(gemma, rows, spec)
    assert found.result == result
    with pytest.raises(UserError, match="checks.parity: required, but parity is"):
        found.require("required")

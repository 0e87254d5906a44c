"""An export that the capture does not allow is refused when there is a plan, and not after the
capture.
"""

import json
from pathlib import Path

import pytest
from synthetic import capture_spec, norm_model

from draftstates import config, workflow
from draftstates.errors import UserError
from draftstates.exports.configured import check_exports

RAW = {
    "data": {"sources": [{"name": "a", "files": ["a.jsonl"]}], "max_tokens": 8},
    "model": {"path": "models/m"},
    "capture": {},
}


def configured(
    model: Path | str = "models/m", *, draft_vocab_size: str = "100", **exports: dict
) -> config.Configuration:
    raw = {
        **RAW,
        "model": {"path": str(model)},
        "exports": exports,
        "draft_vocab_size": draft_vocab_size,
    }
    return config.resolve(raw, origin="my.yaml")


def test_what_can_be_exported_passes(tmp_path: Path) -> None:
    model = norm_model(tmp_path / "model")
    every = configured(model, specforge={}, model_optimizer={}, deepspec={})
    check_exports(every, spec=capture_spec(final_norm="post_norm"))
    check_exports(every, spec=capture_spec(final_norm="pre_norm"))
    check_exports(configured(model, speculators={}), spec=capture_spec(final_norm="pre_norm"))
    check_exports(
        configured(model, speculators={}),
        spec=capture_spec(layers=(2, 5, 8), final_norm="post_norm"),
    )


@pytest.mark.parametrize(
    ("name", "chosen", "layers", "expected"),
    [
        (
            "speculators",
            {},
            (2, 5),
            "exports.speculators: pre_norm is asked for and the capture holds post_norm",
        ),
        ("specforge", {}, (0, 5), "exports.specforge: specforge cannot name r_0"),
        (
            "nemo_automodel",
            {},
            (2, 5),
            "exports.nemo_automodel: nemo_automodel reads the states of exactly 3 of the layers"
            " before r_N, found [2, 5]",
        ),
        (
            "specforge",
            {"target_probs_topk": 4},
            (2, 5),
            "exports.specforge: target_probs_topk: for nemo_automodel alone",
        ),
        (
            "specforge",
            {"residual_layers": [2, 4]},
            (2, 5),
            "exports.specforge: residual_layers: expected ascending k out of",
        ),
        (
            "deepspec",
            {"residual_layers": [5, 2]},
            (2, 5),
            "exports.deepspec: residual_layers: expected ascending k out of",
        ),
    ],
)
def test_what_the_capture_does_not_allow_is_named(
    tmp_path: Path, name: str, chosen: dict, layers: tuple[int, ...], expected: str
) -> None:
    spec = capture_spec(layers=layers, final_norm="post_norm")
    with pytest.raises(UserError) as caught:
        check_exports(configured(norm_model(tmp_path / "model"), **{name: chosen}), spec=spec)
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize("name", ["speculators", "specforge", "model_optimizer", "deepspec"])
def test_final_states_that_are_not_captured_are_named(tmp_path: Path, name: str) -> None:
    """r_N stands in for them: it is pre-norm, and the model's norm makes post-norm of it."""
    model = norm_model(tmp_path / "model")
    config = configured(model, **{name: {}})
    without = {"final_norm": "post_norm", "final_state": False}
    with pytest.raises(UserError, match=f"^exports.{name}: .*holds no final states: .* add r_8 to"):
        check_exports(config, spec=capture_spec(layers=(2, 5), **without))
    check_exports(config, spec=capture_spec(layers=(2, 5, 8), **without))


def test_layers_that_are_not_captured_are_named(tmp_path: Path) -> None:
    model = norm_model(tmp_path / "model")
    for layers in ((), (8,)):
        spec = capture_spec(layers=layers, final_norm="post_norm")
        for name in ("specforge", "deepspec"):
            with pytest.raises(UserError, match=f"^exports.{name}: {name} reads the states of at"):
                check_exports(configured(model, **{name: {}}), spec=spec)
        check_exports(configured(model, model_optimizer={}), spec=spec)
    check_exports(configured(model, speculators={}), spec=capture_spec(layers=()))


def test_a_number_format_that_the_trainer_does_not_read_is_named(tmp_path: Path) -> None:
    model, spec = (
        norm_model(tmp_path / "model"),
        capture_spec(final_norm="post_norm", stored_dtype="float32"),
    )
    with pytest.raises(
        UserError, match="exports.deepspec: deepspec reads bfloat16 only, the states are float32"
    ):
        check_exports(configured(model, deepspec={}), spec=spec)
    check_exports(configured(model, deepspec={"dtype": "bfloat16"}, specforge={}), spec=spec)


def test_a_vocabulary_larger_than_the_models_is_named(tmp_path: Path) -> None:
    raw = configured(norm_model(tmp_path / "model"), draft_vocab_size="101")
    with pytest.raises(
        UserError, match="draft_vocab_size: expected at most the model's 100, found 101"
    ):
        check_exports(raw, spec=capture_spec())


def test_a_norm_that_is_not_known_is_named(tmp_path: Path) -> None:
    model = norm_model(tmp_path / "model", model_type="of-others")
    with pytest.raises(UserError, match="exports.specforge: .*model_type 'of-others' is not known"):
        check_exports(configured(model, specforge={}), spec=capture_spec(final_norm="pre_norm"))


def test_the_configuration_becomes_the_commands_arguments() -> None:
    chosen = {
        "residual_layers": ["2", "5"],
        "dtype": "float32",
        "target_model": "my model",
        "split": "train",
        "validation_fraction": 0.1,
    }
    found = configured(draft_vocab_size="32000", specforge=chosen, deepspec={})
    assert (
        workflow.export_options(found, "specforge")
        == "--draft-vocab-size 32000 --dtype float32 --layers 2,5 --split train --target-model 'my"
        " model' --validation-fraction 0.1"
    )
    assert workflow.export_options(found, "deepspec") == "--validation-fraction 0.05"
    assert workflow.export_options(found, "speculators") == "--draft-vocab-size 32000"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (
            {"exports": {"speculator": {}}},
            "exports.speculator: unknown key (did you mean speculators?)",
        ),
        ({"exports": {"specforge": {"norm": "x"}}}, "exports.specforge.norm: unknown key"),
        (
            {"exports": {"specforge": {"validation_fraction": 1}}},
            "exports.specforge.validation_fraction: expected less than 1",
        ),
        (
            {"exports": {"specforge": {"dtype": "int8"}}},
            "exports.specforge.dtype: expected one of bfloat16, float16, float32, null",
        ),
        ({"draft_vocab_size": 0}, "draft_vocab_size: expected at least 1"),
        ({"extract": {"tokens_per_second": 0}}, "extract.tokens_per_second: expected more than 0"),
    ],
)
def test_a_wrong_key_is_named(raw: dict, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        config.resolve({**RAW, **raw}, origin="my.yaml")
    assert f"my.yaml: {expected}" in str(caught.value)


def test_an_export_that_the_capture_does_not_allow_is_refused_before_anything_runs(
    tmp_path: Path,
) -> None:
    model = norm_model(tmp_path / "model")
    described = json.loads((model / "config.json").read_text())
    shape = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8, "hidden_size": 16}
    (model / "config.json").write_text(json.dumps({**described, **shape}))
    with pytest.raises(UserError, match="^exports.speculators: pre_norm is asked for"):
        workflow.check_exports_early(configured(model, speculators={}))
    workflow.check_exports_early(configured(model, specforge={}))
    workflow.check_exports_early(configured(tmp_path / "not-made-yet", speculators={}))

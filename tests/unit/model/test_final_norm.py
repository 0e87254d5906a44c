"""The final norm is the model's, and the wanted final state is stored, found, normed or refused."""

import dataclasses
from pathlib import Path

import pytest
import torch
from model_folders import HIDDEN, make, make_wrapped, tensors
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

from draftstates.errors import UserError
from draftstates.model.final_norm import FinalNorm, find_final

NORM = FinalNorm(weight=torch.rand(HIDDEN), eps=1e-5)
CAPTURE = {"final_norm": "pre_norm", "residual_layers": [2, 5], "num_layers": 8}


def test_the_norm_is_the_one_that_the_model_applies(tmp_path: Path) -> None:
    norm = FinalNorm.from_model(make(tmp_path / "a"))
    model = LlamaRMSNorm(HIDDEN, eps=1e-5)
    model.weight.data = tensors()["model.norm.weight"]
    rows = torch.randn(5, HIDDEN)
    torch.testing.assert_close(norm(rows), model(rows))
    assert norm(rows.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("model_type", "extra", "bias"),
    [
        ("gemma2", {}, False),
        ("cohere", {"layer_norm_eps": 1e-3, "rms_norm_eps": None}, False),
        ("stablelm", {"layer_norm_eps": 1e-3, "rms_norm_eps": None}, True),
        ("nemotron", {"norm_eps": 1e-3, "rms_norm_eps": None}, True),
        ("minicpm", {"dim_model_base": 4}, False),
    ],
)
def test_other_norms_are_those_of_hugging_face(
    tmp_path: Path, model_type: str, extra: dict, bias: bool
) -> None:
    weights = tensors()
    if bias:
        weights["model.norm.bias"] = torch.randn(HIDDEN)
    model = make(tmp_path / "a", config={"model_type": model_type, **extra}, weights=weights)
    norm = FinalNorm.from_model(model)
    theirs = {
        "gemma2": lambda: Gemma2RMSNorm(HIDDEN, eps=norm.eps),
        "cohere": lambda: CohereLayerNorm(HIDDEN, eps=1e-3),
        "stablelm": lambda: torch.nn.LayerNorm(HIDDEN, eps=1e-3),
        "nemotron": lambda: NemotronLayerNorm1P(HIDDEN, eps=1e-3),
        "minicpm": lambda: LlamaRMSNorm(HIDDEN, eps=norm.eps),
    }[model_type]()
    theirs.weight.data = weights["model.norm.weight"]
    if bias:
        theirs.bias.data = weights["model.norm.bias"]
    rows = torch.randn(5, HIDDEN)
    scale = 4 / HIDDEN if model_type == "minicpm" else 1.0
    torch.testing.assert_close(norm(rows), theirs(rows) * scale)


def test_norms_of_other_formulas_have_another_content() -> None:
    norms = [
        NORM,
        dataclasses.replace(NORM, kind="rms_plus_one"),
        dataclasses.replace(NORM, scale=0.5),
        dataclasses.replace(NORM, bias=torch.zeros(HIDDEN)),
        dataclasses.replace(NORM, eps=1e-6),
        dataclasses.replace(NORM, weight=NORM.weight + 1),
    ]
    assert len({norm.content() for norm in norms}) == len(norms)


def test_a_wrapped_models_norm_is_found(tmp_path: Path) -> None:
    norm = FinalNorm.from_model(make_wrapped(tmp_path / "a"))
    assert torch.equal(norm.weight, tensors()["model.norm.weight"])


def test_a_folder_without_the_norms_weight_is_refused(tmp_path: Path) -> None:
    model = make(tmp_path / "a", weights={"model.layers.0.norm.weight": torch.ones(HIDDEN)})
    with pytest.raises(UserError, match="a: expected the final norm's weight"):
        FinalNorm.from_model(model)


def test_states_of_another_width_are_refused() -> None:
    with pytest.raises(UserError, match="expected states of 16 values, .* found 8"):
        NORM(torch.zeros(1, 8))


def test_the_stored_state_is_taken_as_it_is() -> None:
    hidden, final = torch.randn(3, 2, HIDDEN), torch.randn(3, HIDDEN)
    assert find_final(capture=CAPTURE, wanted="pre_norm", norm=None)(hidden, final) is final


def test_post_norm_is_made_by_the_norm_and_refused_without_it() -> None:
    hidden, final = torch.randn(3, 2, HIDDEN), torch.randn(3, HIDDEN)
    found = find_final(capture=CAPTURE, wanted="post_norm", norm=NORM)
    assert torch.equal(found(hidden, final), NORM(final))
    with pytest.raises(UserError, match="the capture holds pre_norm: give the model's folder"):
        find_final(capture=CAPTURE, wanted="post_norm", norm=None)


def test_pre_norm_is_r_n_where_it_was_captured_and_refused_elsewhere() -> None:
    hidden, final = torch.randn(3, 2, HIDDEN), torch.randn(3, HIDDEN)
    capture = {**CAPTURE, "final_norm": "post_norm", "residual_layers": [2, 8]}
    found = find_final(capture=capture, wanted="pre_norm", norm=None)
    assert torch.equal(found(hidden, final), hidden[:, 1])
    with pytest.raises(UserError, match="cannot be undone: .* add r_8"):
        find_final(capture={**capture, "residual_layers": [2, 5]}, wanted="pre_norm", norm=None)

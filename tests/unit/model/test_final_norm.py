"""The final norm is the model's, and the wanted final state is stored, found, normed or refused."""

from pathlib import Path

import pytest
import torch
from model_folders import HIDDEN, make, make_wrapped, tensors
from transformers.models.llama.modeling_llama import LlamaRMSNorm

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

"""The head is found, tied, cut to the vocabulary, or refused; logits are those of one product."""

from pathlib import Path

import pytest
import torch
from model_folders import HIDDEN, VOCAB, make, make_wrapped, tensors

from draftstates.errors import UserError
from draftstates.model import head as module
from draftstates.model.final_norm import FinalNorm
from draftstates.model.head import Head, read_head


def test_a_wrapped_models_head_and_norm_are_found(tmp_path: Path) -> None:
    head = read_head(make_wrapped(tmp_path / "wrapped"), final_norm="pre_norm")
    assert torch.equal(head.weight, tensors()["lm_head.weight"])
    assert head.norm is not None
    assert torch.equal(head.norm.weight, tensors()["model.norm.weight"])


def test_a_tied_head_is_the_embeddings_and_an_untied_one_without_weight_is_refused(
    tmp_path: Path,
) -> None:
    weights = tensors()
    del weights["lm_head.weight"]
    tied = make(tmp_path / "tied", config={"tie_word_embeddings": True}, weights=weights)
    assert torch.equal(
        read_head(tied, final_norm="post_norm").weight, weights["model.embed_tokens.weight"]
    )
    untied = make(tmp_path / "untied", weights=weights)
    with pytest.raises(UserError, match=r"untied: expected lm_head.weight, found no safetensors"):
        read_head(untied, final_norm="post_norm")


def test_a_padded_head_is_cut_to_the_vocabulary(tmp_path: Path) -> None:
    head = read_head(make(tmp_path / "a", config={"vocab_size": 40}), final_norm="post_norm")
    assert tuple(head.weight.shape) == (40, HIDDEN)
    assert head.norm is None


def test_a_quantised_head_is_refused(tmp_path: Path) -> None:
    quantised = make(
        tmp_path / "q",
        weights={**tensors(), "lm_head.weight": torch.zeros(VOCAB, HIDDEN, dtype=torch.int8)},
    )
    with pytest.raises(UserError, match="found torch.int8, shape"):
        read_head(quantised, final_norm="post_norm")


def test_a_family_whose_norm_is_not_known_is_refused_before_any_weight_is_read(
    tmp_path: Path,
) -> None:
    other = make(tmp_path / "g", config={"model_type": "of-others"})
    with pytest.raises(UserError, match="final norm of model_type 'of-others' is not known"):
        read_head(other, final_norm="pre_norm")


def test_logits_are_scaled_and_capped_as_the_model_does(tmp_path: Path) -> None:
    plain = read_head(make(tmp_path / "a"), final_norm="post_norm")
    scales = {"final_logit_softcapping": 3.0, "logits_scaling": 4.0}
    head = read_head(make(tmp_path / "b", config=scales), final_norm="post_norm")
    inputs = torch.randn(3, HIDDEN)
    product = plain.logits(inputs, dtype=torch.float32)
    torch.testing.assert_close(
        head.logits(inputs, dtype=torch.float32), 3 * torch.tanh(product / 4 / 3)
    )


def test_logits_are_those_of_the_whole_weight_in_the_servers_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_BLOCK", 7)
    weight, states = torch.randn(VOCAB, HIDDEN), torch.randn(3, HIDDEN).bfloat16()
    norm = FinalNorm(weight=torch.rand(HIDDEN), eps=1e-5)
    for head in (Head(weight=weight, norm=None), Head(weight=weight, norm=norm)):
        inputs = states.float() if head.norm is None else norm(states.float())
        assert torch.equal(head.inputs(states), inputs)
        torch.testing.assert_close(
            head.logits(inputs, dtype=torch.bfloat16), inputs @ weight.bfloat16().float().T
        )

"""Promise 4, the top five: what rounding may do passes, and another sample's state does not, though
both chats end alike.
"""

import dataclasses
import functools

import pytest
import torch
from synthetic import capture_spec

from draftstates.model.family import LogitForm
from draftstates.model.final_norm import FinalNorm
from draftstates.model.head import Head
from draftstates.shards.distance import distance
from draftstates.verify.alignment import (
    Rounding,
    check_alignment,
    half_step,
    logprobs,
    unit_roundoff,
)
from draftstates.verify.prefixes import Limits

SAMPLES, HIDDEN, VOCABULARY = 100, 256, 2000
Top = list[list[tuple[int, float]]]
WAYS = [
    (torch.bfloat16, torch.bfloat16, "post_norm"),
    (torch.bfloat16, torch.bfloat16, "pre_norm"),
    (torch.float16, torch.float16, "post_norm"),
    (torch.float32, torch.bfloat16, "post_norm"),
    (torch.float32, torch.bfloat16, "pre_norm"),
    (torch.float32, torch.float32, "post_norm"),
    (torch.float32, torch.float32, "pre_norm"),
]


def _norm() -> FinalNorm:
    return FinalNorm(
        weight=torch.rand(HIDDEN, generator=torch.Generator().manual_seed(5)) + 0.5, eps=1e-5
    )


@functools.cache
def _serve(
    compute: torch.dtype, stored: torch.dtype, final_norm: str
) -> tuple[torch.Tensor, Top, Head, Rounding]:
    """Return final states of whole chats as a server stores them, and the top five it returns.

    The end token is the likeliest after all of them.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator) * 0.35
    norm = _norm()
    residual = (torch.randn(SAMPLES, HIDDEN, generator=generator) * 2 + 7 * weight[11]).to(compute)
    wide = residual.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)).to(
        compute
    ) * norm.weight.to(compute)
    # The server sums the products in another order.
    order = torch.randperm(HIDDEN, generator=generator)
    best = (normed[:, order] @ weight.to(compute)[:, order].T).float().log_softmax(-1).topk(5)
    top = [
        list(zip(t, v, strict=True))
        for t, v in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    states = (normed if final_norm == "post_norm" else residual).to(stored)
    head = Head(weight=weight, norm=None if final_norm == "post_norm" else norm)
    return (
        states,
        top,
        head,
        Rounding(compute=compute, stored=stored, normed=final_norm == "post_norm"),
    )


def _bad(states: torch.Tensor, top: Top, head: Head, rounding: Rounding) -> int:
    findings, _ = check_alignment(
        [str(index) for index in range(len(states))], states, top, head=head, rounding=rounding
    )
    return len(findings)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_sample_of_an_honest_server_passes_with_room(
    way: tuple[torch.dtype, torch.dtype, str],
) -> None:
    states, top, head, rounding = _serve(*way)
    findings, shares = check_alignment(
        [str(index) for index in range(SAMPLES)], states, top, head=head, rounding=rounding
    )
    assert findings == []
    assert len(shares) == SAMPLES
    assert 0 < max(shares.values()) < 0.95


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "form",
    [
        LogitForm(scale=1 / 8),
        LogitForm(scale=0.3),
        LogitForm(cap=30.0),
        LogitForm(scale=0.5, cap=10.0),
    ],
    ids=str,
)
def test_scaled_and_capped_logits_pass_and_those_of_another_scale_do_not(
    form: LogitForm, compute: torch.dtype
) -> None:
    states, _, plain, rounding = _serve(compute, compute, "post_norm")
    logits = (states.float() @ plain.weight.to(compute).float().T).to(compute)
    if form.scale != 1:
        logits = logits * form.scale
    # As SGLang does, the cap is computed in float32.
    capped = LogitForm(cap=form.cap)(logits.float())
    best = capped.log_softmax(-1).topk(5)
    top = [
        list(zip(t, v, strict=True))
        for t, v in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    head = dataclasses.replace(plain, form=form)
    assert _bad(states, top, head, rounding) == 0
    assert _bad(states.roll(1, 0), top, head, rounding) > 0.9 * SAMPLES
    other = dataclasses.replace(form, scale=1.5 * form.scale)
    assert _bad(states, top, dataclasses.replace(plain, form=other), rounding) > 0.9 * SAMPLES


def test_logarithms_that_round_coarser_than_small_logits_pass() -> None:
    """An untrained model in float32: logits near 0, so that each log probability is near -log(V)
    and rounded there.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(49152, 32, generator=generator) * 0.02
    states = torch.randn(200, 32, generator=generator)
    order = torch.randperm(32, generator=generator)
    best = (states[:, order] @ weight[:, order].T).log_softmax(-1).topk(5)
    top = [
        list(zip(t, v, strict=True))
        for t, v in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    head, rounding = (
        Head(weight=weight, norm=None),
        Rounding(compute=torch.float32, stored=torch.float32, normed=True),
    )
    assert _bad(states, top, head, rounding) == 0
    assert _bad(states.roll(1, 0), top, head, rounding) == len(states)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_state_of_another_chat_is_caught_though_both_end_alike(
    way: tuple[torch.dtype, torch.dtype, str],
) -> None:
    states, top, head, rounding = _serve(*way)
    assert len({pairs[0][0] for pairs in top}) == 1
    assert min(pairs[0][1] for pairs in top) > -1
    assert _bad(states.roll(1, 0), top, head, rounding) == SAMPLES


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_returned_probability_that_is_off_by_more_than_rounding_is_caught(
    way: tuple[torch.dtype, torch.dtype, str],
) -> None:
    states, top, head, rounding = _serve(*way)
    tokens = torch.tensor([[token for token, _ in pairs] for pairs in top])
    limit = logprobs(states, tokens, head=head, rounding=rounding).limit
    for place in range(5):
        moved = [list(pairs) for pairs in top]
        for index, pairs in enumerate(moved):
            token, value = pairs[place]
            pairs[place] = (token, value - 2.1 * limit[index, place].item())
        assert _bad(states, moved, head, rounding) == SAMPLES


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_better_token_missing_from_the_top_is_caught(
    way: tuple[torch.dtype, torch.dtype, str],
) -> None:
    states, _, head, rounding = _serve(*way)
    states = states[:8]
    tokens = torch.arange(VOCABULARY).expand(len(states), -1)
    ranked = logprobs(states, tokens, head=head, rounding=rounding).asked.topk(30, dim=1)
    places = [0, 1, 2, 3, 29]
    top = [
        list(zip(tokens, values, strict=True))
        for tokens, values in zip(
            ranked.indices[:, places].tolist(), ranked.values[:, places].tolist(), strict=True
        )
    ]
    assert _bad(states, top, head, rounding) == len(states)


def test_a_runner_up_that_rounding_moves_further_may_change_places_with_the_fifth() -> None:
    """Its own limit counts, not only those of the tokens that were returned."""
    weight = torch.zeros(20, 4)
    weight[:6, 0] = torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0, 4.99])
    # the sixth is a difference of large products
    weight[5, 1:3] = torch.tensor([300.0, -300.0])
    head, rounding = (
        Head(weight=weight, norm=None),
        Rounding(compute=torch.float32, stored=torch.bfloat16, normed=True),
    )
    true = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    best = (true @ weight.T).log_softmax(-1).topk(5)
    top = [list(zip(best.indices[0].tolist(), best.values[0].tolist(), strict=True))]
    stored = torch.tensor([[1.0, 1.0 + 2**-9, 1.0 - 2**-9, 0.0]])
    assert _bad(true, top, head, rounding) == 0
    assert _bad(stored, top, head, rounding) == 0
    further = torch.tensor([[1.0, 1.1, 0.9, 0.0]])
    assert _bad(further, top, head, rounding) == 1


def test_a_state_that_is_no_number_is_caught() -> None:
    states, top, head, rounding = _serve(*WAYS[0])
    spoilt = states.clone()
    spoilt[7] = float("nan")
    assert _bad(spoilt, top, head, rounding) == 1


def test_a_state_before_the_norm_is_caught_where_it_is_taken_for_normed() -> None:
    states, top, head, rounding = _serve(torch.bfloat16, torch.bfloat16, "pre_norm")
    assert _bad(states, top, head, rounding) == 0
    unnormed = Rounding(compute=rounding.compute, stored=rounding.stored, normed=True)
    assert _bad(states, top, Head(weight=head.weight, norm=None), unnormed) > 0.9 * SAMPLES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_moves_no_value_by_more_than_half_a_step(dtype: torch.dtype) -> None:
    exact = (
        torch.randn(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 20
    )
    moved = (exact.to(dtype).double() - exact).abs()
    steps = half_step(exact.float(), dtype).double()
    assert (moved <= steps * (1 + 2**-12)).all()
    assert (moved > 0.99 * steps).any()
    normal = exact.abs() > torch.finfo(dtype).smallest_normal
    assert (moved <= unit_roundoff(dtype) * (1 + 2**-12) * exact.abs())[normal].all()


def test_rounding_follows_from_the_capture() -> None:
    spec = capture_spec(final_norm="post_norm", stored_dtype="bfloat16")

    def variance(**changes: str) -> float:
        return Rounding.of(dataclasses.replace(spec, **changes)).state_variance

    assert variance(compute_dtype="float32") == pytest.approx(2**-16 / 3)
    assert variance(compute_dtype="bfloat16") == 0
    assert variance(compute_dtype="bfloat16", stored_dtype="float32") == 0
    assert variance(compute_dtype="bfloat16", final_norm="pre_norm") == pytest.approx(2**-16)


# Prefix recaptures: how far rows are from each other.


def _stream(rows: int, seed: int) -> torch.Tensor:
    """Rows of a residual stream: a few huge components that hardly change, and many small ones that
    do.
    """
    states = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed))
    states[:, 3], states[:, 77] = 900, -500
    return states


def test_a_layer_off_is_far_though_huge_components_hide_it_from_the_norm() -> None:
    here, layer = _stream(50, 0), _stream(50, 1)
    assert ((here - layer).norm(dim=-1) / here.norm(dim=-1)).max() < 0.03
    assert distance(here, layer).min() > 0.5


def test_a_fault_in_a_few_components_is_far_though_the_median_does_not_see_it() -> None:
    here = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(0))
    spoilt = here.clone()
    spoilt[:, : HIDDEN // 8] = 0
    assert distance(here, spoilt).min() > 0.15


def test_the_same_row_from_another_batch_is_near() -> None:
    here = _stream(50, 0)
    again = here * (1 + torch.randn(here.shape, generator=torch.Generator().manual_seed(2)) * 2**-7)
    assert distance(again, here).max() < 0.03
    assert distance(here, here).max() == 0
    assert distance(torch.zeros(1, 4), torch.zeros(1, 4)).item() == 0


def test_stored_rounding_widens_the_limits_of_a_finer_computation() -> None:
    fine = Limits.of(Rounding(compute=torch.float32, stored=torch.float32, normed=True))
    coarse = Limits.of(Rounding(compute=torch.float32, stored=torch.bfloat16, normed=True))
    assert fine.typical < coarse.typical == 2**-7


def test_no_samples_are_no_fault_here() -> None:
    """A shard whose receipts all lack their top tokens is refused where they are read."""
    _, _, head, rounding = _serve(*WAYS[0])
    assert check_alignment([], torch.empty(0, HIDDEN), [], head=head, rounding=rounding) == (
        [],
        {},
    )

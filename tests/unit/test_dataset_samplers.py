"""Samplers lose nothing, keep their budget, and give the same on every run and other batches in every epoch."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import arrays

from draftstates.errors import UserError
from draftstates.samplers import LengthBucketedBatchSampler, TokenBudgetBatchSampler

LENGTHS = st.lists(st.integers(1, 50), min_size=0, max_size=200)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, batch_size=st.integers(1, 9), buckets=st.integers(1, 4))
def test_buckets_hold_every_sample_once(lengths: list[int], batch_size: int, buckets: int) -> None:
    sampler = LengthBucketedBatchSampler(lengths, batch_size=batch_size, bucket_batches=buckets)
    assert Counter(i for batch in sampler for i in batch) == Counter(range(len(lengths)))
    assert all(1 <= len(batch) <= batch_size for batch in sampler)
    assert len(list(sampler)) == len(sampler)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, budget=st.integers(50, 300), padded=st.booleans())
def test_budgets_hold_every_sample_once_and_are_kept(lengths: list[int], budget: int, padded: bool) -> None:
    sampler = TokenBudgetBatchSampler(lengths, max_tokens=budget, padded=padded, bucket=40)
    assert Counter(i for batch in sampler for i in batch) == Counter(range(len(lengths)))
    for batch in sampler:
        tokens = [lengths[i] for i in batch]
        assert (max(tokens) * len(tokens) if padded else sum(tokens)) <= budget


def test_a_sample_over_the_budget_is_named() -> None:
    with pytest.raises(UserError, match="sample 2 has 51 tokens, more than the budget of 50"):
        TokenBudgetBatchSampler([3, 50, 51], max_tokens=50)


def test_buckets_save_padding() -> None:
    lengths = arrays(2000, seed=1)

    def waste(bucket_batches: int) -> float:
        sampler = LengthBucketedBatchSampler(lengths, batch_size=16, bucket_batches=bucket_batches)
        padded = sum(max(lengths[batch]) * len(batch) for batch in map(np.array, sampler))
        return 1 - lengths.sum() / padded

    assert waste(50) < 0.05 < 0.3 < waste(1)


@pytest.mark.parametrize("kind", ["bucketed", "budget"])
def test_epochs_differ_and_repeat(kind: str) -> None:
    def make(seed: int = 0, **more: int) -> LengthBucketedBatchSampler | TokenBudgetBatchSampler:
        lengths = arrays(300, seed=2)
        if kind == "bucketed":
            return LengthBucketedBatchSampler(lengths, batch_size=7, bucket_batches=3, seed=seed, **more)
        return TokenBudgetBatchSampler(lengths, max_tokens=2000, seed=seed, **more)

    first = list(make())
    assert first == list(make())
    assert first != list(make(seed=1))
    other = make()
    assert list(other) == first
    other.set_epoch(1)
    assert first != list(other)

    ranks = [list(make(rank=rank, world_size=4)) for rank in range(4)]
    assert len({len(batches) for batches in ranks}) == 1
    dealt = [tuple(batch) for batches in ranks for batch in batches]
    assert len(set(dealt)) == len(dealt) and set(dealt) <= set(map(tuple, first))
    assert len(first) - len(dealt) < 4


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UserError, match="at least 1, found 0"):
        LengthBucketedBatchSampler([1], batch_size=0)
    with pytest.raises(UserError, match=r"rank must lie in 0\.\.1, found 2"):
        TokenBudgetBatchSampler([1], max_tokens=5, rank=2, world_size=2)

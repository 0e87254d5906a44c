"""The choice of prefix recaptures is keyed, large enough, and of every length."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstates.plan.prefixes import Segments, share_prefixes
from draftstates.plan.recaptures import REACH, SHORTEST, choose_compared, choose_recaptures

_LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=300)


def _names(count: int) -> list[str]:
    return [f"{index:032x}" for index in range(count)]


@given(lengths=_LENGTHS, fraction=st.floats(0, 1), minimum=st.integers(0, 5))
def test_a_shard_gets_the_fraction_and_the_minimum_of_distinct_recaptures(
    lengths: list[int], fraction: float, minimum: int
) -> None:
    recaptures = choose_recaptures(
        _names(len(lengths)), lengths, shard_id="a", fraction=fraction, minimum=minimum
    )
    assert len(recaptures) == min(len(lengths), max(minimum, math.ceil(fraction * len(lengths))))
    positions = [position for position, _ in recaptures]
    assert positions == sorted(set(positions))
    assert all(1 <= rows <= lengths[position] for position, rows in recaptures)


def test_the_choice_depends_on_the_shard_and_on_nothing_else() -> None:
    names, lengths = _names(500), [100] * 500
    first = choose_recaptures(names, lengths, shard_id="a", fraction=0.02, minimum=3)
    assert first == choose_recaptures(names, lengths, shard_id="a", fraction=0.02, minimum=3)
    assert first != choose_recaptures(names, lengths, shard_id="b", fraction=0.02, minimum=3)


def test_prefixes_are_of_every_length_and_cheap_in_long_samples() -> None:
    length = 24_000
    rows = [
        rows
        for _, rows in choose_recaptures(
            _names(4000), [length] * 4000, shard_id="a", fraction=1, minimum=3
        )
    ]
    assert min(rows) == SHORTEST
    assert max(rows) == length
    for least in (100, 1000):
        assert sum(r >= least for r in rows) / len(rows) == pytest.approx(
            SHORTEST / least, rel=0.25
        )
    assert sum(rows) / len(rows) < 0.02 * length


def test_of_a_shard_with_copied_rows_the_others_are_recaptured_first() -> None:
    """Copied rows were recaptured where they were captured; what is new in this shard would else
    hardly ever be.
    """
    names, lengths = _names(1000), [100] * 1000
    new = {17, 400}
    few = choose_recaptures(
        names, lengths, shard_id="a", fraction=0.01, minimum=3, copied=set(range(1000)) - new
    )
    assert len(few) == 3
    assert new < {position for position, _ in few}
    half = choose_recaptures(
        names, lengths, shard_id="a", fraction=0.01, minimum=3, copied=range(500)
    )
    assert len(half) == 5
    assert all(position >= 500 for position, _ in half)
    assert (
        len(
            choose_recaptures(
                names, lengths, shard_id="a", fraction=0.01, minimum=3, copied=range(1000)
            )
        )
        == 3
    )


def test_a_sample_that_is_shorter_than_a_prefix_is_captured_again_whole() -> None:
    assert choose_recaptures(["a", "b"], [5, 1], shard_id="a", fraction=1, minimum=3) == [
        (0, 5),
        (1, 1),
    ]


@pytest.mark.parametrize("shared", [200, 4000])
def test_prefixes_of_samples_that_share_rows_reach_beyond_them_at_a_bounded_cost(
    shared: int,
) -> None:
    """Their own rows may have been computed behind cached keys."""
    head, count = np.arange(shared), 400
    samples = [np.append(head, 10_000 + number * 100 + np.arange(100)) for number in range(count)]
    lengths = [len(sample) for sample in samples]
    segments = share_prefixes(np.concatenate(samples), lengths, minimum=64)
    chosen = choose_recaptures(
        _names(count), lengths, shard_id="a", fraction=1.0, minimum=3, segments=segments
    )[1:]
    beyond = [rows - shared for _, rows in chosen if rows > shared]
    assert min(beyond) >= SHORTEST or shared + min(beyond) == lengths[0]
    expected = min(1, REACH / shared) * len(chosen)
    assert 0.7 * expected <= len(beyond) <= 1.4 * expected
    mean = sum(rows for _, rows in chosen) / len(chosen)
    assert mean < REACH + SHORTEST * (1 + math.log(lengths[0] / SHORTEST)) * 1.5


@pytest.mark.parametrize("copied", [(), range(20)])
def test_one_prefix_of_each_shard_reaches_beyond_long_shared_rows(copied: Sequence[int]) -> None:
    """By some rows of the sample's own; a sample that was not copied does, if it can."""
    head, count = np.arange(6000), 40
    samples = [np.append(head, 10_000 + number * 500 + np.arange(500)) for number in range(count)]
    lengths = [len(sample) for sample in samples]
    segments = share_prefixes(np.concatenate(samples), lengths, minimum=64)
    beyond = set()
    for shard in map(str, range(50)):
        chosen = choose_recaptures(
            _names(count),
            lengths,
            shard_id=shard,
            fraction=0.01,
            minimum=3,
            copied=copied,
            segments=segments,
        )
        reached = [rows - 6000 for at, rows in chosen if rows > 6000 and at and at not in copied]
        assert reached and min(reached) >= SHORTEST
        beyond.update(reached)
    assert len(beyond) > 10


def _sharing(count: int) -> Segments:
    """Return the places of samples of 30 rows: the odd ones share 20 of the first."""
    places, row = [], 0
    for index in range(count):
        places.append([(0, 20), (row, 10)] if index % 2 else [(row, 30)])
        row += 10 if index % 2 else 30
    return Segments.of(places)


@given(fraction=st.floats(0, 1), copied=st.sets(st.integers(0, 99)))
def test_the_fraction_of_the_samples_with_shared_rows_is_compared(
    fraction: float, copied: set[int]
) -> None:
    key = {"shard_id": "a", "copied": copied}
    chosen = choose_compared(_names(100), _sharing(100), fraction=fraction, **key)
    sharing = {*range(1, 100, 2)} - copied
    assert chosen <= sharing
    assert len(chosen) == math.ceil(fraction * len(sharing))
    # a shard that was captured with a larger fraction has the rest too
    assert chosen <= choose_compared(_names(100), _sharing(100), fraction=1, **key)


def test_which_samples_are_compared_depends_on_the_shard() -> None:
    one, other = (
        choose_compared(_names(500), _sharing(500), shard_id=name, fraction=0.02) for name in "ab"
    )
    assert len(one) == len(other) == 5
    assert one != other


def test_where_nothing_is_shared_nothing_is_compared() -> None:
    assert not choose_compared(_names(5), None, shard_id="a", fraction=1)
    apart = Segments.unshared([30] * 5)
    assert not choose_compared(_names(5), apart, shard_id="a", fraction=1)

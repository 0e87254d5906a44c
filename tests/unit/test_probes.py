"""The choice of prefix recaptures is keyed, large enough, and of every length."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstates.probes import choose_probes

_LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=300)


def _names(count: int) -> list[str]:
    return [f"{index:032x}" for index in range(count)]


@given(lengths=_LENGTHS, fraction=st.floats(0, 1), minimum=st.integers(0, 5))
def test_a_shard_gets_the_fraction_and_the_minimum_of_distinct_probes(lengths: list[int], fraction: float, minimum: int) -> None:
    probes = choose_probes(_names(len(lengths)), lengths, shard_id="a", fraction=fraction, minimum=minimum)
    assert len(probes) == min(len(lengths), max(minimum, math.ceil(fraction * len(lengths))))
    positions = [position for position, _ in probes]
    assert positions == sorted(set(positions))
    assert all(1 <= rows <= lengths[position] for position, rows in probes)


def test_the_choice_depends_on_the_shard_and_on_nothing_else() -> None:
    names, lengths = _names(500), [100] * 500
    first = choose_probes(names, lengths, shard_id="a", fraction=0.02, minimum=3)
    assert first == choose_probes(names, lengths, shard_id="a", fraction=0.02, minimum=3)
    assert first != choose_probes(names, lengths, shard_id="b", fraction=0.02, minimum=3)


def test_prefix_lengths_are_log_uniform() -> None:
    length = 1000
    probes = choose_probes(_names(4000), [length] * 4000, shard_id="a", fraction=1, minimum=3)
    logs = [math.log(rows) / math.log(length) for _, rows in probes]
    assert sum(logs) / len(logs) == pytest.approx(0.47, abs=0.04)
    assert min(rows for _, rows in probes) == 1
    assert max(rows for _, rows in probes) > 0.99 * length

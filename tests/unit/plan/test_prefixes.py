"""Shared prefixes: each sample shares the longest prefix of an earlier one, and each row is in the
file once.
"""

import os
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftstates import ids
from draftstates.plan.prefixes import MOST_SEGMENTS, Segments, shard_id, share_prefixes

EXAMPLES = int(os.environ.get("DRAFTSTATES_FUZZ", "100"))
# few values and short samples, so that nearly all share something
SAMPLES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


def flat(samples: list[list[int]]) -> np.ndarray:
    return np.array([token for sample in samples for token in sample], dtype=np.int32)


def share(samples: list[list[int]], minimum: int) -> Segments:
    lengths = list(map(len, samples))
    found = share_prefixes(flat(samples), lengths, minimum=minimum)
    return found or Segments.unshared(lengths)


def common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@settings(max_examples=EXAMPLES, deadline=None)
@given(SAMPLES, st.integers(1, 5))
def test_each_row_is_that_of_the_same_tokens_and_the_longest_prefix_is_shared(
    samples: list[list[int]], minimum: int
) -> None:
    found = share(samples, minimum)
    assert found.fault(flat(samples)) is None
    assert found.lengths.tolist() == list(map(len, samples))
    # the tokens up to a row decide it: one row of the file stands for one such prefix
    prefixes: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        for position, row in enumerate(found.row_numbers(index).tolist()):
            assert prefixes.setdefault(row, sample[: position + 1]) == sample[: position + 1]
        longest = max((common(sample, other) for other in samples[:index]), default=0)
        longest = min(longest, len(sample) - 1)
        assert found.shared(index) == (longest if longest >= minimum else 0)
    assert sorted(prefixes) == list(range(found.rows))
    assert all(a < b for a, b in pairwise(found.ends.tolist()))


@settings(max_examples=EXAMPLES, deadline=None)
@given(SAMPLES, st.data())
def test_places_of_other_tokens_are_found(samples: list[list[int]], data: st.DataObject) -> None:
    """Every change of the places is refused, or leaves each row the one of the same tokens."""
    found = share(samples, 1)
    places = found.places.copy()
    at = data.draw(st.integers(0, places.size - 1))
    places.reshape(-1)[at] += data.draw(st.sampled_from([-3, -1, 1, 2, 5]))
    changed = Segments(found.offsets, places)
    if changed.fault(flat(samples)) is None:
        prefixes: dict[int, list[int]] = {}
        for index, sample in enumerate(samples):
            for position, row in enumerate(changed.row_numbers(index).tolist()):
                assert prefixes.setdefault(row, sample[: position + 1]) == sample[: position + 1]
    elif found.content():
        assert changed.content() != found.content()


@pytest.mark.parametrize("offsets", [[0, 1], [0, 0, 2], [1, 1, 2], [0, 2, 1]])
def test_offsets_that_are_no_ranges_are_found(offsets: list[int]) -> None:
    places = np.array([[0, 2], [2, 1]])
    assert Segments(np.array([0, 1, 2]), places).fault(np.arange(3)) is None
    assert Segments(np.array(offsets), places).fault(np.arange(3)) is not None


@pytest.mark.parametrize(
    "places", [[[(0, 4)], [(6, 4)]], [[(2, 4)], [(6, 4)]], [[(0, 4)], [(0, 4), (6, 4)]]]
)
def test_rows_that_are_nobodys_are_found(places: list[list[tuple[int, int]]]) -> None:
    first, second = [0, 1, 2, 3], [4, 5, 6, 7]
    samples = [first, [*(first if len(places[1]) > 1 else []), *second]]
    assert "expected all rows" in Segments.of(places).fault(flat(samples))


def test_a_prefix_is_shared_across_conversations_and_along_a_rewritten_history() -> None:
    system, first, thought, answer = list(range(10)), [20] * 4, [30] * 3, [40] * 2
    conversation = [system + first + thought + answer, system + first + answer + [50] * 5]
    other = system + [60] * 5
    found = share([*conversation, other], 4)
    assert [found.of_sample(index) for index in range(3)] == [
        [(0, 19)],
        [(0, 14), (19, 7)],
        [(0, 10), (26, 5)],
    ]
    assert [found.shared(index) for index in range(3)] == [0, 14, 10]


def test_a_conversation_that_only_grows_is_one_place() -> None:
    turns = [list(range(length)) for length in (5, 9, 14)]
    assert [share(turns, 2).of_sample(index) for index in range(3)] == [
        [(0, 5)],
        [(0, 9)],
        [(0, 14)],
    ]


def test_the_last_row_of_a_sample_is_its_own() -> None:
    """The same tokens with another mask are another sample; its next token is compared too."""
    found = share([[1, 2, 3], [1, 2, 3], [1, 2]], 1)
    assert [found.shared(index) for index in range(3)] == [0, 2, 1]
    assert found.rows == 5


def test_a_sample_lies_in_few_places() -> None:
    """A later turn has of each turn before it all but what the template took out."""
    samples: list[list[int]] = []
    for turn in range(40):
        history = samples[-1][:-1] if samples else []
        samples.append([*history, *(100 * turn + i for i in range(10))])
    found = share(samples, 5)
    assert found.fault(flat(samples)) is None
    assert max(len(found.of_sample(index)) for index in range(40)) == MOST_SEGMENTS
    assert found.rows < sum(map(len, samples)) / 2


def test_a_shard_in_which_nothing_is_shared_keeps_its_id() -> None:
    together = share([[1, 2], [1, 3]], 1)
    assert share_prefixes(flat([[1, 2], [1, 3]]), [2, 2], minimum=2) is None
    for apart in (None, share([[1, 2], [3, 4]], 1)):
        assert shard_id(["a", "b"], apart) == ids.shard_id(["a", "b"])
    assert shard_id(["a", "b"], together) != ids.shard_id(["a", "b"])

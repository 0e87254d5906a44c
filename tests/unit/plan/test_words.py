"""Numbers for people: three digits, and never more than is true."""

import pytest

from draftstates.plan.words import of_bytes, of_count, of_seconds, of_share


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (80_421_668, "80.4 MB"),
        (999_400_000, "999 MB"),
        (999_900_000, "1 GB"),
        (60_987_944_960, "61 GB"),
        (2.5e15, "2.5 PB"),
        (5e18, "5000 PB"),
    ],
)
def test_bytes(count: float, text: str) -> None:
    assert of_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (13_338, "13,338"), (4_812_000, "4.81 million"), (1.2e9, "1.2 billion")],
)
def test_counts(count: float, text: str) -> None:
    assert of_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.96, "10.0 s"),
        (27, "27 s"),
        (59.6, "1 min"),
        (250, "4 min 10 s"),
        (3600, "1 h"),
        (12_000, "3 h 20 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert of_seconds(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0 %"),
        (1, "100 %"),
        (0.683, "68.3 %"),
        (0.00001, "< 0.01 %"),
        (0.999999, "> 99.99 %"),
        (0.0017, "0.17 %"),
        (0.9987, "99.87 %"),
    ],
)
def test_a_share_is_all_or_nothing_only_where_it_is(share: float, text: str) -> None:
    assert of_share(share) == text

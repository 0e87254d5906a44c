"""Which samples are captured once more as a prefix, and how long the prefix is: a keyed choice, the same on every machine."""

import math
from collections.abc import Collection, Sequence

from draftstates.ids import keyed_fraction

SHORTEST = 32  # rows, in samples that have as many: the first tokens of a conversation are often the template's, the same in all


def choose_probes(
    sample_ids: Sequence[str], lengths: Sequence[int], *, shard_id: str, fraction: float, minimum: int, copied: Collection[int] = ()
) -> list[tuple[int, int]]:
    """Choose a shard's prefix recaptures.

    Args:
        sample_ids: S names, in the shard's order; lengths: their tokens.
        shard_id: keys the choice, so that another shard with the same samples probes others.
        fraction: share of the captured samples to probe, 0 to 1, rounded up; minimum: at least so many, as far as there are samples.
        copied: positions of samples whose rows were copied. Those were probed where they were captured, so the others come first.

    Returns:
        Pairs (position in the shard, rows of the prefix), ascending by position; 1 <= rows <= length of that sample. A prefix has
        at least r rows with probability `SHORTEST` / r: every length is tried, at a mean cost of SHORTEST * (1 + ln(n / SHORTEST))
        tokens of a sample of n, so that three in a shard of few long samples cost little too.
    """
    copied = frozenset(copied)
    count = min(len(sample_ids), max(minimum, math.ceil(fraction * (len(sample_ids) - len(copied)))))
    draws = [keyed_fraction(name, key=f"probe:{shard_id}:{position}") for position, name in enumerate(sample_ids)]
    chosen = sorted(sorted(range(len(draws)), key=lambda position: (position in copied, draws[position]))[:count])
    return [(position, _prefix_rows(sample_ids[position], lengths[position], shard_id)) for position in chosen]


def _prefix_rows(name: str, length: int, shard_id: str) -> int:
    draw = keyed_fraction(name, key=f"prefix:{shard_id}")
    return min(length, int(SHORTEST / (1 - draw)))

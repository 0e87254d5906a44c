"""The choice of the prefix recaptures: their samples, and the lengths of the prefixes.

A prefix recapture captures a sample a second time as a prefix. Of a sample that shares rows, the
server computes these a second time anyway: those of chosen samples are compared with the stored
ones. Both choices are keyed, so that they are the same on every machine.
"""

import math
from collections.abc import Collection, Sequence

from draftstates.ids import keyed_fraction
from draftstates.plan.prefixes import Segments

# least rows of a prefix, in samples that have this many: the first tokens of a conversation are
# often the template's, and the same in all samples
SHORTEST = 32
# shared rows beyond which not every prefix reaches; one of each shard does
REACH = 512


def choose_recaptures(
    sample_ids: Sequence[str],
    lengths: Sequence[int],
    *,
    shard_id: str,
    fraction: float,
    minimum: int,
    copied: Collection[int] = (),
    segments: Segments | None = None,
) -> list[tuple[int, int]]:
    """Choose a shard's prefix recaptures.

    Args:
        sample_ids: S sample ids, in the shard's order.
        lengths: tokens of each sample.
        shard_id: keys the choice, so that another shard with the same samples recaptures others.
        fraction: share of the captured samples to recapture, 0 to 1, rounded up.
        minimum: least number of prefix recaptures of a shard that has at least this many samples.
        copied: positions of samples whose rows were copied. They were recaptured in their first
            shard, so the other samples are chosen first.
        segments: places of the samples' rows, where some share rows. A prefix of a sample that
            shares n rows reaches beyond them with probability `REACH` / n, so that its own rows are
            recaptured too, which may have been computed behind cached keys. So this costs at most
            `REACH` tokens more in the mean. And one prefix of a shard always does, whatever its
            shared rows cost, if samples that share rows are chosen.

    Returns:
        Pairs (position in the shard, rows of the prefix), ascending by position, with 1 <= rows <=
        length of the sample. A prefix has at least r rows with probability `SHORTEST` / r. So every
        length occurs, and the mean cost in a sample of n tokens is SHORTEST * (1 + ln(n /
        SHORTEST)) tokens: three prefix recaptures of a shard with few long samples cost little too.
    """
    copied = frozenset(copied)
    count = min(
        len(sample_ids), max(minimum, math.ceil(fraction * (len(sample_ids) - len(copied))))
    )
    draws = [
        keyed_fraction(name, key=f"recapture:{shard_id}:{position}")
        for position, name in enumerate(sample_ids)
    ]
    chosen = sorted(
        sorted(range(len(draws)), key=lambda position: (position in copied, draws[position]))[
            :count
        ]
    )
    shared = {position: segments.shared(position) if segments else 0 for position in chosen}
    reach = {
        position: keyed_fraction(sample_ids[position], key=f"reach:{shard_id}")
        for position in chosen
        if shared[position]
    }
    # a copied sample was computed behind no cached keys of this attempt
    surest = min(reach, key=lambda position: (position in copied, reach[position]), default=None)
    found = []
    for position in chosen:
        fraction = keyed_fraction(sample_ids[position], key=f"prefix:{shard_id}")
        rows = int(SHORTEST / (1 - fraction))
        if position == surest or reach.get(position, 0) * shared[position] < REACH:
            rows += shared[position]
        found.append((position, min(lengths[position], rows)))
    return found


def choose_compared(
    sample_ids: Sequence[str],
    segments: Segments | None,
    *,
    shard_id: str,
    fraction: float,
    copied: Collection[int] = (),
) -> set[int]:
    """Choose the samples whose shared rows are compared with the stored ones when computed again.

    A thousand rows of four states of 4,096 numbers take a thread of the server 0.7 s. So there is
    no other minimum than one of each shard.

    Args:
        sample_ids: S sample ids, in the shard's order.
        segments: places of the samples' rows; None where nothing is shared.
        shard_id: keys the choice.
        fraction: share to compare of the captured samples that share rows, 0 to 1, rounded up.
        copied: positions of samples whose rows were copied, and are not computed.

    Returns:
        positions in the shard.
    """
    if segments is None:
        return set()
    copied = frozenset(copied)
    sharing = [
        position
        for position in range(len(sample_ids))
        if position not in copied and segments.shared(position)
    ]
    draws = {
        position: keyed_fraction(sample_ids[position], key=f"compare:{shard_id}:{position}")
        for position in sharing
    }
    count = math.ceil(fraction * len(sharing))
    return set(sorted(sharing, key=draws.__getitem__)[:count])

"""Sizes of rows at a few positions of each sample, for people to see that the states are sane.

The rows are looked at while a sample is in memory for its checks; nothing is refused for its size.
"""

from collections import Counter
from collections.abc import Iterable

import torch

from draftstates.records import LayerSizes
from draftstates.shards.layout import Shard

# norms are counted in steps of a factor of 2^(1/8)
STEPS_PER_DOUBLING = 8
_COMPONENTS = 8


def positions(length: int) -> list[int]:
    """Return the positions that are looked at: 0, and the powers of two below `length`."""
    return [0, *(1 << power for power in range(length.bit_length()) if 1 << power < length)]


def sample_sizes(shard: Shard, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norms of a sample's rows at `positions`, and their largest components.

    Returns:
        norms float32 [P, L] of each r_k and then of the final state, as far as they are captured;
        indices of the components with the largest absolute value, int64 [P, L].
    """
    chosen = shard.segments.row_numbers(index)[positions(shard.length(index))]
    width = next(iter(shard.header.row_shapes().values()))[-1]
    rows = torch.cat(
        [
            shard.state_rows(name, 0, shard.header.rows)[chosen]
            .float()
            .view(len(chosen), -1, width)
            for name in shard.header.states()
        ],
        dim=1,
    )
    return rows.norm(dim=-1), rows.abs().argmax(dim=-1)


def layer_sizes(
    found: Iterable[tuple[torch.Tensor, torch.Tensor]], *, layers: Iterable[int], final: bool
) -> tuple[LayerSizes, ...]:
    """Return the sizes of a shard's samples by layer.

    Args:
        found: of each sample, as `sample_sizes` returns it.
        layers: k of each r_k.
        final: whether the final state is captured.
    """
    found = list(found)
    names = [*(f"r_{k}" for k in layers), *(["final"] if final else [])]
    return tuple(
        _of_layer(name, [(norms[:, place], most[:, place]) for norms, most in found])
        for place, name in enumerate(names)
    )


def _of_layer(name: str, found: list[tuple[torch.Tensor, torch.Tensor]]) -> LayerSizes:
    norms: dict[str, Counter[str]] = {}
    largest: Counter[str] = Counter()
    total = 0.0
    for of_sample, most in found:
        total += of_sample.sum().item()
        largest.update(map(str, most.tolist()))
        steps = (of_sample.log2() * STEPS_PER_DOUBLING).round().int().tolist()
        for number, step in enumerate(steps):
            position = str(0 if number == 0 else 1 << (number - 1))
            norms.setdefault(position, Counter())[str(step)] += 1
    return LayerSizes(
        layer=name,
        rows=largest.total(),
        norm_sum=round(total, 3),
        norms={position: dict(steps) for position, steps in norms.items()},
        largest=dict(largest.most_common(_COMPONENTS)),
    )

"""Sizes of rows by layer and position, of all shards together."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from draftstates.records import LayerSizes
from draftstates.verify.sizes import STEPS_PER_DOUBLING

_LOW, _HIGH = 0.05, 0.95
_COMPONENTS = 4


class Norms:
    """A sum of the sizes that verification has counted in each shard."""

    def __init__(self) -> None:
        self._rows: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()
        self._norms: dict[str, dict[int, Counter[int]]] = defaultdict(lambda: defaultdict(Counter))
        self._largest: dict[str, Counter[str]] = defaultdict(Counter)

    def add(self, sizes: Iterable[LayerSizes]) -> None:
        """Add the sizes of a shard."""
        for layer in sizes:
            self._rows[layer.layer] += layer.rows
            self._sums[layer.layer] += layer.norm_sum
            self._largest[layer.layer].update(layer.largest)
            for position, steps in layer.norms.items():
                counts = self._norms[layer.layer][int(position)]
                counts.update({int(step): count for step, count in steps.items()})

    def summary(self) -> dict[str, Any]:
        """Return the sizes of all shards; nothing where verification has counted none.

        Returns:
            `rows` and `positions`, their numbers; `layers`: for each `layer`, `rows`, `mean`,
            `low`, `median`, `high` (the norms that 5, 50 and 95 % of the rows lie below) and
            `components`; `by_position`: for each layer and `position` the same norms. `place` is
            the position with 0 at 1/2, for an axis of doublings.
        """
        if not self._rows:
            return {}
        return {
            "rows": self._rows.total(),
            "positions": max(map(len, self._norms.values())),
            "layers": [self._of_layer(name) for name in self._rows],
            "by_position": [
                {"layer": name, "position": position, "place": position or 0.5, **_spread(counts)}
                for name, found in self._norms.items()
                for position, counts in sorted(found.items())
            ],
        }

    def _of_layer(self, name: str) -> dict[str, Any]:
        rows = self._rows[name]
        together: Counter[int] = Counter()
        for counts in self._norms[name].values():
            together.update(counts)
        return {
            "layer": name,
            "rows": rows,
            "mean": self._sums[name] / rows,
            **_spread(together),
            "components": [
                {"index": int(index), "share": count / rows}
                for index, count in self._largest[name].most_common(_COMPONENTS)
            ],
        }


def _spread(counts: Mapping[int, int]) -> dict[str, float]:
    """Return the norms that 5, 50 and 95 % of the rows lie below, to a sixteenth of a doubling."""
    total, seen = sum(counts.values()), 0
    bounds = {"low": _LOW, "median": 0.5, "high": _HIGH}
    found: dict[str, float] = {}
    for step, count in sorted(counts.items()):
        seen += count
        for name, share in bounds.items():
            if name not in found and seen >= share * total:
                found[name] = round(2 ** (step / STEPS_PER_DOUBLING), 6)
    return found

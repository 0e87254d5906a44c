"""Prefix recaptures: first rows of a sample that are captured a second time in another batch.

They must agree with the shard's rows and with no neighbour.

Two rows are compared by `draftstates.shards.distance`.

Limits, from SmolLM2 on conversations (a prefix in a batch of two against the whole alone), worst
row of r_2, r_15, r_27 and final:

| | bfloat16 | float32 |
| --- | --- | --- |
| the same row, captured a second time | 0.054 | 0.00001 |
| a neighbouring row, nearest | 0.20 | 0.20 |
| the next layer's row, median | 0.49 | 0.49 |

So half of the rows must lie within `typical`, twice the worst of a dense model. A single row may
lie as far as `worst`, since one of many experts may be chosen otherwise, but no further than a
quarter of the way to its nearest neighbour.
"""

import dataclasses
from collections.abc import Iterator

import torch

from draftstates.shards.distance import distance
from draftstates.shards.layout import Shard
from draftstates.verify.alignment import Rounding, unit_roundoff
from draftstates.verify.checks import Finding

_LIMITS = {torch.bfloat16: (0.1, 0.25), torch.float16: (0.1, 0.25), torch.float32: (1e-3, 0.05)}
_TO_NEIGHBOUR = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Largest distances of rows from their recapture.

    Attributes:
        typical: half of the rows must lie within it.
        worst: every row must lie within it.
    """

    typical: float
    worst: float

    @classmethod
    def of(cls, rounding: Rounding) -> "Limits":
        typical, worst = _LIMITS[rounding.compute]
        # Two values that round apart.
        stored = 2 * unit_roundoff(rounding.stored)
        return cls(typical=max(typical, stored), worst=max(worst, stored))


def check_prefix(
    shard: Shard, index: int, recaptures: Shard, number: int, *, limits: Limits
) -> tuple[list[Finding], float]:
    """Compare a prefix recapture with the first rows of its sample, in all that is captured.

    Args:
        index: position of the sample in the shard.
        number: position of the prefix recapture in the recaptures file.

    Returns:
        findings, and the largest of the layers' median distances.
    """
    name = shard.header.sample_ids[index]
    findings, largest = [], 0.0
    for what, again, rows in _tensors(shard, index, recaptures, number):
        distances = distance(again, rows[: len(again)])
        typical = distances.median().item()
        largest = max(largest, typical)
        if not typical <= limits.typical:
            detail = (
                f"half of {len(again)} rows of {what} differ from their recapture by more than"
                f" {typical:.3g} (limit {limits.typical:.3g})"
            )
            findings.append(Finding(check="prefix", sample_id=name, detail=detail))
            continue
        for row in torch.nonzero(~(distances <= limits.typical)).flatten().tolist():
            near = _nearest_neighbour(again[row], rows, row)
            limit = max(limits.typical, min(limits.worst, _TO_NEIGHBOUR * near))
            if not distances[row] <= limit:
                detail = (
                    f"row {row} of {what} differs from its recapture by {distances[row]:.3g} (limit"
                    f" {limit:.3g}, next row {near:.3g})"
                )
                findings.append(Finding(check="prefix", sample_id=name, detail=detail))
                break
    return findings, largest


def _nearest_neighbour(again: torch.Tensor, rows: torch.Tensor, row: int) -> float:
    """Return the distance of a recaptured row [H] from the nearer of its neighbours in the shard.

    The distance is infinite for a row without neighbours.
    """
    neighbours = [rows[other] for other in (row - 1, row + 1) if 0 <= other < len(rows)]
    return min(
        (distance(again[None], other[None]).item() for other in neighbours), default=float("inf")
    )


def _tensors(
    shard: Shard, index: int, recaptures: Shard, number: int
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield name, recaptured rows [n, H] and the shard's rows of each captured state.

    The shard's rows include the next row, if the sample has one, and the rows that are an earlier
    sample's: the recapture shows that those are this sample's too.
    """
    for tensor in shard.header.states():
        again = recaptures.sample_rows(tensor, number)
        rows = shard.sample_rows(tensor, index)[: len(again) + 1]
        if tensor == "final_hidden_state":
            yield "the final state", again, rows
            continue
        for position, layer in enumerate(shard.header.residual_layers):
            yield f"r_{layer}", again[:, position], rows[:, position]

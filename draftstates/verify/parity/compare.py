"""Distances of captured rows from a reference, layer by layer, and their limits.

The residual stream has a few huge components: over a whole matrix, neighbouring layers differ by
1 % only. Each row is therefore judged by its distance over the row's norm, and against the
distances of the neighbouring layers.

Limits, from models on the CPU: rows computed and stored in float32 lie at most 1.3e-6 from the
reference (median of a layer), those stored in bfloat16 0.0016, neighbouring layers 0.22 to 0.97.
"""

import dataclasses
from collections.abc import Mapping

import torch

from draftstates.records import LayerParity
from draftstates.spec import torch_dtype

# What the roundings of a forward pass may move the median row by. Sums in float32 differ in order
# only. One rounding to bfloat16 moves a value by at most 2^-9 of it on average; some tens of
# roundings in sequence stay below 16 times that.
_COMPUTED = {"float32": 1e-4, "float16": 2**-8, "bfloat16": 2**-5}
COMPUTE_DTYPES = tuple(_COMPUTED)
# A server of FP8 weights rounds activations to 8 bits too. Each rounding moves a value by 2^-4 at
# most, and by a fourth of that on average; so do the products, and the sums of such changes.
_FP8 = 0.1
# The right layer must be at least twice as near as either neighbour.
_NEIGHBOUR_RATIO = 0.5
# A near tie of a router moves a single row by much. So many rows may lie nearer to a neighbour.
_MOST_STRAYS = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limit:
    """The largest distance that roundings explain.

    Attributes:
        median: for the median row of a layer.
    """

    median: float

    @classmethod
    def of(cls, *, compute: str, stored: str, quantization: str | None = None) -> "Limit":
        """Return the limit of a capture.

        Args:
            compute: dtype of the server's numbers.
            stored: dtype of the compared rows.
            quantization: method by which the weights are quantised, or None.
        """
        computed = max(_COMPUTED[compute], _FP8 if "fp8" in (quantization or "") else 0.0)
        rounding = torch.finfo(torch_dtype(stored)).eps / 2 if stored != compute else 0.0
        return cls(median=computed + rounding)


def compare(
    rows: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], *, limit: Limit
) -> list[LayerParity]:
    """Measure how far each captured state lies from the reference's and from its neighbours.

    Args:
        rows: states by name ("r_k" or "post_norm"), [n, H] each.
        reference: the reference's states by the same names, of the same rows; names that only one
            side has are left out.
        limit: the largest distance of the median row.
    """
    found = []
    for name, captured in rows.items():
        if name not in reference:
            continue
        right = row_distances(captured, reference[name])
        others = {
            other: row_distances(captured, reference[other])
            for other in _neighbours(name, reference)
        }
        nearest = torch.stack(list(others.values())).min(dim=0).values if others else None
        found.append(
            LayerParity(
                layer=name,
                rows=len(right),
                median=right.median().item(),
                worst=right.max().item(),
                limit=limit.median,
                neighbours={other: each.median().item() for other, each in others.items()},
                strays=0.0 if nearest is None else (~(right < nearest)).float().mean().item(),
            )
        )
    return found


def row_distances(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return the distance of each row from its counterpart, over the counterpart's norm, [n]."""
    rows, others = rows.float(), others.float()
    return (rows - others).norm(dim=-1) / others.norm(dim=-1)


def _neighbours(name: str, reference: Mapping[str, torch.Tensor]) -> list[str]:
    last = f"r_{max(int(k.removeprefix('r_')) for k in reference if k.startswith('r_'))}"
    if name == "post_norm":
        return [last]
    k = int(name.removeprefix("r_"))
    beside = [other for other in (f"r_{k - 1}", f"r_{k + 1}") if other in reference]
    # A layer that changes nothing cannot be told from the next one.
    return [other for other in beside if not torch.equal(reference[other], reference[name])]


def fault(found: LayerParity) -> str | None:
    """Return what is wrong with a layer's distances, or None.

    It names layer, distance, limit and the distances of the neighbouring layers.
    """
    beside = ", ".join(f"{name} {value:.2g}" for name, value in found.neighbours.items())
    where = f" (neighbouring layers: {beside})" if beside else ""
    # A NaN is wrong too.
    if not found.median <= found.limit:
        return (
            f"{found.layer}: the median row differs by {found.median:.2g} from the checkpoint's,"
            f" expected at most {found.limit:.2g}{where}"
        )
    for other, distance in found.neighbours.items():
        if not found.median <= _NEIGHBOUR_RATIO * distance:
            return (
                f"{found.layer}: the median row differs by {found.median:.2g} from the"
                f" checkpoint's and by {distance:.2g} from its {other}, expected at most"
                f" {_NEIGHBOUR_RATIO:g} of that{where}"
            )
    if found.strays > _MOST_STRAYS:
        return (
            f"{found.layer}: {found.strays:.0%} of {found.rows} rows are nearer to a neighbouring"
            f" layer, expected at most {_MOST_STRAYS:.0%}{where}"
        )
    return None

"""Distances of captured rows from a reference, layer by layer, and their limits.

The residual stream has a few huge components: over a whole matrix, neighbouring layers differ by
1 % only. Each row is therefore judged by its distance over the row's norm, and against the
distances of the neighbouring layers.

Limits, from models on the CPU: rows computed and stored in float32 lie at most 1.3e-6 from the
reference (median of a layer), those stored in bfloat16 0.0016, neighbouring layers 0.22 to 0.97.
On a GPU, rows computed in bfloat16 with random weights (`tests/gpu`): 8 layers of Qwen3-8B's shape
0.011 at r_2, 0.0145 at r_4, 0.0195 at r_8; of DeepSeek-V2-Lite's 0.015, 0.020, 0.031. transformers
in bfloat16 on the CPU, on models of these shapes: 0.0114, 0.0145, 0.0183 and 0.0136, 0.0196,
0.0297. So an honest server rounds as much as transformers does, and one layer of that is a control.

A layer alone shows a missing bias, another scale of a norm, weights in FP8. Weights rounded to
INT8, missing biases of queries and keys, and an epsilon far below a row's mean square move rows by
no more than the roundings of bfloat16 do: they cannot be told from them.
"""

import dataclasses
import math
from collections.abc import Mapping

import torch

from draftstates.capture.every_layer import row_distances
from draftstates.records import LayerParity
from draftstates.spec import torch_dtype
from draftstates.verify.parity.alone import Alone

# What the roundings of a forward pass may move the median row by. Sums in float32 differ in order
# only. One rounding to bfloat16 moves a value by at most 2^-9 of it on average; the roundings of a
# few layers stay below 16 times that.
_COMPUTED = {"float32": 1e-4, "float16": 2**-8, "bfloat16": 2**-5}
COMPUTE_DTYPES = tuple(_COMPUTED)
# A server of FP8 or INT8 weights rounds activations to 8 bits too. Of FP8, each rounding moves a
# value by 2^-4 at most, and by a fourth of that on average; so do the products, and the sums of
# such changes.
_EIGHT_BITS = 0.1
# Layers round independently of each other: the distance grows with the root of their number.
_LAYERS_OF_A_LIMIT = 4
# The right layer must be at least twice as near as either neighbour.
_NEIGHBOUR_RATIO = 0.5
# A layer alone may lie this many times as far as transformers' same layer in the server's number
# format, since kernels round in other places. transformers' own forward passes, by eager and by
# sdpa attention, of 4 to 36 layers, dense and of experts, lie at most 1.2 times as far.
_ALONE_RATIO = 3.0
# Where nothing is chosen by comparison, no row lies this many times as far as the median may.
_WORST_RATIO = 8.0
# A near tie of a router moves a single row by much. This share of rows may lie nearer to one.
_MOST_STRAYS = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limit:
    """The largest distance that roundings explain.

    Attributes:
        computed: for the median row of the first layers, by the roundings of its computation.
        stored: for the rounding of the stored row.
        grows: whether later layers may lie farther.
        rounding: one rounding of the computation, by which a layer alone may differ at least; None
            where layers are not judged alone.
        smooth: whether every row is held to a limit, since no router lets a row jump.
    """

    computed: float
    stored: float = 0.0
    grows: bool = False
    rounding: float | None = None
    smooth: bool = False

    def at(self, layers: int) -> float:
        """Return the limit for the median row of r_k, k = `layers`."""
        factor = math.sqrt(max(1.0, layers / _LAYERS_OF_A_LIMIT)) if self.grows else 1.0
        return self.computed * factor + self.stored

    def alone(self, control: float) -> float:
        """Return the limit for the median row of one layer alone, given its control's distance."""
        return min(max(_ALONE_RATIO * control, self.rounding or 0.0), self.at(1))

    @classmethod
    def of(
        cls,
        *,
        compute: str,
        stored: str,
        quantization: str | None = None,
        eight_bits: bool | None = None,
        smooth: bool = False,
    ) -> "Limit":
        """Return the limit of a capture.

        Args:
            compute: dtype of the server's numbers.
            stored: dtype of the compared rows.
            quantization: method by which the weights are quantised, or None.
            eight_bits: whether the server multiplies numbers of 8 bits; None where the method
                tells.
            smooth: whether the model chooses nothing by comparison.
        """
        if eight_bits is None:
            eight_bits = "fp8" in (quantization or "")
        computed = max(_COMPUTED[compute], _EIGHT_BITS if eight_bits else 0.0)
        rounding = torch.finfo(torch_dtype(stored)).eps / 2 if stored != compute else 0.0
        # What is stored more coarsely than it was computed is another input of the next layer.
        alone = compute != "float32" and not quantization and not coarser(stored, compute)
        return cls(
            computed=computed,
            stored=rounding,
            grows=compute != "float32",
            rounding=torch.finfo(torch_dtype(compute)).eps / 2 if alone else None,
            smooth=smooth,
        )


def coarser(one: str, other: str) -> bool:
    """Return whether a number format keeps fewer digits than another one."""
    return torch.finfo(torch_dtype(one)).eps > torch.finfo(torch_dtype(other)).eps


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
    found, last = [], _last(reference)
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
                limit=(at_most := limit.at(last if name == "post_norm" else _k(name))),
                worst_limit=_WORST_RATIO * at_most if limit.smooth else None,
                neighbours={other: each.median().item() for other, each in others.items()},
                strays=0.0 if nearest is None else (~(right < nearest)).float().mean().item(),
            )
        )
    return found


def judged_alone(
    found: LayerParity, captured: torch.Tensor, layer: Alone, *, limit: Limit
) -> LayerParity:
    """Return a layer's distances with those of the layer alone.

    Args:
        found: its distances from the reference.
        captured: the layer's captured rows, [m, H].
        layer: what the checkpoint's layer gives for the captured rows before it.
    """
    mine = row_distances(captured, layer.right)
    control = row_distances(layer.control, layer.right)
    at_most = limit.alone(control.median().item())
    worst = max(_WORST_RATIO * at_most, _ALONE_RATIO * control.max().item())
    return dataclasses.replace(
        found,
        alone=mine.median().item(),
        alone_limit=at_most,
        alone_worst=mine.max().item(),
        alone_worst_limit=worst if limit.smooth else None,
    )


def _last(states: Mapping[str, torch.Tensor]) -> int:
    """Return the k of the last r_k among states; 0 where there is none."""
    return max(
        (int(name.removeprefix("r_")) for name in states if name.startswith("r_")), default=0
    )


def _k(name: str) -> int:
    return int(name.removeprefix("r_"))


def _neighbours(name: str, reference: Mapping[str, torch.Tensor]) -> list[str]:
    if name == "post_norm":
        return [f"r_{_last(reference)}"]
    k = _k(name)
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
    if found.worst_limit is not None and not found.worst <= found.worst_limit:
        return (
            f"{found.layer}: one of {found.rows} rows differs by {found.worst:.2g} from the"
            f" checkpoint's, expected at most {found.worst_limit:.2g}{where}"
        )
    return _fault_alone(found)


def _fault_alone(found: LayerParity) -> str | None:
    if found.alone is None:
        return None
    given = "computed from the captured rows before it,"
    if not found.alone <= found.alone_limit:
        return (
            f"{found.layer}: {given} the median row differs by {found.alone:.2g} from the"
            f" checkpoint's, expected at most {found.alone_limit:.2g}: roundings do not explain it"
        )
    if found.alone_worst_limit is not None and not found.alone_worst <= found.alone_worst_limit:
        return (
            f"{found.layer}: {given} one row differs by {found.alone_worst:.2g} from the"
            f" checkpoint's, expected at most {found.alone_worst_limit:.2g}"
        )
    return None

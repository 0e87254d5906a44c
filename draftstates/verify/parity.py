"""Parity (promise 5): captured rows against a plain Hugging Face forward pass, layer by layer.

The residual stream has a few huge components: over a whole matrix, neighbouring layers differ by
1 % only. Each row is therefore judged by its distance over the row's norm, and against the
distance of the neighbouring layers.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch

from draftstates.errors import UserError
from draftstates.shards.layout import Shard

# The distance allowed to the median row, by the coarser of compute and stored dtype. One rounding
# to bfloat16 moves a value by at most 2^-9; some tens of roundings in sequence stay below 16 times
# that. Sums in float32 differ in order only.
TOLERANCES = {"float32": 1e-4, "float16": 2**-8, "bfloat16": 2**-5}
# The right layer must be at least twice as near as either neighbour.
NEIGHBOUR_RATIO = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerParity:
    """Distances of one captured layer from the reference, divided by the row's norm.

    Attributes:
        layer: `r_k`, or `final` for the final state.
        median: median over rows, to the right layer.
        worst: largest over rows, to the right layer.
        neighbours: by layer, the median over rows to the layers before and after.
    """

    layer: str
    median: float
    worst: float
    neighbours: dict[str, float]


class Reference:
    """Plain forward pass of the model on the disk.

    Args:
        folder: the model's folder.
        dtype: the number format to compute in.
        device: where to compute.
        trust_remote_code: load the model with the Python code in its folder.

    Raises:
        UserError: transformers cannot load it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: str = "cpu",
        trust_remote_code: bool = False,
    ) -> None:
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, trust_remote_code=trust_remote_code
            )
        # On files of another kind transformers raises errors of many classes.
        except Exception as error:
            raise UserError(
                f"{folder}: expected a model that transformers can load, found"
                f" {type(error).__name__}: {error}: add --trust-remote-code where the folder holds"
                " the model's own code; else leave parity out for this model"
            ) from error
        self._model, self._device = model.to(device).eval(), device

    @torch.inference_mode()
    def states(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return r_0 … r_N by their names "r_k", and "post_norm", each [n, H] on the CPU.

        Args:
            input_ids: int [n].
        """
        stack = self._model.get_decoder()
        last: list[torch.Tensor] = []
        hook = stack.norm.register_forward_pre_hook(
            lambda module, args: last.append(args[0].clone())
        )
        try:
            outputs = stack(
                input_ids=input_ids[None].long().to(self._device),
                output_hidden_states=True,
                use_cache=False,
            )
        finally:
            hook.remove()
        states = {f"r_{k}": state[0].cpu() for k, state in enumerate(outputs.hidden_states[:-1])}
        return {
            **states,
            f"r_{len(states)}": last[0][0].cpu(),
            "post_norm": outputs.last_hidden_state[0].cpu(),
        }


def named_states(shard: Shard, index: int, *, num_layers: int) -> dict[str, torch.Tensor]:
    """Return a captured sample's states, [n, H] each, by the names that a reference gives them."""
    sample, header = shard.sample(index), shard.header
    states = {f"r_{k}": sample["hidden_states"][:, i] for i, k in enumerate(header.residual_layers)}
    last = "post_norm" if header.metadata["final_norm"] == "post_norm" else f"r_{num_layers}"
    return {**states, last: sample["final_hidden_state"]}


def compare(
    captured: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]
) -> list[LayerParity]:
    """Measure how far each captured state lies from the reference's and from its neighbours.

    Args:
        captured: states by name ("r_k" or "post_norm"), [n, H] each.
        reference: the reference's states, by the same names.
    """
    found = []
    for name, rows in captured.items():
        distances = row_distances(rows, reference[name])
        found.append(
            LayerParity(
                layer=name,
                median=distances.median().item(),
                worst=distances.max().item(),
                neighbours={
                    other: row_distances(rows, reference[other]).median().item()
                    for other in _neighbours(name, reference)
                },
            )
        )
    return found


def row_distances(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return the distance of each row from its counterpart, over the counterpart's norm, [n]."""
    rows, others = rows.float(), others.float()
    return (rows - others).norm(dim=-1) / others.norm(dim=-1)


def _neighbours(name: str, reference: Mapping[str, torch.Tensor]) -> list[str]:
    if name == "post_norm":
        return [f"r_{len(reference) - 2}"]
    k = int(name.removeprefix("r_"))
    return [other for other in (f"r_{k - 1}", f"r_{k + 1}") if other in reference]


def judge(layers: list[LayerParity], *, dtype: str, sample: str) -> None:
    """Refuse a sample whose captured layers differ from the reference.

    Args:
        layers: the distances that `compare` measured.
        dtype: the coarser of compute and stored dtype.
        sample: the sample id.

    Raises:
        UserError: names sample and layer, the distance found and the one expected.
    """
    limit = TOLERANCES[dtype]
    for found in layers:
        if not found.median <= limit:
            raise UserError(
                f"sample {sample}, {found.layer}: median row differs by {found.median:.2g} from"
                f" Hugging Face, expected ≤ {limit:.2g}"
            )
        for other, distance in found.neighbours.items():
            if not found.median <= NEIGHBOUR_RATIO * distance:
                raise UserError(
                    f"sample {sample}, {found.layer}: {found.median:.2g} from Hugging Face's,"
                    f" {distance:.2g} from its {other}"
                )

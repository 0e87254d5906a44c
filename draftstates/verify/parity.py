"""Promise 5: captured rows against a plain Hugging Face forward pass, layer by layer.

The residual stream has a few huge components, so that over a whole matrix neighbouring layers differ by 1 % only. Rows are
judged one by one, by the distance over the row's norm, and against how far the neighbouring layers lie.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch

from draftstates.errors import UserError
from draftstates.shards import Shard

# Row distance allowed to the median row, by the coarser of compute and stored dtype. One rounding to bfloat16 moves a value by
# at most 2^-9; errors of some tens of roundings in sequence stay below 16 times that. float32 sums differ in order only.
TOLERANCES = {"float32": 1e-4, "float16": 2**-8, "bfloat16": 2**-5}
NEIGHBOUR_RATIO = 0.5  # the right layer must be at least twice as near as either neighbour


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerParity:
    """Distances of one captured layer from the reference, over the row's norm.

    Attributes:
        layer: `r_k`, or `final` for the final state.
        median, worst: over rows, to the right layer.
        neighbours: median over rows to the layers before and after, where there are such.
    """

    layer: str
    median: float
    worst: float
    neighbours: dict[str, float]


class Reference:
    """A plain forward pass of the model on the disk.

    Raises:
        UserError: transformers cannot load it.
    """

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: str = "cpu", trust_remote_code: bool = False) -> None:
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=trust_remote_code)
        except Exception as error:  # whatever it meets in files of another kind
            raise UserError(f"{folder}: expected a model that transformers can load: {type(error).__name__}: {error}") from error
        self._model, self._device = model.to(device).eval(), device

    @torch.inference_mode()
    def states(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Every r_0 … r_N under "r_k", and "post_norm", each [n, H] on the CPU; `input_ids` int [n]."""
        stack = self._model.get_decoder()
        last: list[torch.Tensor] = []
        hook = stack.norm.register_forward_pre_hook(lambda module, args: last.append(args[0].clone()))
        try:
            outputs = stack(input_ids=input_ids[None].long().to(self._device), output_hidden_states=True, use_cache=False)
        finally:
            hook.remove()
        states = {f"r_{k}": state[0].cpu() for k, state in enumerate(outputs.hidden_states[:-1])}
        return {**states, f"r_{len(states)}": last[0][0].cpu(), "post_norm": outputs.last_hidden_state[0].cpu()}


def named_states(shard: Shard, index: int, *, num_layers: int) -> dict[str, torch.Tensor]:
    """A captured sample's states, [n, H] each, by the names that a reference gives them."""
    sample, header = shard.sample(index), shard.header
    states = {f"r_{k}": sample["hidden_states"][:, i] for i, k in enumerate(header.residual_layers)}
    last = "post_norm" if header.metadata["final_norm"] == "post_norm" else f"r_{num_layers}"
    return {**states, last: sample["final_hidden_state"]}


def compare(captured: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> list[LayerParity]:
    """Distances of each captured state, by name ("r_k" or "post_norm") [n, H], from the reference of that name and its neighbours."""
    found = []
    for name, rows in captured.items():
        distances = row_distances(rows, reference[name])
        found.append(
            LayerParity(
                layer=name,
                median=distances.median().item(),
                worst=distances.max().item(),
                neighbours={other: row_distances(rows, reference[other]).median().item() for other in _neighbours(name, reference)},
            )
        )
    return found


def row_distances(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """[n]: distance of each row from its counterpart, over the counterpart's norm."""
    rows, others = rows.float(), others.float()
    return (rows - others).norm(dim=-1) / others.norm(dim=-1)


def _neighbours(name: str, reference: Mapping[str, torch.Tensor]) -> list[str]:
    if name == "post_norm":
        return [f"r_{len(reference) - 2}"]
    k = int(name.removeprefix("r_"))
    return [other for other in (f"r_{k - 1}", f"r_{k + 1}") if other in reference]


def judge(layers: list[LayerParity], *, dtype: str, sample: str) -> None:
    """Refuse a sample whose captured layers are not those of the reference.

    Raises:
        UserError: names sample and layer, the distance found and the one expected.
    """
    limit = TOLERANCES[dtype]
    for found in layers:
        if not found.median <= limit:
            raise UserError(
                f"sample {sample}, {found.layer}: median row differs by {found.median:.2g} from Hugging Face, expected ≤ {limit:.2g}"
            )
        for other, distance in found.neighbours.items():
            if not found.median <= NEIGHBOUR_RATIO * distance:
                raise UserError(f"sample {sample}, {found.layer}: {found.median:.2g} from Hugging Face's, {distance:.2g} from its {other}")

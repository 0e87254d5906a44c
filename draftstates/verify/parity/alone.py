"""Each decoder layer alone: the checkpoint's layer, applied to the captured rows before it.

Over many layers roundings add up, and hide a small fault of one layer. A layer that is given the
captured r_k must return the captured r_{k+1} within the roundings of one layer. How large these are
is measured: the same layer computes the same rows once more in the server's number format.

Rows of a prompt's beginning depend on no later ones, so a longer prompt is cut there.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map

from draftstates.errors import UserError
from draftstates.model.lengths import SHORT

# torch has no class for an error of memory on the CPU.
CPU_ALLOCATOR = "DefaultCPUAllocator"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alone:
    """What one layer gives for captured rows.

    Attributes:
        right: its result in float32, [m, H].
        control: its result in the server's number format, [m, H].
    """

    right: torch.Tensor
    control: torch.Tensor


class LayersAlone:
    """The layers' results for captured rows, computed while a layer's weights are in memory.

    Args:
        states: captured rows by name, [n, H] each; of the prompt's first positions.
        compute: the server's number format.

    Attributes:
        found: by the name of a layer's result, "r_k".
        problem: why no more layers could be computed so; None where all could.
    """

    def __init__(self, states: Mapping[str, torch.Tensor], *, compute: torch.dtype) -> None:
        self.found: dict[str, Alone] = {}
        self.problem: str | None = None
        self._states, self._compute = states, compute

    @classmethod
    def of(
        cls,
        states: Mapping[str, torch.Tensor],
        positions: torch.Tensor,
        *,
        compute: torch.dtype,
    ) -> "LayersAlone":
        """Return the layers for the rows of a prompt's beginning."""
        whole = positions == torch.arange(len(positions))
        count = min(SHORT, int(whole.long().cumprod(0).sum()))
        return cls({name: rows[:count] for name, rows in states.items()}, compute=compute)

    def add(self, k: int, layer: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        """Compute layer k, whose weights are in memory, for the captured r_k.

        Args:
            args, kwargs: what the model has called the layer with, for its whole prompt.
        """
        rows = self._states.get(f"r_{k}")
        if self.problem or rows is None or not len(rows):
            return
        try:
            args, kwargs = _with_rows(rows.float(), args, kwargs)
            right = _result(layer, args, kwargs)
            with _parameters_in(layer, self._compute):
                control = _result(layer, *tree_map(self._rounded, (args, kwargs)))
        except (UserError, OSError, MemoryError, torch.OutOfMemoryError):
            raise
        # A family's code may know its own calls alone, or one number format.
        except Exception as error:
            if isinstance(error, RuntimeError) and CPU_ALLOCATOR in str(error):
                raise
            self.problem = f"r_{k}: {type(error).__name__}: {error}".split("\n")[0]
            return
        self.found[f"r_{k + 1}"] = Alone(right=right, control=control)

    def _rounded(self, value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self._compute) if is_float else value


def _with_rows(rows: torch.Tensor, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Return a call's arguments for other rows, at the first positions of its prompt."""
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    if hidden.ndim != 3:
        raise ValueError(f"a layer's input has the shape {tuple(hidden.shape)}")
    tokens, count = hidden.shape[1], len(rows)

    def cut(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or count == tokens:
            return value
        for axis, size in enumerate(value.shape):
            if size == tokens:
                value = value.narrow(axis, 0, count)
        return value

    # Dictionaries are rebuilt, so that a layer that writes into one does not change the model's.
    args, kwargs = tree_map(cut, (args, kwargs))
    given = rows[None].to(hidden.device, hidden.dtype)
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": given}
    return (given, *args[1:]), kwargs


def _result(layer: torch.nn.Module, args: tuple, kwargs: dict) -> torch.Tensor:
    # `forward` calls none of the hooks that read and free the weights.
    output = layer.forward(*args, **kwargs)
    return (output[0] if isinstance(output, tuple) else output)[0].float().cpu().clone()


@contextmanager
def _parameters_in(layer: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Round a layer's parameters for a while."""
    kept = [(parameter, parameter.data) for parameter in layer.parameters()]
    try:
        for parameter, data in kept:
            parameter.data = data.to(dtype)
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data

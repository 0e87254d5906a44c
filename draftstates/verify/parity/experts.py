"""Experts that a prompt reaches: what no token is given to was not compared.

transformers gives every layer's experts the chosen ones as `top_k_index`. A family that does not is
left out.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

_CHOSEN = "top_k_index"
_SHOWN = 16


class ReachedExperts:
    """The experts that a forward pass reaches, by the name of the layer's result, "r_k"."""

    def __init__(self) -> None:
        self._reached: dict[str, torch.Tensor] = {}

    @contextmanager
    def watching(self, layers: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Note what the layers' experts are given."""
        with ExitStack() as hooks:
            for k, layer in enumerate(layers):
                for module in layer.modules():
                    names = list(inspect.signature(module.forward).parameters)
                    if _CHOSEN in names and isinstance(getattr(module, "num_experts", None), int):
                        hooks.callback(self._watch(module, names, f"r_{k + 1}").remove)
            yield

    def _watch(
        self, module: torch.nn.Module, names: Sequence[str], layer: str
    ) -> torch.utils.hooks.RemovableHandle:
        def look(experts: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            chosen = {**dict(zip(names, args, strict=False)), **kwargs}[_CHOSEN].cpu()
            reached = self._reached.setdefault(layer, torch.zeros(experts.num_experts).bool())
            # Some families name an expert that does not exist for a token without one.
            reached[chosen[(chosen >= 0) & (chosen < len(reached))]] = True

        return module.register_forward_pre_hook(look, with_kwargs=True)

    def unreached(self) -> dict[str, str]:
        """Return what no token was given to, by layer, such as `2 of 64: 7, 31`."""
        found = {}
        for layer, reached in self._reached.items():
            left = torch.nonzero(~reached).flatten().tolist()
            if left:
                more = ", …" if len(left) > _SHOWN else ""
                shown = ", ".join(map(str, left[:_SHOWN])) + more
                found[layer] = f"{len(left)} of {len(reached)}: {shown}"
        return found

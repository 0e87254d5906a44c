"""A decoder as SGLang writes it, without SGLang: layers of several conventions."""

from types import SimpleNamespace
from typing import Any

import torch

from draftstates.extract.protocol import SELF_TEST, Destination

LAYERS, HIDDEN, TOKENS = 4, 8, 5
# A server writes shards under construction alone.
FILE = "capture/shards/.building/shard.safetensors"


class RMSNorm(torch.nn.Module):
    """A norm that adds its residual, in place, as SGLang's fused kernels do."""

    def __init__(self, adds: bool = True) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(HIDDEN) + 0.5)
        self.adds = adds

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return self._norm(x)
        if not self.adds:
            return self._norm(x), residual
        residual += x
        return self._norm(residual), residual

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Layer(torch.nn.Module):
    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.norm, self.mix = RMSNorm(adds), torch.nn.Linear(HIDDEN, HIDDEN, bias=False)


class Pair(Layer):
    def forward(self, positions: Any, hidden_states: Any, forward_batch: Any, residual: Any) -> Any:
        if residual is None:
            residual = hidden_states.clone()
            hidden_states = self.norm(hidden_states)
        else:
            hidden_states, residual = self.norm(hidden_states, residual)
        return self.mix(hidden_states), residual


class Complete(Layer):
    """A layer that hands on the complete state, and a residual that is no longer true (Cohere)."""

    def forward(self, positions: Any, hidden_states: Any, forward_batch: Any, residual: Any) -> Any:
        residual = hidden_states
        return hidden_states + self.mix(self.norm._norm(hidden_states)), residual


class Model(torch.nn.Module):
    """A decoder as SGLang's model files write it."""

    def __init__(self, layer: type, *, adds: bool = True, alone: bool = False) -> None:
        super().__init__()
        self.alone = alone
        self.embed = torch.nn.Embedding(50, HIDDEN)
        self.vision_tower = torch.nn.ModuleList(Layer(adds) for _ in range(LAYERS))
        self.blocks = torch.nn.ModuleList(layer(adds) for _ in range(LAYERS))
        self.last_norm = RMSNorm(adds)
        self.layers_to_capture: list[int] = []
        self.off = 0

    def set_eagle3_layers_to_capture(self, layer_ids: list[int]) -> None:
        self.layers_to_capture = [k + 1 + self.off for k in layer_ids]

    def forward(self, ids: torch.Tensor, positions: Any, forward_batch: Any) -> Any:
        hidden, residual, aux = self.embed(ids), None, []
        for k, layer in enumerate(self.blocks):
            if k in self.layers_to_capture:
                aux.append(hidden + residual)
            # Nemotron-H calls `forward` itself.
            hidden, residual = layer.forward(positions, hidden, forward_batch, residual)
        normed = self.last_norm(hidden) if self.alone else self.last_norm(hidden, residual)[0]
        return (normed, aux) if aux else normed


def batch(kind: str = SELF_TEST, *, extend: bool = True, ours: bool = True) -> SimpleNamespace:
    """Return a forward batch of one request."""
    rid = Destination(file=FILE, first_row=0, rows=TOKENS, ids_hash="i", attempt="1", kind=kind).rid
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: extend),
        rids=[rid if ours else "of-others"],
        extend_prefix_lens_cpu=[0],
        extend_seq_lens_cpu=[TOKENS],
        input_ids=torch.arange(TOKENS),
    )


def expected(model: Model, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return r_0 … r_N."""
    states = [model.embed(ids)]
    for layer in model.blocks:
        states.append(states[-1] + layer.mix(layer.norm._norm(states[-1])))
    return states

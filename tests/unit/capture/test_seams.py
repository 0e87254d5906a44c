"""What a layer's first step completes is read after it, in both of SGLang's forms."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy_model import HIDDEN, LAYERS, TOKENS, Layer, RMSNorm, batch

from draftstates.capture.taps import Taps
from draftstates.extract.protocol import PLAIN


class Stage:
    """A boundary of SGLang 0.5.23: what arrives owes a sum, and `prepare` writes the residual."""

    def __init__(self, kind: str, norm: RMSNorm) -> None:
        self.kind, self.norm = SimpleNamespace(name=kind), norm

    def prepare(self, hidden: Any, forward_batch: Any, capture_gathered: Any = None) -> Any:
        stream = forward_batch.residual_stream
        owed = hidden * 2
        stream.residual = owed if stream.residual is None else stream.residual + owed
        if capture_gathered is not None:
            capture_gathered.capture(stream.residual, owned=False)
        return self.norm._norm(stream.residual)


class Staged(Layer):
    def __init__(self, kind: str) -> None:
        super().__init__(True)
        self.boundary = Stage(kind, self.norm)
        self.theirs: Any = None

    def forward(self, hidden_states: Any, forward_batch: Any) -> Any:
        options = {} if self.theirs is None else {"capture_gathered": self.theirs}
        prepared = self.boundary.prepare(hidden_states, forward_batch, **options)
        return self.mix(prepared)


class Communicator:
    """The same step in SGLang 0.5.17; rows lie scattered until they are gathered."""

    _context = "context"

    def __init__(self, norm: RMSNorm) -> None:
        self.norm = norm

    def prepare_attn(self, hidden_states: Any, residual: Any, forward_batch: Any) -> Any:
        owed = hidden_states * 2
        residual = owed if residual is None else residual + owed
        return self.norm._norm(residual), residual

    def prepare_mlp(self, hidden_states: Any, residual: Any, forward_batch: Any) -> Any:
        return self.prepare_attn(hidden_states, residual, forward_batch)

    def _communicate_simple_fn(
        self, *, hidden_states: Any, forward_batch: Any, context: Any
    ) -> Any:
        assert context == self._context
        return hidden_states.clone()


class Communicated(Layer):
    def __init__(self, step: str) -> None:
        super().__init__(True)
        self.layer_communicator, self.step = Communicator(self.norm), step

    def forward(self, hidden_states: Any, forward_batch: Any, residual: Any) -> Any:
        prepare = getattr(self.layer_communicator, self.step)
        hidden_states, residual = prepare(hidden_states, residual, forward_batch)
        return self.mix(hidden_states), residual


class Model(torch.nn.Module):
    def __init__(self, layers: list[Layer], *, staged: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, HIDDEN)
        self.layers, self.norm, self.staged = torch.nn.ModuleList(layers), RMSNorm(), staged

    def forward(self, ids: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        hidden, residual = self.embed(ids), None
        if self.staged:
            forward_batch.residual_stream = SimpleNamespace(residual=None)
        for layer in self.layers:
            if self.staged:
                hidden = layer(hidden, forward_batch)
            else:
                hidden, residual = layer(hidden, forward_batch, residual)
        residual = forward_batch.residual_stream.residual if self.staged else residual
        return self.norm(2 * hidden, residual)[0]


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the two forms where SGLang has them."""
    for method in ("prepare", "prepare_attn", "prepare_mlp"):
        owner = Stage if method == "prepare" else Communicator
        monkeypatch.setattr(owner, method, getattr(owner, method))
    boundary, communicator = (
        "sglang.srt.layers.layer_boundary.stage",
        "sglang.srt.layers.communicator",
    )
    monkeypatch.setitem(sys.modules, boundary, SimpleNamespace(StageBoundary=Stage))
    monkeypatch.setitem(sys.modules, communicator, SimpleNamespace(LayerCommunicator=Communicator))


def _expected(model: Model) -> list[torch.Tensor]:
    hidden, states = model.embed(torch.arange(TOKENS)), []
    residual = torch.zeros_like(hidden)
    for layer in model.layers:
        residual = residual + 2 * hidden
        states.append(residual)
        hidden = layer.mix(layer.norm._norm(residual))
    return [*states, residual + 2 * hidden]


def _check(model: Model) -> None:
    states = _expected(model)
    taps = Taps(
        model,
        layers=(0, 2, 4),
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        dtype=torch.float32,
        final_norm="post_norm",
    )
    for kind in ({}, {"kind": PLAIN}):
        model(torch.arange(TOKENS), batch(**kind))
        reading = taps.take(TOKENS)
        assert reading.error == ""
        for k in (0, 2, 4):
            torch.testing.assert_close(reading.state(k), states[k])
        for k, state in reading.every.items():
            torch.testing.assert_close(state, states[k])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["ATTENTION", "FFN"])
def test_a_stage_boundary_is_read_after_it_has_prepared(kind: str) -> None:
    _check(Model([Staged(kind) for _ in range(LAYERS)], staged=True))


@torch.no_grad()
def test_the_models_own_collector_still_gets_the_state() -> None:
    model = Model([Staged("ATTENTION") for _ in range(LAYERS)], staged=True)
    seen: list[torch.Tensor] = []
    model.layers[2].theirs = SimpleNamespace(
        capture=lambda value, *, owned: seen.append(value.clone())
    )
    _check(model)
    assert len(seen) == 2
    torch.testing.assert_close(seen[0], _expected(model)[2])


@torch.no_grad()
@pytest.mark.parametrize("step", ["prepare_attn", "prepare_mlp"])
def test_a_communicator_is_read_after_it_has_prepared(step: str) -> None:
    _check(Model([Communicated(step) for _ in range(LAYERS)], staged=False))

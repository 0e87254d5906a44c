"""Each convention of a decoder layer's input gives the same r_k; what no tap reaches is said."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy_model import (
    HIDDEN,
    LAYERS,
    TOKENS,
    Complete,
    Layer,
    Model,
    Pair,
    RMSNorm,
    batch,
    expected,
)

from draftstates.capture import taps as module
from draftstates.capture.own_capture import OwnCapture
from draftstates.capture.stack import adds_its_residual, find_stack
from draftstates.capture.taps import Taps
from draftstates.extract.protocol import PLAIN


def tap(model: Model, layers: tuple[int, ...] = (0, 2, 4), **changes: Any) -> Taps:
    options = {
        "layers": layers,
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "dtype": torch.float32,
        "final_norm": "post_norm",
    }
    return Taps(model, **{**options, **changes})


KINDS = {
    "pair": lambda: Model(Pair),
    "complete, stale residual given to a norm that does not add it": lambda: Model(
        Complete, adds=False
    ),
    "complete, norm of one argument": lambda: Model(Complete, alone=True),
}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_every_convention_gives_r_k(kind: str) -> None:
    torch.manual_seed(0)
    model = KINDS[kind]()
    ids = torch.arange(TOKENS)
    states, taps = expected(model, ids), tap(model)
    # The first pass finds the convention, the second one knows it.
    for _ in range(2):
        final = model(ids, None, batch())
        reading = taps.take(TOKENS)
        assert reading.error == ""
        for k in (0, 2, 4):
            torch.testing.assert_close(reading.state(k), states[k])
        assert sorted(reading.every) == list(range(LAYERS + 1))
        for k, state in reading.every.items():
            torch.testing.assert_close(state, states[k])
        torch.testing.assert_close(taps.normed(reading.every[LAYERS]), final)


@torch.no_grad()
def test_only_passes_of_captured_requests_are_read_and_each_only_once() -> None:
    model = Model(Pair)
    taps = tap(model)
    ids = torch.arange(TOKENS)
    model(ids, None, batch(PLAIN))
    reading = taps.take(TOKENS)
    assert reading.error == ""
    assert not reading.every
    assert reading.rows is not None
    for other in (batch(extend=False), batch(ours=False)):
        model(ids, None, other)
        assert taps.take(TOKENS).rows is None
    assert taps.take(TOKENS).rows is None


@torch.no_grad()
def test_rows_are_in_memory_of_our_own_in_the_stored_dtype() -> None:
    model = Model(Pair)
    taps = tap(model, dtype=torch.bfloat16)
    ids = torch.arange(TOKENS)
    states = expected(model, ids)
    model(ids, None, batch(PLAIN))
    rows = taps.take(TOKENS).rows
    assert rows.dtype == torch.bfloat16
    assert rows.is_contiguous()
    assert tuple(rows.shape) == (TOKENS, 3, HIDDEN)
    torch.testing.assert_close(rows[:, 1], states[2].bfloat16())


@torch.no_grad()
def test_r_n_for_the_final_state_alone_is_read() -> None:
    model = Model(Pair)
    taps = tap(model, (1,), final_norm="pre_norm")
    ids = torch.arange(TOKENS)
    model(ids, None, batch(PLAIN))
    torch.testing.assert_close(taps.take(TOKENS).state(LAYERS), expected(model, ids)[LAYERS])


@torch.no_grad()
def test_a_layer_that_is_not_entered_or_sees_other_rows_is_named() -> None:
    model = Model(Pair)
    taps = tap(model)
    ids = torch.arange(TOKENS)
    blocks = model.blocks
    model.blocks = torch.nn.ModuleList([blocks[0], blocks[1], blocks[3]])
    model(ids, None, batch(PLAIN))
    assert "r_2: expected 5 rows on entry to the layer, found none" in taps.take(TOKENS).error
    model.blocks = blocks
    model(ids, None, batch(PLAIN))
    model.blocks[2](None, torch.randn(TOKENS, HIDDEN), batch(PLAIN), None)
    assert "r_2: layer 2 ran twice in one pass" in taps.take(TOKENS).error
    model(ids, None, batch(PLAIN))
    assert "r_0: expected 7 rows on entry to the layer, found 5" in taps.take(TOKENS + 2).error


@torch.no_grad()
def test_several_streams_and_owed_norms_are_refused_and_an_exception_spoils_the_reading_alone() -> (
    None
):
    model = Model(Pair)
    taps = tap(model)
    taps._begin((batch(PLAIN),), {})
    model.blocks[0](None, torch.randn(TOKENS, 4, HIDDEN), None, None)
    assert "r_0: expected states of shape [tokens, 8], found (5, 4, 8)" in taps.take(TOKENS).error
    broken = SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: 1 / 0))
    model(torch.arange(TOKENS), None, broken)
    assert "ZeroDivisionError" in taps.take(TOKENS).error


@torch.no_grad()
def test_a_stream_is_read_after_the_layers_own_first_step() -> None:
    """As in SGLang 0.5.23: what enters the layer may still owe a sum."""
    model = Model(Complete, alone=True)
    taps = tap(model)
    ids = torch.arange(TOKENS)
    states = expected(model, ids)
    plain = batch(PLAIN)
    plain.residual_stream = SimpleNamespace()
    calls = [layer.forward for layer in model.blocks]

    def enter(k: int) -> Any:
        def forward(positions: Any, hidden: Any, forward_batch: Any, residual: Any) -> Any:
            result = calls[k](positions, hidden, forward_batch, residual)
            if k != 2:
                # Layer 2 computes nothing: its r_k is that of the next step.
                taps.completed(states[k])
            return result

        return forward

    for k, layer in enumerate(model.blocks):
        layer.forward = enter(k)
    model(ids, None, plain)
    reading = taps.take(TOKENS)
    assert reading.error == ""
    torch.testing.assert_close(reading.state(0), states[0])
    torch.testing.assert_close(reading.state(2), states[3])


def test_the_stack_is_found_beside_towers_and_another_number_of_layers_is_refused() -> None:
    model = Model(Pair)
    stack = find_stack(model, num_layers=LAYERS, hidden_size=HIDDEN)
    assert stack.layers == list(model.blocks)
    assert list(stack.norms) == ["last_norm"]
    with pytest.raises(SystemExit, match="expected one list of 7 decoder layers, found none"):
        find_stack(model, num_layers=7, hidden_size=HIDDEN)
    with pytest.raises(SystemExit, match="expected a final norm beside blocks, found no norm"):
        find_stack(model, num_layers=LAYERS, hidden_size=HIDDEN + 1)
    model.encoder = torch.nn.ModuleList(Layer(True) for _ in range(LAYERS))
    assert find_stack(model, num_layers=LAYERS, hidden_size=HIDDEN).layers == list(model.blocks)
    model.more = torch.nn.ModuleList(Pair(True) for _ in range(LAYERS))
    with pytest.raises(SystemExit, match="found blocks, more"):
        find_stack(model, num_layers=LAYERS, hidden_size=HIDDEN)


def test_whether_a_norm_adds_its_residual_is_tried() -> None:
    assert adds_its_residual(RMSNorm())
    assert not adds_its_residual(RMSNorm(adds=False))
    assert not adds_its_residual(torch.nn.LayerNorm(HIDDEN))


@torch.no_grad()
def test_sglangs_own_capture_is_on_for_the_self_test_alone() -> None:
    model = Model(Pair)
    taps, own = tap(model), OwnCapture(model, [1, 3])
    ids = torch.arange(TOKENS)
    states = expected(model, ids)
    assert own.reason == ""
    assert model.layers_to_capture == []
    assert isinstance(model(ids, None, batch(PLAIN)), torch.Tensor)
    taps.take(TOKENS)
    _, aux = model(ids, None, batch())
    for k, state in own.states(aux, width=HIDDEN).items():
        torch.testing.assert_close(state, states[k])
    packed = own.states(torch.cat(aux, dim=-1), width=HIDDEN)
    torch.testing.assert_close(packed[3], states[3])
    assert own.states(aux[:1], width=HIDDEN) == {}
    assert model.layers_to_capture == []


def test_a_model_without_a_public_setter_has_no_second_reading() -> None:
    assert "Linear has no capture of its own" in OwnCapture(torch.nn.Linear(2, 2), [1]).reason
    assert "reaches none" in OwnCapture(Model(Pair), []).reason


def test_the_kinds_of_requests_are_told_by_their_ids() -> None:
    assert module.is_self_test(batch())
    assert not module.is_self_test(batch(PLAIN))
    assert module.is_ours(batch(PLAIN))
    assert not module.is_ours(batch(ours=False))

"""The step of SGLang's layers that completes their input: sum over the ranks, residual, first norm.

SGLang 0.5.23 calls it `StageBoundary.prepare`, 0.5.17 `LayerCommunicator.prepare_attn`. After it,
the residual is r_k on every rank, in the rows of the batch.
"""

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from draftstates.capture.taps import Taps

_BOUNDARY = ("sglang.srt.layers.layer_boundary.stage", "StageBoundary")
_COMMUNICATOR = ("sglang.srt.layers.communicator", "LayerCommunicator")


def prepares(layer: torch.nn.Module) -> bool:
    """Return whether a layer of SGLang 0.5.17 completes its input by a `LayerCommunicator`.

    The layers of 0.5.23 that do so are told by the batch's residual stream.
    """
    kind = find(_COMMUNICATOR)
    return kind is not None and any(isinstance(value, kind) for value in vars(layer).values())


def after_preparing(taps: "Taps") -> None:
    """Have the taps read what the layers' first step completes."""
    if boundary := find(_BOUNDARY):
        _wrap(boundary, "prepare", functools.partial(_prepare, taps))
    if communicator := find(_COMMUNICATOR):
        _wrap(communicator, "prepare_attn", functools.partial(_prepare_attention, taps))
        _wrap(communicator, "prepare_mlp", functools.partial(_prepare_mlp, taps))


def find(place: tuple[str, str]) -> Any | None:
    """Return what SGLang has under (module, name); None where no loaded module has it."""
    return getattr(sys.modules.get(place[0]), place[1], None)


def _wrap(kind: Any, name: str, around: Any) -> None:
    original = getattr(kind, name)

    @functools.wraps(original)
    def method(self: object, *args: object, **kwargs: object) -> object:
        return around(original, self, *args, **kwargs)

    setattr(kind, name, method)


class _Collector:
    """A collector as `prepare(capture_gathered=…)` takes it; hands on to the model's own."""

    def __init__(self, taps: "Taps", theirs: Any | None) -> None:
        self._taps, self._theirs = taps, theirs

    def capture(self, value: torch.Tensor, *, owned: bool = False) -> None:
        self._taps.completed(value)
        if self._theirs is not None:
            # The taps have copied it.
            self._theirs.capture(value, owned=owned)


def _prepare(
    taps: "Taps", original: Any, boundary: Any, hidden: object, batch: Any, **options: Any
) -> object:
    if not taps.awaits:
        return original(boundary, hidden, batch, **options)
    if boundary.kind.name == "ATTENTION":
        # SGLang gathers the residual to the rows that attention computes, where it is not there.
        theirs = options.pop("capture_gathered", None)
        return original(
            boundary, hidden, batch, capture_gathered=_Collector(taps, theirs), **options
        )
    prepared = original(boundary, hidden, batch, **options)
    taps.completed(batch.residual_stream.residual)
    return prepared


def _prepare_attention(
    taps: "Taps",
    original: Any,
    communicator: Any,
    hidden_states: torch.Tensor,
    residual: torch.Tensor | None,
    forward_batch: object,
    *args: object,
    **options: object,
) -> object:
    hidden, residual = original(
        communicator, hidden_states, residual, forward_batch, *args, **options
    )
    if taps.awaits:
        # As SGLang's own capture gathers it.
        taps.completed(
            communicator._communicate_simple_fn(
                hidden_states=residual,
                forward_batch=forward_batch,
                context=communicator._context,
            )
        )
    return hidden, residual


def _prepare_mlp(
    taps: "Taps", original: Any, communicator: Any, *args: object, **options: object
) -> object:
    hidden, residual = original(communicator, *args, **options)
    if taps.awaits:
        taps.completed(residual)
    return hidden, residual

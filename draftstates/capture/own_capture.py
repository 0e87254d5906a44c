"""SGLang's own capture of aux hidden states: a second reading of r_k, for the self-test alone.

The model's public setter marks the layers. What it changes in the model is switched on for passes
with a request of the self-test, and off again, so that other passes do not copy states twice.
"""

import functools
from typing import Any

import torch

from draftstates.capture.taps import is_self_test

# Both take SGLang's layer ids, k - 1. The first counts in the same way in every model file.
_SETTERS = ("set_dflash_layers_to_capture", "set_eagle3_layers_to_capture")
_MISSING = object()


class OwnCapture:
    """SGLang's own capture of r_k.

    Args:
        model: the loaded model, the outermost module.
        layers: the k to capture, each within 0 < k < N.

    Attributes:
        reason: why there is no second reading; empty if there is one.
    """

    def __init__(self, model: torch.nn.Module, layers: list[int]) -> None:
        self.layers = layers
        self.reason = ""
        self._changes: list[tuple[torch.nn.Module, str, Any, Any]] = []
        setter = next((name for name in _SETTERS if hasattr(model, name)), None)
        if setter is None:
            self.reason = f"{type(model).__name__} has no capture of its own"
        elif not layers:
            self.reason = "it reaches none of the captured layers"
        else:
            self._mark(model, setter)

    def _mark(self, model: torch.nn.Module, setter: str) -> None:
        before = _attributes(model)
        try:
            getattr(model, setter)([k - 1 for k in self.layers])
        # The taps do not need it: any failure leaves a model without a second reading.
        except Exception as error:
            self.reason = f"{setter}: {type(error).__name__}: {error}"
        for (module, name), value in _attributes(model).items():
            earlier = before.get((module, name), _MISSING)
            if _is_mark(value) and (type(earlier) is not type(value) or earlier != value):
                self._changes.append((module, name, earlier, value))
        self._switch(on=False)
        if self.reason:
            return
        if not self._changes:
            self.reason = f"{setter} changes nothing"
            return
        call = model.forward

        @functools.wraps(call)
        def forward(*args: object, **kwargs: object) -> object:
            batch = next((v for v in (*args, *kwargs.values()) if hasattr(v, "forward_mode")), None)
            if batch is None or not (batch.forward_mode.is_extend() and is_self_test(batch)):
                return call(*args, **kwargs)
            self._switch(on=True)
            try:
                return call(*args, **kwargs)
            finally:
                self._switch(on=False)

        model.forward = forward

    def _switch(self, *, on: bool) -> None:
        for module, name, earlier, marked in self._changes:
            if on or earlier is not _MISSING:
                setattr(module, name, marked if on else earlier)
            else:
                delattr(module, name)

    def states(self, captured: object, *, width: int) -> dict[int, torch.Tensor]:
        """Return r_k by k, each [tokens, H], from what the model handed to its logits.

        Args:
            captured: `aux_hidden_states`: a list, or one tensor [tokens, K * H].
            width: H.

        Returns:
            nothing where the model handed over another number of states.
        """
        if isinstance(captured, torch.Tensor):
            captured = captured.split(width, dim=-1)
        states = list(captured or [])
        if len(states) != len(self.layers):
            return {}
        return dict(zip(self.layers, states, strict=True))


def _attributes(model: torch.nn.Module) -> dict[tuple[torch.nn.Module, str], Any]:
    """Return all attributes of all modules; lists are copied, so that later changes show."""
    return {
        (module, name): list(value) if isinstance(value, list) else value
        for module in model.modules()
        for name, value in vars(module).items()
    }


def _is_mark(value: object) -> bool:
    """Return whether a setter can mark layers by such a value: a truth value, numbers."""
    if isinstance(value, (list, tuple, set)):
        return all(isinstance(item, int) for item in value)
    return value is None or isinstance(value, int)

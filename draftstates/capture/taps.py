"""Taps: the places in the model where each r_k is read.

r_k for 0 < k < N comes from SGLang's own capture (`layers_to_capture = [k]`). SGLang's capture does
not reach r_0 and r_N: hooks read them on entry to layer 0 and to the final norm. The same entry
hooks, on every captured layer, give the self-test a second reading that does not pass through
SGLang's capture.
"""

import dataclasses

import torch

from draftstates.extract.protocol import SELF_TEST, VERSION
from draftstates.model import family

_SELF_TEST_PREFIX = f"{VERSION}|{SELF_TEST}|"


def text_model(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return the causal language model inside `model` and its stack of decoder layers.

    The language model is `model` itself, or the one that a multimodal wrapper holds.

    Raises:
        SystemExit: the model has no decoder layers with a final norm.
    """
    for causal in (model, getattr(model, family.LANGUAGE_MODEL, None)):
        stack = getattr(causal, "model", None)
        if stack is not None and hasattr(stack, "layers") and hasattr(stack, "norm"):
            return causal, stack
    raise SystemExit(
        f"draftstates: no decoder layers with a final norm found in {type(model).__name__}"
    )


@dataclasses.dataclass
class Taps:
    """States that the hooks have read in the current forward pass.

    Attributes:
        num_layers: N, the number of decoder layers.
        read: r_k by k, each [tokens, H].
    """

    num_layers: int
    read: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)

    def take(self) -> dict[int, torch.Tensor]:
        """Return the states read so far and forget them."""
        taken, self.read = self.read, {}
        return taken


def install(model: torch.nn.Module, *, layers: tuple[int, ...], final_norm: str) -> Taps:
    """Have the model hand over r_k for each k in `layers`, and r_N for `final_norm: pre_norm`.

    Raises:
        SystemExit: a layer is out of range, or the model cannot hand over its residual stream.
    """
    causal, stack = text_model(model)
    count = len(stack.layers)
    if layers[-1] > count:
        raise SystemExit(
            f"draftstates: residual_layers {list(layers)}, but {type(model).__name__} has {count}"
            " layers"
        )
    inner = [k for k in layers if 0 < k < count]
    if inner:
        _ask_sglang(causal, stack, inner)
    taps = Taps(num_layers=count)
    for k in sorted({*layers} - {count}):
        stack.layers[k].register_forward_pre_hook(
            _entry_hook(taps, k, always=k == 0), with_kwargs=True
        )
    always = final_norm == "pre_norm" or count in layers
    stack.norm.register_forward_pre_hook(_norm_hook(taps, count, always=always), with_kwargs=True)
    return taps


def _ask_sglang(causal: torch.nn.Module, stack: torch.nn.Module, layers: list[int]) -> None:
    if not hasattr(causal, "capture_aux_hidden_states"):
        raise SystemExit(
            f"draftstates: {type(causal).__name__} has no capture_aux_hidden_states: its residual"
            " stream cannot be captured"
        )
    causal.capture_aux_hidden_states = True
    for name in family.LAYER_SETTERS:
        if hasattr(stack, name):
            getattr(stack, name)(layers)
            return
    if not hasattr(stack, "layers_to_capture"):
        raise SystemExit(f"draftstates: {type(stack).__name__} has no layers_to_capture")
    stack.layers_to_capture = layers


def _entry_hook(taps: Taps, k: int, *, always: bool):
    def hook(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        batch = next(a for a in (*args, *kwargs.values()) if hasattr(a, "forward_mode"))
        if always or is_self_test(batch):
            taps.read[k] = _residual_stream(args, kwargs, batch)

    return hook


def _norm_hook(taps: Taps, k: int, *, always: bool):
    def hook(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        if always:
            hidden = args[0]
            residual = args[1] if len(args) > 1 else kwargs.get("residual")
            # A tensor of its own, sum or copy: the fused norm overwrites both of its inputs.
            taps.read[k] = hidden.clone() if residual is None else hidden + residual

    return hook


def is_self_test(batch: object) -> bool:
    """Return whether a forward batch holds a request of the self-test.

    Such a request asks for a comparison with the entry hooks.
    """
    return any(str(rid).startswith(_SELF_TEST_PREFIX) for rid in batch.rids or ())


def _residual_stream(args: tuple, kwargs: dict, batch: object) -> torch.Tensor:
    """Return r_k on entry to a decoder layer, [tokens, H], as a tensor of its own."""
    # SGLang 0.5.23 keeps the residual with the batch.
    stream = getattr(batch, "residual_stream", None)
    if stream is not None:
        pending, residual = stream.pending, stream.residual
        if pending is None:
            hidden, residual = (residual if residual is not None else _hidden(args, kwargs)), None
        elif pending.owed is None:
            hidden = pending.value
        else:
            hidden = _reduce(pending)
    else:
        hidden, residual = _hidden(args, kwargs), _after_batch(args, kwargs, batch)
    return hidden.clone() if residual is None else hidden + residual


def _reduce(pending: object) -> torch.Tensor:
    """Return the sum over tensor parallel ranks that the layer itself completes on entry."""
    from sglang.srt.distributed import tensor_model_parallel_all_reduce

    value = pending.value if pending.value is not None else pending.owed.partial
    return tensor_model_parallel_all_reduce(value.clone())


def _hidden(args: tuple, kwargs: dict) -> torch.Tensor:
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[1]


def _after_batch(args: tuple, kwargs: dict, batch: object) -> torch.Tensor | None:
    if "residual" in kwargs:
        return kwargs["residual"]
    at = next(i for i, a in enumerate(args) if a is batch)
    return args[at + 1] if at + 1 < len(args) else None

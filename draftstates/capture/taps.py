"""Where in the model each r_k is read.

r_k for 0 < k < N comes from SGLang's own capture (`layers_to_capture = [k]` is r_k in every model file). r_0 and r_N are out
of its reach: they are read on entry to layer 0 and to the final norm. The same entry hooks, on every captured layer, give the
self-test a second opinion that does not pass through SGLang's capture.
"""

import dataclasses

import torch

from draftstates.wire import PROBE, VERSION

_PROBE_PREFIX = f"{VERSION}|{PROBE}|"


def text_model(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The causal language model inside `model` (itself, or what a multimodal wrapper holds) and its stack of decoder layers.

    Raises:
        SystemExit: no decoder layers with a final norm were found.
    """
    for causal in (model, getattr(model, "language_model", None)):
        stack = getattr(causal, "model", None)
        if stack is not None and hasattr(stack, "layers") and hasattr(stack, "norm"):
            return causal, stack
    raise SystemExit(f"draftstates: no decoder layers with a final norm found in {type(model).__name__}")


@dataclasses.dataclass
class Taps:
    """What was read in the forward pass that is under way: r_k by k, each [tokens, H]."""

    num_layers: int
    read: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)

    def take(self) -> dict[int, torch.Tensor]:
        taken, self.read = self.read, {}
        return taken


def install(model: torch.nn.Module, *, layers: tuple[int, ...], final_norm: str) -> Taps:
    """Make the model hand over r_k for each k in `layers`, and r_N too where `final_norm` is `pre_norm`.

    Raises:
        SystemExit: a layer is out of range, or the model cannot hand over its residual stream.
    """
    causal, stack = text_model(model)
    count = len(stack.layers)
    if layers[-1] > count:
        raise SystemExit(f"draftstates: residual_layers {list(layers)}, but {type(model).__name__} has {count} layers")
    inner = [k for k in layers if 0 < k < count]
    if inner:
        _ask_sglang(causal, stack, inner)
    taps = Taps(num_layers=count)
    for k in sorted({*layers} - {count}):
        stack.layers[k].register_forward_pre_hook(_entry_hook(taps, k, always=k == 0), with_kwargs=True)
    always = final_norm == "pre_norm" or count in layers
    stack.norm.register_forward_pre_hook(_norm_hook(taps, count, always=always), with_kwargs=True)
    return taps


def _ask_sglang(causal: torch.nn.Module, stack: torch.nn.Module, layers: list[int]) -> None:
    if not hasattr(causal, "capture_aux_hidden_states"):
        raise SystemExit(f"draftstates: {type(causal).__name__} has no capture_aux_hidden_states: its residual stream cannot be captured")
    causal.capture_aux_hidden_states = True
    for name in ("set_eagle3_layers_to_capture", "set_dflash_layers_to_capture"):
        if hasattr(stack, name):  # MoE stacks of the Qwen family mark their layers one by one
            getattr(stack, name)(layers)
            return
    if not hasattr(stack, "layers_to_capture"):
        raise SystemExit(f"draftstates: {type(stack).__name__} has no layers_to_capture")
    stack.layers_to_capture = layers


def _entry_hook(taps: Taps, k: int, *, always: bool):
    def hook(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        batch = next(a for a in (*args, *kwargs.values()) if hasattr(a, "forward_mode"))
        if always or is_probe(batch):
            taps.read[k] = _residual_stream(args, kwargs, batch)

    return hook


def _norm_hook(taps: Taps, k: int, *, always: bool):
    def hook(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        if always:
            hidden = args[0]
            residual = args[1] if len(args) > 1 else kwargs.get("residual")
            # a sum or a copy of its own: the fused norm overwrites both of its inputs
            taps.read[k] = hidden.clone() if residual is None else hidden + residual

    return hook


def is_probe(batch: object) -> bool:
    """Whether a forward batch holds a request that asks for the comparison with the entry hooks."""
    return any(str(rid).startswith(_PROBE_PREFIX) for rid in batch.rids or ())


def _residual_stream(args: tuple, kwargs: dict, batch: object) -> torch.Tensor:
    """r_k on entry to a decoder layer, [tokens, H], a tensor of its own."""
    stream = getattr(batch, "residual_stream", None)
    if stream is not None:  # 0.5.23 keeps the residual with the batch
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
    """The sum over tensor parallel ranks that the layer itself would complete on entry."""
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

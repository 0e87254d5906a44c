"""Taps: the places in the model where each r_k is read, on entry to layer k or to the final norm.

What a layer is given differs. A complete state, or a pair of a layer's output and the residual that
it is not yet added to: the final norm tells which, because it is given the same. Or an output that
is not yet summed over the ranks: then the layer's own first step completes it, and r_k is read
after that step. So no tap adds communication or synchronisation to a forward pass.

A tap copies at once into memory of its own: the model's buffers are borrowed.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from draftstates.capture import seams
from draftstates.capture.stack import adds_its_residual, find_stack, first
from draftstates.extract.protocol import SELF_TEST, VERSION, kept_positions, parse_rid

_OURS = f"{VERSION}|"
_SELF_TEST = f"{VERSION}|{SELF_TEST}|"
_RESIDUALS = ("residual", "residuals")


def is_ours(batch: object) -> bool:
    """Return whether a forward batch holds a request whose rows are captured."""
    return any(str(rid).startswith(_OURS) for rid in batch.rids or ())


def is_self_test(batch: object) -> bool:
    """Return whether a forward batch holds a request of the self-test: it reads every r_k."""
    return any(str(rid).startswith(_SELF_TEST) for rid in batch.rids or ())


@dataclasses.dataclass
class Reading:
    """States that the taps have read in one forward pass.

    Attributes:
        layers: the captured k.
        rows: r_k of these k, [tokens, K, H] in the stored dtype.
        read: the k whose rows are in `rows`.
        kept: positions of the self-test's kept rows in the batch, int64 [n]; None without any.
        every: r_k of every k at these positions, each [n, H] in the model's dtype.
        error: why the states cannot be used; empty if they can.
    """

    layers: tuple[int, ...]
    rows: torch.Tensor | None = None
    read: set[int] = dataclasses.field(default_factory=set)
    kept: torch.Tensor | None = None
    every: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    # r_N, [tokens, H] in the model's dtype, where only the final state or the self-test needs it.
    last: torch.Tensor | None = None
    error: str = ""
    # Pairs (hidden, residual) of a pass that has not reached the final norm yet.
    undecided: dict[int, tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(
        default_factory=dict
    )

    def state(self, k: int) -> torch.Tensor | None:
        """Return a captured r_k, [tokens, H]; None if no tap has read it."""
        if k not in self.layers:
            return self.last
        return self.rows[:, self.layers.index(k)] if k in self.read else None


class Taps:
    """Taps on entry to every decoder layer and to the final norm.

    Args:
        model: the loaded model.
        layers: ascending k of the captured r_k.
        num_layers: N.
        hidden_size: H.
        dtype: stored dtype.
        final_norm: `pre_norm` reads r_N too.

    Raises:
        SystemExit: the model's layers or its final norm cannot be found.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        layers: tuple[int, ...],
        num_layers: int,
        hidden_size: int,
        dtype: torch.dtype,
        final_norm: str,
    ) -> None:
        stack = find_stack(model, num_layers=num_layers, hidden_size=hidden_size)
        self.num_layers = num_layers
        self._layers, self._hidden_size, self._dtype = layers, hidden_size, dtype
        self._needed = frozenset({*layers} | ({num_layers} if final_norm == "pre_norm" else set()))
        self._all = range(num_layers + 1)
        self._active = self._everything = False
        self._kept = torch.empty(0, dtype=torch.int64)
        self._batch: object | None = None
        self._awaited: list[int] = []
        self._reading = Reading(layers)
        # Whether layers are given a pair to sum; None until the final norm is called.
        self._summed: bool | None = None
        self._norm: Callable | None = None
        _before(model, self._guarded(self._begin))
        for k, layer in enumerate(stack.layers):
            names = list(inspect.signature(layer.forward).parameters)
            _before(layer, self._guarded(self._enter, k, names, seams.prepares(layer)))
        for norm in stack.norms.values():
            call, adds = norm.forward, adds_its_residual(norm)
            _before(norm, self._guarded(self._enter_norm, call, adds))
        seams.after_preparing(self)

    def take(self, tokens: int) -> Reading:
        """Return what was read since the last call and forget it.

        Args:
            tokens: rows that the model computed.
        """
        reading, self._reading = self._reading, Reading(self._layers)
        active, everything = self._active, self._everything
        for k, (hidden, residual) in reading.undecided.items():
            self._put(reading, k, hidden, residual if self._summed else None)
        self._awaited, self._batch = [], None
        self._active = self._everything = False
        if active and not self._layers:
            # the pass was seen, and no layer's rows are asked for
            reading.rows = torch.empty(tokens, 0, self._hidden_size, dtype=self._dtype)
        if active and not reading.error:
            states = {k: (reading.state(k), tokens) for k in sorted(self._needed)}
            if everything:
                reading.kept = self._kept
                states |= {k: (reading.every.get(k), len(self._kept)) for k in self._all}
            for k, (state, rows) in states.items():
                if state is None or len(state) != rows:
                    found = "none" if state is None else len(state)
                    reading.error = (
                        f"r_{k}: expected {rows} rows on entry to the layer, found {found}: this"
                        " server computes the model in a way that the taps do not reach"
                    )
                    break
        return reading

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """Return states [n, H] as the model's own final norm norms them."""
        return first(self._norm(states.clone()))

    def _guarded(self, look: Callable, *bound: object) -> Callable[[tuple, dict], None]:
        """Return `look` such that its exceptions spoil the reading alone, not the model's pass."""

        def guarded(args: tuple, kwargs: dict) -> None:
            try:
                look(*bound, args, kwargs)
            except Exception as error:
                self._reading.error = f"{type(error).__name__} in a tap: {error}"

        return guarded

    def _enter(self, k: int, names: list[str], prepares: bool, args: tuple, kwargs: dict) -> None:
        if not self._wants(k):
            return
        if prepares or getattr(self._batch, "residual_stream", None) is not None:
            self._awaited.append(k)
            return
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("deferred_norm") is not None:
            self._reading.error = f"r_{k}: layer {k} is given a state whose norm is still owed"
            return
        hidden = given.get("hidden_states")
        if hidden is None:
            states = (v for v in map(_without_batch, given.values()))
            hidden = next((v for v in states if _is_states(v, self._hidden_size)), None)
        residual = given.get("residual")
        if residual is None or self._summed is False:
            self._put(self._reading, k, hidden)
        elif self._summed:
            self._put(self._reading, k, hidden, residual)
        else:
            self._reading.undecided[k] = (hidden.clone(), residual.clone())

    def _begin(self, args: tuple, kwargs: dict) -> None:
        """Begin a pass of the whole model."""
        batch = next((v for v in (*args, *kwargs.values()) if hasattr(v, "forward_mode")), None)
        self._batch, self._reading, self._awaited = batch, Reading(self._layers), []
        self._active = self._everything = False
        self._active = batch is not None and batch.forward_mode.is_extend() and is_ours(batch)
        self._everything = self._active and is_self_test(batch)
        if self._everything:
            self._kept = _kept_rows(batch)

    def _wants(self, k: int) -> bool:
        return self._active and (self._everything or k in self._needed)

    @property
    def awaits(self) -> bool:
        """Return whether the next layer's first step completes an r_k that is to be read."""
        return bool(self._awaited)

    def completed(self, state: torch.Tensor) -> None:
        """Read the states that were awaited: the residual stream, [tokens, H]."""
        awaited, self._awaited = self._awaited, []
        try:
            for k in awaited:
                self._put(self._reading, k, state)
        except Exception as error:
            self._reading.error = f"{type(error).__name__} in a tap: {error}"

    def _enter_norm(self, call: Callable, adds: bool, args: tuple, kwargs: dict) -> None:
        if not self._active:
            return
        values = list(args) + [kwargs[name] for name in kwargs if name not in _RESIDUALS]
        hidden = next(v for v in values if isinstance(v, torch.Tensor))
        named = [kwargs[name] for name in _RESIDUALS if name in kwargs]
        residual = next((v for v in (*args[1:2], *named) if isinstance(v, torch.Tensor)), None)
        residual = residual if adds else None
        self._norm, self._summed = call, residual is not None
        # The last layers may compute nothing: their r_k is r_N.
        for k in (*self._awaited, *([self.num_layers] if self._wants(self.num_layers) else [])):
            self._put(self._reading, k, hidden, residual)
        self._awaited = []

    def _put(
        self, reading: Reading, k: int, hidden: object, residual: torch.Tensor | None = None
    ) -> None:
        """Copy r_k, or the sum that it is, into memory of our own."""
        hidden, residual = _without_batch(hidden), _without_batch(residual)
        if not _is_states(hidden, self._hidden_size):
            reading.error = (
                f"r_{k}: expected states of shape [tokens, {self._hidden_size}], found"
                f" {tuple(hidden.shape) if isinstance(hidden, torch.Tensor) else type(hidden)}"
            )
            return
        if self._everything:
            some = self._kept.to(hidden.device)
            kept = hidden[some]
            reading.every[k] = kept if residual is None else kept + residual[some]
        if k not in self._layers:
            # The self-test holds r_N against the final state.
            if k in self._needed or (self._everything and k == self.num_layers):
                reading.last = hidden.clone() if residual is None else hidden + residual
            return
        if reading.rows is None:
            shape = (len(hidden), len(self._layers), self._hidden_size)
            reading.rows = torch.empty(shape, dtype=self._dtype, device=hidden.device)
        if len(hidden) != len(reading.rows):
            reading.error = f"r_{k}: expected {len(reading.rows)} rows, found {len(hidden)}"
            return
        # Norms before the final one may be taken for it until it is called.
        if k in reading.read and k != self.num_layers:
            reading.error = f"r_{k}: layer {k} ran twice in one pass, so that r_{k} has two values"
        reading.read.add(k)
        place = reading.rows[:, self._layers.index(k)]
        if residual is None:
            place.copy_(hidden)
        else:
            torch.add(hidden, residual, out=place)


def _kept_rows(batch: object) -> torch.Tensor:
    """Return the positions in the batch of the rows that the self-test's requests keep."""
    found, at = [], 0
    for rid, start, length in zip(
        batch.rids, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=False
    ):
        destination = parse_rid(rid)
        if destination and destination.kind == SELF_TEST:
            found += [
                at + position - start
                for position in kept_positions(destination.rows)
                if start <= position < start + length
            ]
        at += length
    return torch.tensor(found, dtype=torch.int64)


def _before(module: torch.nn.Module, look: Callable[[tuple, dict], None]) -> None:
    """Have `look` see the arguments of every call of a module.

    Hooks of PyTorch miss calls of `forward` itself, which some model files make.
    """
    call = module.forward

    @functools.wraps(call)
    def forward(*args: object, **kwargs: object) -> object:
        look(args, kwargs)
        return call(*args, **kwargs)

    module.forward = forward


def _without_batch(value: Any) -> Any:
    """Return [tokens, H] of a layer of transformers, which is given [1, tokens, H]."""
    if isinstance(value, torch.Tensor) and value.ndim == 3 and len(value) == 1:
        return value[0]
    return value


def _is_states(value: object, hidden_size: int) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.ndim == 2
        and value.shape[-1] == hidden_size
    )

"""Watch over a loaded model's weights: after an update, requests are refused until a new self-test
has passed.

An update is noticed in SGLang's own methods, whichever route it came by. A self-test after it
is served only where the weights are, by a checksum of all of them, those that were loaded; where
they are spread over several ranks, the server must be started again.
"""

import contextlib
import functools
import hashlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from draftstates.capture import numbers
from draftstates.capture.files import is_trusted
from draftstates.paths import Results

UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
# These methods write no weights.
_HARMLESS = ("init_weights_update_group", "destroy_weights_update_group")
# Other methods that write, discard or restore weights.
OTHERS = (
    "sglang.srt.utils.weight_checker.WeightChecker._reset_tensors",
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    ".release_memory_occupation",
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    ".resume_memory_occupation",
)
# Words that are summed at once, each times a factor of its place, so that exchanges are seen.
_WORDS = 1 << 20


class Weights:
    """The weights of one rank's model since they were loaded.

    Args:
        model: the loaded model.
        root: the folder below which the server writes; the self-test leaves its mark there.
        ranks: how many ranks hold the model together. Of several each sees its own part alone.
    """

    def __init__(self, model: torch.nn.Module, *, root: Path, ranks: int = 1) -> None:
        self._model, self._root, self._ranks = model, root, ranks
        self._loaded = fingerprint(model)
        self._updates = 0
        self._updating = False
        # what made the last update, while no self-test has passed since
        self._update: str | None = None
        self._same: bool | None = None

    @contextlib.contextmanager
    def updating(self, by: str) -> Iterator[None]:
        """Note that a method of SGLang writes weights; it may call others of them."""
        if not self._updating:
            self._note(by)
        outer, self._updating = self._updating, True
        try:
            yield
        finally:
            self._updating = outer

    def _note(self, by: str) -> None:
        self._updates += 1
        self._update, self._same = by, None
        print(
            f"draftstates: {by} changed the weights: requests are refused until a new self-test"
            " has passed",
            file=sys.stderr,
            flush=True,
        )

    @property
    def mark(self) -> str | None:
        """What a self-test that passes says it has passed; None if nothing was updated."""
        return f"{numbers.server_name()}-{self._updates}" if self._update else None

    def refusal(self, *, self_test: bool) -> str | None:
        """Return why a request must not be captured, or None.

        Args:
            self_test: whether it is one of a self-test.
        """
        if self._update is None:
            return None
        passed = is_trusted(Results(self._root).passed(str(self.mark)), root=self._root)
        if not self_test and not passed:
            return (
                f"the weights were changed by {self._update} since the self-test: nothing is"
                " captured until a new self-test has passed; start the server again"
            )
        if self._ranks > 1:
            return (
                f"the weights were changed by {self._update}, and are spread over {self._ranks}"
                " ranks, of which this one knows its own alone: start the server again"
            )
        if self._same is None:
            self._same = self._loaded is not None and fingerprint(self._model) == self._loaded
        if not self._same:
            return (
                f"the weights were changed by {self._update}, and are no longer those of the model"
                " that was loaded and checked: start the server again"
            )
        if passed:
            self._update = None
        return None


def watch(weights: Weights, model: torch.nn.Module) -> None:
    """Have every method of SGLang that writes weights say so to `weights`."""
    updater = pkgutil.resolve_name(UPDATER)
    for name, method in list(vars(updater).items()):
        if callable(method) and not name.startswith("_") and name not in _HARMLESS:
            setattr(updater, name, _saying(method, weights, name))
    for place in OTHERS:
        owner, name = place.rsplit(".", 1)
        owner = pkgutil.resolve_name(owner)
        setattr(owner, name, _saying(getattr(owner, name), weights, name.strip("_")))
    # whatever else loads, such as a call of a method by name in all ranks
    if hasattr(model, "load_weights"):
        model.load_weights = _saying(model.load_weights, weights, "load_weights")


def _saying(method: Callable, weights: Weights, name: str) -> Callable:
    @functools.wraps(method)
    def call(*args: object, **kwargs: object) -> object:
        # a method that fails half way has written too
        with weights.updating(name):
            return method(*args, **kwargs)

    return call


def fingerprint(model: torch.nn.Module) -> str | None:
    """Return a checksum of all parameters and stored buffers, or None where one of them cannot be
    read as bytes."""
    sums: dict[torch.device, list[torch.Tensor]] = {}
    factors: dict[torch.device, torch.Tensor] = {}
    digest = hashlib.sha256()
    with torch.no_grad():
        for name, weight in stored(model):
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}\0".encode())
            if weight.is_meta or not weight.numel():
                continue
            if weight.device not in factors:
                factors[weight.device] = _factors(weight.device)
            try:
                found = _sums(weight.data, factors[weight.device])
            except (RuntimeError, NotImplementedError):
                return None
            sums.setdefault(weight.device, []).extend(found)
    for device in sorted(sums, key=str):
        digest.update(torch.stack(sums[device]).cpu().numpy().tobytes())
    return digest.hexdigest()


def stored(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, and those buffers that a checkpoint may hold."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", buffer


def _factors(device: torch.device) -> torch.Tensor:
    """Return an odd factor for each place, in no regular order; int64 [_WORDS]."""
    mixed = torch.arange(1, _WORDS + 1, dtype=torch.int64, device=device)
    mixed *= 0x1E3779B97F4A7C15
    mixed ^= mixed >> 29
    mixed *= 0x3F58476D1CE4E5B9
    mixed ^= mixed >> 32
    return mixed | 1


def _sums(weight: torch.Tensor, factors: torch.Tensor) -> list[torch.Tensor]:
    """Return sums over parts of a tensor's memory, modulo 2^64; int64 [] each."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(weight)
    flat = (
        weight.as_strided((weight.numel(),), (1,), weight.storage_offset())
        if dense
        else weight.reshape(-1)
    ).view(torch.uint8)
    words, rest = flat[: flat.numel() // 4 * 4], flat[flat.numel() // 4 * 4 :]
    # an offset that is no multiple of 4 bytes leaves bytes
    aligned = words.storage_offset() % 4 == 0
    words = words.view(torch.int32) if aligned else words
    return [
        (part * factors[: part.numel()]).sum()
        for part in (*words.split(_WORDS), rest)
        if part.numel()
    ]

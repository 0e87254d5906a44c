"""The load audit: whether SGLang read every tensor of the checkpoint and filled every parameter.

SGLang skips tensors that it has no parameter for, and leaves parameters that it finds no tensor
for, without a word. The audit passes the checkpoint's tensors on as a subclass that follows itself
through views, casts, stacks and loader threads until it is copied into something else. It fills the
parameters beforehand with a bit pattern that no checkpoint holds, and searches for it afterwards.

The audit is made once for each capture key, engine and parallel layout, and its result kept below
the server's root.
"""

import dataclasses
import hashlib
import importlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch.utils._pytree import tree_map

from draftstates.capture import numbers, plugin
from draftstates.capture.files import is_trusted
from draftstates.capture.settings import CaptureSettings
from draftstates.capture.weights import stored
from draftstates.files import publish_json
from draftstates.model import unused
from draftstates.model.folder import ModelFolder
from draftstates.model.unused import is_kv_scale, is_made, why_unused

# A NaN as float8_e4m3fn, bfloat16 (and float16), float32 and float64, by the bytes of an element.
_PATTERN = {1: 0x7F, 2: 0x7FA5, 4: 0x7FA5A5A5, 8: 0x7FA5A5A5A5A5A5A5}
# The NaN of scales that are powers of two, also where they are held as bytes; and the one integer
# that weights rounded to both sides of 0 leave out.
_OTHER_PATTERNS = {torch.float8_e8m0fnu: -1, torch.uint8: -1, torch.int8: -128}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Packed integers may hold the pattern by chance: so large a share, by the bytes of an element.
_INTEGER_SHARE = {1: 0.02}
_RARELY = 1e-4
_COPIES = ("copy_", "__setitem__", "set_", "add_", "index_copy_")
_VALUES = ("item", "tolist", "__float__", "__int__", "numpy")
# Parameters of so many elements are kept as they were made, for those that no tensor fills. Of
# larger ones the last element is kept: what SGLang makes as padding has one value.
_SMALL = 1 << 16
# A fused layer has a scale for each part; a checkpoint of fused layers fills the first alone.
_SCALE_SLOTS = 16
# Elements that are searched at once.
_BLOCK = 1 << 26
_SHOWN = 12
_LAYOUT = ("tp_size", "dp_size", "ep_size", "attn_dp_size", "moe_dp_size", "enable_dp_attention")
_PACKAGES = ("sglang", "transformers", "torch")
# The code that decides an audit's result.
_CODE = (Path(__file__), Path(unused.__file__))


@dataclasses.dataclass
class Findings:
    """What one rank did with the checkpoint.

    Attributes:
        seen: names of the tensors that the loader gave to the model.
        read: names of those that were copied into something.
        unfilled: by parameter, the elements that no tensor filled, such as `32 of 64`.
        heads: shapes of the matrices and stacks that were copied, by their address in memory,
            while the model is loaded.
    """

    seen: set[str] = dataclasses.field(default_factory=set)
    read: set[str] = dataclasses.field(default_factory=set)
    unfilled: dict[str, str] = dataclasses.field(default_factory=dict)
    heads: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_ranks(cls, ranks: Iterable["Findings"]) -> "Findings":
        """Return the findings of all ranks: a tensor counts as read where any rank read it."""
        found = cls()
        for each in ranks:
            found.seen |= each.seen
            found.read |= each.read
            found.unfilled = {**each.unfilled, **found.unfilled}
        return found


class _Watched(torch.Tensor):
    """A tensor of the checkpoint, or what was made of some."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):  # noqa: ANN001, ANN206
        names: set[str] = set()
        findings: Findings | None = None

        def bare(value: object) -> object:
            nonlocal findings
            if isinstance(value, _Watched):
                names.update(value.__dict__["names"])
                findings = value.__dict__["findings"]
                return value.as_subclass(torch.Tensor)
            return value

        with torch._C.DisableTorchFunctionSubclass():
            plain, keywords = tree_map(bare, args), tree_map(bare, kwargs or {})
            out = function(*plain, **keywords)
        called = getattr(function, "__name__", "")
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        into = called in _COPIES and target is not None and not isinstance(target, _Watched)
        if into or called in _VALUES:
            with _LOCK:
                findings.read |= names
                if called == "copy_" and target.ndim > 1:
                    findings.heads[target.data_ptr()] = tuple(target.shape)
            return out
        if target is not None and not isinstance(target, _Watched) and called.endswith("_"):
            return out
        return tree_map(
            lambda value: _watch(value, names, findings) if type(value) is torch.Tensor else value,
            out,
        )


_LOCK = threading.Lock()


def _watch(tensor: torch.Tensor, names: Iterable[str], findings: Findings) -> torch.Tensor:
    watched = tensor.as_subclass(_Watched)
    watched.__dict__["names"], watched.__dict__["findings"] = frozenset(names), findings
    return watched


def audited(
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    model: torch.nn.Module,
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Findings:
    """Load weights into a model, and return what was read and what was not filled.

    Args:
        load: the model's own `load_weights`.
        model: the model, its parameters not yet loaded.
        weights: names and tensors of the checkpoint.
    """
    findings, made = Findings(), {}
    before, given = {}, {}
    parameters = {name for name, _ in model.named_parameters()}
    for name, tensor in _fillable(model):
        before[name] = tensor.data_ptr()
        if not tensor.is_meta and tensor.numel():
            # A buffer may hold what its module has computed.
            whole = name not in parameters or tensor.numel() <= _SMALL
            made[name] = (tensor if whole else tensor[(-1,) * tensor.ndim]).detach().clone()
            _bits(tensor).fill_(_pattern(tensor))

    def follow() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            findings.seen.add(name)
            if name.endswith(".bias") and not tensor.any():
                # Nothing is lost of it: checkpoints of GPTQ have such for layers without biases.
                findings.read.add(name)
            given[tensor.data_ptr(), tensor.numel()] = name
            yield name, _watch(tensor, [name], findings)

    load(follow())
    filled, unfilled_buffers = set(), {}
    for name, tensor in _fillable(model):
        data = tensor.data
        if data.data_ptr() != before.get(name):
            # A loader made the tensor itself the parameter's data.
            findings.read |= {given.get((data.data_ptr(), data.numel()))} - {None}
        for tail in _padding(name, data, findings.heads.get(data.data_ptr())):
            _put_back(tail, made.get(name))
        left = _unfilled(data)
        if not left:
            filled.add(_in_any_layer(name))
            continue
        first_alone = _is_first_slot_alone(name, data, left)
        _put_back(data, made.get(name))
        said = f"{left:,} of {data.numel():,}"
        if name not in parameters:
            unfilled_buffers[name] = said
        elif not first_alone:
            findings.unfilled[name] = said
    findings.unfilled |= {
        name: said
        for name, said in unfilled_buffers.items()
        # Else the module computes it.
        if _in_any_layer(name) in filled
    }
    findings.heads.clear()
    return findings


def _fillable(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a checkpoint may fill: parameters, and buffers that hold numbers."""
    for name, tensor in stored(model):
        if isinstance(tensor, torch.nn.Parameter) or (
            tensor.is_floating_point() and torch.ops.aten.is_non_overlapping_and_dense(tensor)
        ):
            yield name, tensor


def _in_any_layer(name: str) -> str:
    """Return a name that the same tensor has in all layers."""
    return re.sub(r"\d+", "*", name)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(_INTEGERS[tensor.element_size()])


def _pattern(tensor: torch.Tensor) -> int:
    return _OTHER_PATTERNS.get(tensor.dtype, _PATTERN[tensor.element_size()])


def _padding(name: str, data: torch.Tensor, head: tuple[int, ...] | None) -> list[torch.Tensor]:
    """Return the parts of a layer's experts that only make rows or columns a round number.

    SGLang copies all experts of a layer at once, and leaves what lies behind them as it was made.

    Args:
        name: the parameter's name.
        data: the parameter, loaded.
        head: the shape that was copied to its beginning; None where none was.
    """
    of_experts = data.ndim == 3 or (data.ndim == 2 and name.endswith("_bias"))
    if not of_experts or head is None or len(head) != data.ndim or head[0] != data.shape[0]:
        return []
    tails = [
        data.narrow(d, size, data.shape[d] - size)
        for d, size in enumerate(head)
        if size < data.shape[d]
    ]
    untouched = all(bool((_bits(tail) == _pattern(tail)).all()) for tail in tails)
    return tails if untouched else []


def _unfilled(tensor: torch.Tensor) -> int:
    """Return how many elements hold the pattern; 0 where chance explains them."""
    if tensor.is_meta or not tensor.numel():
        return 0
    bits, pattern = _bits(tensor), _pattern(tensor)
    blocks = bits.reshape(-1).split(_BLOCK)
    left = sum(int((block == pattern).sum()) for block in blocks)
    share = 0 if tensor.is_floating_point() else _INTEGER_SHARE.get(tensor.element_size(), _RARELY)
    return left if left > share * tensor.numel() else 0


def _is_first_slot_alone(name: str, data: torch.Tensor, left: int) -> bool:
    """Return whether exactly the first slot of a fused per-tensor scale is filled."""
    if not name.endswith("_scale") or data.ndim != 1 or data.numel() > _SCALE_SLOTS:
        return False
    filled = int(_bits(data)[0]) != _pattern(data)
    return filled and left == data.numel() - 1


def _put_back(tensor: torch.Tensor, made: torch.Tensor | None) -> None:
    """Give the unfilled elements the values that they were made with, or the last one's."""
    if made is None or made.element_size() != tensor.element_size():
        return
    bits, kept = _bits(tensor), _bits(made)
    unfilled = bits == _pattern(tensor)
    bits[unfilled] = kept[unfilled] if kept.shape == bits.shape else kept.flatten()[-1]


def faults(found: Findings, model: ModelFolder, *, scaled_cache: bool = False) -> list[str]:
    """Return the tensors that were not read and the parameters that were not filled, in words.

    Tensors that no state depends on are left out.

    Args:
        scaled_cache: whether the KV cache is held in a number format that needs scales. A
            checkpoint may have none; then the cache's scales are 1.
    """
    tied = bool(model.text.get("tie_word_embeddings", model.config.get("tie_word_embeddings")))

    def is_used(name: str, *, scaled: bool) -> bool:
        return not why_unused(name, text=model.text, tied=tied, scaled_cache=scaled)

    ordered = any(name.endswith("g_idx") for name in found.seen)

    given = scaled_cache and any(is_kv_scale(name) for name in found.seen)
    unread = [
        f"{name} is in the checkpoint and was not read"
        for name in sorted(found.seen - found.read)
        if is_used(name, scaled=scaled_cache)
    ]
    unfilled = [
        f"{name} is in the model and was not filled ({left} elements)"
        for name, left in sorted(found.unfilled.items())
        if is_used(name, scaled=given)
        and not is_made(name, ordered=ordered, quantised=model.quantization is not None)
    ]
    return unread + unfilled


def _has_scaled_cache(runner: object) -> bool:
    """Return whether a runner that has loaded its model will hold the KV cache with scales."""
    asked = numbers.resolved(runner.server_args).get("kv_cache_dtype", "auto")
    if asked != "auto":
        return asked not in ("bf16", "bfloat16")
    quantised = getattr(getattr(runner, "model", None), "quant_config", None)
    return str(getattr(quantised, "kv_cache_quant_algo", None)).upper() == "FP8"


class LoadAudit:
    """The audit of a server's loading.

    Args:
        settings: the server's settings.
    """

    def __init__(self, settings: CaptureSettings) -> None:
        self._settings = settings
        self._active = False
        self._found: Findings | None = None

    def around_load_model(
        self, original: Callable, runner: object, *args: object, **kwargs: object
    ) -> object:
        """Audit the loading of the target model, unless its result is known.

        Raises:
            SystemExit: names the tensors that were not read and the parameters that were not
                filled, or says that the weights came in a way that is not audited.
        """
        arguments = runner.server_args
        if getattr(runner, "is_draft_worker", False) or arguments.load_format == "dummy":
            return original(runner, *args, **kwargs)
        path = self._settings.root / ".audits" / f"{self._key(arguments)}.json"
        if all(_from_all_ranks(_has_passed(path, root=self._settings.root))):
            return original(runner, *args, **kwargs)
        started, self._active, self._found = time.monotonic(), True, None
        try:
            result = original(runner, *args, **kwargs)
        finally:
            self._active = False
        self._judge(path, runner, time.monotonic() - started)
        return result

    def around_load_weights(self, original: Callable, *args: object, **kwargs: object) -> object:
        """Audit the model's own `load_weights` while it is called."""
        if not self._active:
            return original(*args, **kwargs)
        model = next(
            value for value in (*args, *kwargs.values()) if isinstance(value, torch.nn.Module)
        )
        load = model.load_weights

        def audit(weights: Iterable, *more: object, **named: object) -> None:
            self._found = audited(lambda each: load(each, *more, **named), model, weights)

        model.load_weights = audit
        try:
            return original(*args, **kwargs)
        finally:
            del model.load_weights

    def _judge(self, path: Path, runner: object, seconds: float) -> None:
        model = ModelFolder(Path(runner.server_args.model_path))
        everywhere = _from_all_ranks(self._found)
        if None in everywhere:
            plugin.refuse(
                f"the weights of {model.path} were loaded in a way that is not audited; load"
                " safetensors without --load-format"
            )
        found = Findings.of_ranks(everywhere)
        if said := faults(found, model, scaled_cache=_has_scaled_cache(runner)):
            more = f"; and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
            plugin.refuse(
                f"it does not load {model.path} as it is: {'; '.join(said[:_SHOWN])}{more}. Its"
                " model file does not know this checkpoint's configuration, or a tensor is missing"
            )
        # Ranks and servers that start together write the same.
        counts = {"key": path.stem, "tensors": len(found.seen), "read": len(found.read)}
        publish_json({**counts, "seconds": round(seconds, 1)}, path)

    def _key(self, arguments: object) -> str:
        """Return a digest of all that an audit's result follows from."""
        given = numbers.resolved(arguments)
        parts = {
            "capture": self._settings.spec.key,
            "layout": {name: given.get(name) for name in _LAYOUT},
            "versions": {name: _version(name) for name in _PACKAGES},
            "audit": [hashlib.sha256(file.read_bytes()).hexdigest() for file in _CODE],
        }
        text = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def _version(package: str) -> str:
    # a package that was copied into place has no metadata
    return importlib.import_module(package).__version__


def _has_passed(path: Path, *, root: Path) -> bool:
    """Return whether a file is the result of an audit that passed, under its own name."""
    try:
        if not is_trusted(path, root=root):
            return False
        result = json.loads(path.read_text())
        return result["key"] == path.stem and 0 < result["read"] <= result["tensors"]
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _from_all_ranks(value: object) -> list:
    """Return this value of every rank that the model is spread over."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return [value]
    values: list = [None] * group.world_size
    torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


def register(settings: CaptureSettings) -> None:
    """Hook the audit into SGLang; before other hooks of `LOAD_MODEL`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    audit = LoadAudit(settings)
    HookRegistry.register(plugin.LOAD_MODEL, audit.around_load_model, HookType.AROUND)
    HookRegistry.register(plugin.LOAD_WEIGHTS, audit.around_load_weights, HookType.AROUND)

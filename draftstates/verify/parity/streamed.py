"""A plain Hugging Face forward pass with about one decoder layer in memory at a time.

transformers' own model is built without weights. A hook on entry to each decoder layer reads that
layer's tensors through transformers' own renaming and conversion of keys (experts fused, prefixes
changed), a hook on exit frees them. The model's own `forward` runs, so masks, rotary kinds, windows
and scales need no code here.

Five of the names imported from transformers are not public. A test compares the result with that
of the ordinary model, bit by bit.
"""

import collections
import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from draftstates.errors import UserError
from draftstates.model.family import final_scale
from draftstates.model.folder import ModelFolder, unreadable_weights
from draftstates.model.unused import why_unused
from draftstates.verify.parity.alone import CPU_ALLOCATOR, LayersAlone
from draftstates.verify.parity.experts import ReachedExperts
from draftstates.verify.parity.quantised import NotDequantised, Scheme

_MODEL_CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText")
_SHOWN = 8
# `init_empty_weights` leaves buffers (rotary frequencies, scales of embeddings) as they are.
_META = torch.device("meta")


class NoReference(Exception):
    """The reason why transformers gives no reference for a model, or for its later layers."""


class _LastLayer(Exception):
    """The end of a forward pass after the last layer that is asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceStates:
    """The states of one prompt.

    Attributes:
        by_name: r_0, r_1, … by their names "r_k", and "post_norm", each [n, H] on the CPU; without
            the last ones where the pass ended early.
        reason: why the pass ended before the last layer; None where it did not.
        unreached: by layer, the experts that no token was given to.
    """

    by_name: dict[str, torch.Tensor]
    reason: str | None
    unreached: dict[str, str] = dataclasses.field(default_factory=dict)


class StreamedModel:
    """A model on the disk, whose weights are read while it computes.

    Args:
        model: the model's folder.
        dtype: the number format to compute in.
        device: where to compute, as torch names it.
        trust_remote_code: build the model with the Python code in its folder.

    Attributes:
        dtype: the number format to compute in.
        num_layers: N.

    Raises:
        NoReference: transformers does not have the family, or the weights are quantised in a way
            that is not undone.
        UserError: a file of weights is missing or cannot be read.
    """

    def __init__(
        self,
        model: ModelFolder,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        trust_remote_code: bool = False,
    ) -> None:
        self._folder, self._device, self.dtype = model, torch.device(device), dtype
        self._scheme = _scheme(model)
        self._model = _without_weights(model.path, dtype=dtype, trust=trust_remote_code)
        self.num_layers = model.num_layers
        prefix, self._stack = _decoder_stack(self._model, self.num_layers)
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[name] = buffer.to(self._device)
        self._units = _units(prefix, self._stack)
        self._loading, self._keys = self._place_keys(dtype)
        # Some families ask for the device of the embeddings before they call them.
        self._early = [
            name for name, unit in self._units.items() if isinstance(unit, torch.nn.Embedding)
        ]
        for name, module in self._units.items():
            if name not in self._early:
                module.register_forward_pre_hook(lambda *_, name=name: self._load(name))
            module.register_forward_hook(lambda *_, name=name: self._free(name))

    @property
    def largest_layer(self) -> int:
        """Number of values of the decoder layer that has the most."""
        return max(sum(p.numel() for p in layer.parameters()) for layer in self._stack.layers)

    @torch.inference_mode()
    def states(
        self,
        input_ids: torch.Tensor,
        *,
        layers: int | None = None,
        alone: LayersAlone | None = None,
    ) -> ReferenceStates:
        """Return r_k for each k, and post_norm.

        Args:
            input_ids: int [n].
            layers: number of layers to compute; None for all.
            alone: computes each layer once more, for other rows.

        Raises:
            NoReference: transformers cannot compute even the first layer.
            UserError: tensors of a layer are missing from the checkpoint, or unknown to
                transformers.
        """
        found: dict[str, torch.Tensor] = {}
        experts = ReachedExperts()
        wanted = self.num_layers if layers is None else min(layers, self.num_layers)

        def on_entry(k: int, args: tuple, kwargs: dict) -> None:
            found[f"r_{k}"] = _real(_hidden(args, kwargs)[0])
            if k == wanted:
                raise _LastLayer

        def on_exit(output: Any) -> None:
            last = output[0] if isinstance(output, tuple) else output
            found[f"r_{self.num_layers}"] = _real(last[0])

        stack = self._stack
        with contextlib.ExitStack() as hooks:
            hooks.enter_context(experts.watching(stack.layers))
            for k, layer in enumerate(stack.layers):
                # Before the weights are read: the layer after the last is not.
                handle = layer.register_forward_pre_hook(
                    lambda _, args, kwargs, k=k: on_entry(k, args, kwargs),
                    with_kwargs=True,
                    prepend=True,
                )
                hooks.callback(handle.remove)
                if alone is not None:
                    # Before the weights are freed.
                    handle = layer.register_forward_hook(
                        lambda layer, args, kwargs, _, k=k: alone.add(k, layer, args, kwargs),
                        with_kwargs=True,
                        prepend=True,
                    )
                    hooks.callback(handle.remove)
            handle = stack.layers[-1].register_forward_hook(lambda _, args, out: on_exit(out))
            hooks.callback(handle.remove)
            try:
                for unit in self._early:
                    self._load(unit)
                ids = torch.as_tensor(input_ids, device=self._device)[None].long()
                output = stack(input_ids=ids, use_cache=False)
                # What the head reads, as a server captures it.
                scale = final_scale(self._folder.text)
                found["post_norm"] = _real(output.last_hidden_state[0]) * scale
            except _LastLayer:
                self._free_all()
            except (UserError, NoReference):
                raise
            # What a second attempt may not meet says nothing about the model.
            except (OSError, SafetensorError, MemoryError, torch.OutOfMemoryError) as error:
                raise _interrupted(self._folder, error) from error
            # A family's own code raises errors of any class, such as for a kernel that is missing.
            except Exception as error:
                if isinstance(error, RuntimeError) and CPU_ALLOCATOR in str(error):
                    raise _interrupted(self._folder, error) from error
                self._free_all()
                reason = f"{type(error).__name__}: {error}"
                if len(found) < 2:
                    raise NoReference(reason) from error
                return ReferenceStates(by_name=found, reason=reason, unreached=experts.unreached())
        return ReferenceStates(by_name=found, reason=None, unreached=experts.unreached())

    def _place_keys(self, dtype: torch.dtype) -> tuple[Any, dict[str, dict[str, Path]]]:
        """Return how transformers converts keys, and each unit's tensors with their files."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )
        from transformers.modeling_utils import LoadStateDictConfig

        model = self._model
        mapping = get_model_conversion_mapping(model)
        loading = LoadStateDictConfig(
            dtype=dtype,
            dtype_plan=model._get_dtype_plan(dtype),
            weight_mapping=mapping,
            device_map={"": self._device},
        )
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        targets, keys = model.state_dict(), collections.defaultdict(dict)
        for key, file in _tensor_files(self._folder):
            plain = self._scheme.plain_name(key)
            name = rename_source_key(
                plain, renamings, converters, model.base_model_prefix, targets
            )[0]
            if name not in targets and plain in targets:
                name = plain
            unit = next((unit for unit in self._units if name.startswith(f"{unit}.")), None)
            if unit is not None and not self._is_unused(plain):
                keys[unit][key] = file
        return loading, keys

    def _is_unused(self, name: str) -> bool:
        return bool(why_unused(name, text=self._folder.text, tied=False))

    def _load(self, unit: str) -> None:
        """Read one unit's tensors into the model.

        Raises:
            UserError: tensors are missing, unknown to transformers, or of another shape.
        """
        from transformers.core_model_loading import convert_and_load_state_dict_in_model as convert

        if "tp_plan" in inspect.signature(convert).parameters:
            # Required before transformers 5.13, without a default.
            convert = functools.partial(convert, tp_plan=None)
        with contextlib.ExitStack() as opened:
            slices = self._open(unit, opened)
            plain = self._scheme.plain(slices)
            info, _ = convert(self._model, plain, self._loading)
        missing = sorted(
            name
            for name in info.missing_keys
            if name.startswith(f"{unit}.") and self._is_on_meta(name)
        )
        problems = {
            "is missing from the checkpoint": missing,
            "is unknown to transformers": sorted(info.unexpected_keys),
            "has another shape than transformers expects": sorted(map(str, info.mismatched_keys)),
            "cannot be converted": [*map(str, info.conversion_errors.items()), *info.error_msgs],
        }
        found = [
            f"{name} {what}" for what, names in problems.items() for name in names[:_SHOWN] if names
        ]
        if found:
            raise UserError(
                f"{self._folder.path}: expected the tensors of {type(self._model).__name__}, found"
                f" that {'; '.join(found)}: use a checkpoint that fits its config.json"
            )

    def _is_on_meta(self, name: str) -> bool:
        """Return whether a tensor is still without values; a buffer may be computed."""
        module, _, last = name.rpartition(".")
        owner = self._model.get_submodule(module)
        tensor = owner._parameters.get(last, owner._buffers.get(last))
        return tensor is None or tensor.is_meta

    def _open(self, unit: str, opened: contextlib.ExitStack) -> dict[str, Any]:
        by_file: dict[Path, list[str]] = collections.defaultdict(list)
        for key, file in self._keys[unit].items():
            by_file[file].append(key)
        slices = {}
        for file, keys in by_file.items():
            tensors = opened.enter_context(safe_open(file, framework="pt"))
            slices |= {key: tensors.get_slice(key) for key in keys}
        return slices

    def _free(self, unit: str) -> None:
        for module in self._units[unit].modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    empty = torch.empty_like(parameter, device=_META)
                    module._parameters[name] = torch.nn.Parameter(empty, requires_grad=False)

    def _free_all(self) -> None:
        for unit in self._units:
            self._free(unit)


def _interrupted(model: ModelFolder, error: Exception) -> UserError:
    return UserError(
        f"{model.path}: expected a forward pass of the checkpoint, found"
        f" {type(error).__name__}: {error}: look at the disk and the memory of this machine, and"
        " run again"
    )


def _scheme(model: ModelFolder) -> Scheme:
    config = model.config.get("quantization_config") or model.text.get("quantization_config")
    try:
        return Scheme.of(config or {})
    except NotDequantised as error:
        raise NoReference(str(error)) from None


def _without_weights(folder: Path, *, dtype: torch.dtype, trust: bool) -> torch.nn.Module:
    """Return transformers' model of a folder, its parameters without values.

    Raises:
        NoReference: transformers cannot build it.
    """
    import transformers
    from accelerate import init_empty_weights

    # A bar for each layer would fill the log.
    transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    # On files of another kind transformers raises errors of many classes.
    except Exception as error:
        raise NoReference(f"transformers cannot read the configuration: {_short(error)}") from error
    problems = []
    for name in _MODEL_CLASSES:
        try:
            with init_empty_weights():
                return (
                    getattr(transformers, name)
                    .from_config(config, dtype=dtype, trust_remote_code=trust)
                    .eval()
                )
        except Exception as error:
            problems.append(f"{name}: {_short(error)}")
    raise NoReference(f"transformers cannot build the model: {'; '.join(problems)}")


def _short(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".split("\n")[0]
    return text if len(text) <= 200 else f"{text[:200]}…"


def _decoder_stack(model: torch.nn.Module, layers: int) -> tuple[str, Any]:
    """Return name and module of the stack of decoder layers.

    Raises:
        NoReference: no module, or none called with ids, has so many `layers`.
    """
    for name, module in model.named_modules():
        found = getattr(module, "layers", None)
        if (
            isinstance(found, torch.nn.ModuleList)
            and len(found) == layers
            and any(isinstance(child, torch.nn.Embedding) for child in module.children())
        ):
            return name, module
    raise NoReference(
        f"{type(model).__name__} has no stack of {layers} decoder layers with embeddings"
    )


def _units(prefix: str, stack: Any) -> dict[str, torch.nn.Module]:
    """Return the modules whose weights are read and freed together, by name."""
    start = f"{prefix}." if prefix else ""
    units = {f"{start}layers.{k}": layer for k, layer in enumerate(stack.layers)}
    for name, module in stack.named_children():
        if name != "layers" and any(True for _ in module.parameters()):
            units[f"{start}{name}"] = module
    return units


def _tensor_files(model: ModelFolder) -> Iterator[tuple[str, Path]]:
    for file in model.weight_files:
        try:
            with safe_open(file, framework="pt") as tensors:
                names: Sequence[str] = tensors.keys()
        except (OSError, SafetensorError) as error:
            raise unreadable_weights(file, error) from error
        yield from ((name, file) for name in names)


def _real(states: torch.Tensor) -> torch.Tensor:
    """Return a copy of states on the CPU."""
    if states.is_meta:
        # A copy of them would hold whatever the memory holds.
        raise NoReference("a state was computed without weights")
    return states.cpu().clone()


def _hidden(args: tuple, kwargs: dict) -> torch.Tensor:
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

"""The check of parity: the self-test's rows against the checkpoint, and its result."""

import dataclasses
import itertools
import math
import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import psutil
import torch

from draftstates.errors import UserError
from draftstates.model.folder import ModelFolder
from draftstates.model.lengths import SHORT, prompt_length, reach
from draftstates.records import LayerParity, Parity
from draftstates.shards.layout import Shard
from draftstates.shards.selftest_rows import Prompt, SelftestRows
from draftstates.spec import CaptureSpec, torch_dtype
from draftstates.verify.parity.alone import LayersAlone
from draftstates.verify.parity.compare import Limit, compare, fault, judged_alone
from draftstates.verify.parity.rounding import ServerRounding
from draftstates.verify.parity.streamed import NoReference, ReferenceStates, StreamedModel

# A layer of fused experts takes this many times its own size while it is put together.
_PEAK = 2.7
_SHARE_OF_MEMORY = 0.5
# Keys of `config.json` that tell of a router of experts, or of sparse attention.
_CHOICE = re.compile(r"expert|moe|topk|top_k|sparse")


class ParityFailed(UserError):
    """The error for rows that are not those of the checkpoint."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What a comparison is asked for.

    Attributes:
        tokens: tokens that a prompt may have.
        layers: decoder layers to compute; None for all.
        code: digest of the code that compares.
    """

    tokens: int
    layers: int | None
    code: str

    def record(self) -> dict[str, str]:
        """Return the fields as text, None as `all`."""
        return {
            name: "all" if value is None else str(value)
            for name, value in dataclasses.asdict(self).items()
        }


def check_parity(
    rows: SelftestRows,
    *,
    spec: CaptureSpec,
    model: ModelFolder,
    asked: Asked,
    trust_remote_code: bool = False,
) -> Parity:
    """Compare the self-test's rows of every layer with a forward pass of the checkpoint.

    Args:
        rows: the kept rows.
        spec: the capture that they are of.
        model: the checkpoint.
        asked: how far to compare.
        trust_remote_code: build the model with the Python code in its folder.

    Raises:
        ParityFailed: a layer differs; the message names it, its distance, the limit and the
            distances of the neighbouring layers.
        UserError: the rows are of another capture, or the checkpoint lacks tensors.
    """
    if rows.capture_key != spec.key:
        raise UserError(
            f"expected self-test rows of capture {spec.key[:16]}…, found {rows.capture_key[:16]}…"
        )
    started = time.monotonic()
    prompt = _chosen(rows.prompts, most=prompt_length(model.text, most=asked.tokens))
    layers: list[LayerParity] = []
    limit = limit_of(spec, text=model.text)
    try:
        _check_rounding(spec)
        reference = _reference(model, spec=spec, trust_remote_code=trust_remote_code)
        computed_by = f"{_described(reference)}, {_positions(prompt)}"
        alone = layers_alone(prompt, limit, reference=reference, compute=spec.compute_dtype)
        states = reference.states(prompt.input_ids, layers=asked.layers, alone=alone)
    except NoReference as error:
        compared, whole, reason, computed_by = 0, False, str(error), "none"
        unreached: dict[str, str] = {}
    else:
        layers = compare_prompt(prompt, states, limit=limit, alone=alone)
        if alone:
            computed_by += f", {len(alone.found)} layers also alone"
        names = {layer.layer for layer in layers}
        compared = _compared(names)
        whole = compared == spec.num_layers and "post_norm" in names
        missing = [name for name in states.by_name if name not in prompt.states]
        reason = _missing(missing) or states.reason or "checks.parity_layers"
        unreached = states.unreached
    if faults := [what for layer in layers if (what := fault(layer))]:
        more = f"; {len(faults) - 1} more layers differ" if len(faults) > 1 else ""
        raise ParityFailed(
            f"the server does not compute {model.path}: {faults[0]}{more}. Nothing is published."
            " Start the server without arguments that change numbers, or with another version of"
            " SGLang; its model file may not know this checkpoint's configuration"
        )
    seen = reach(model.text, tokens=len(prompt.input_ids))
    return Parity(
        capture_key=spec.key,
        selftest=rows.id,
        result=_result(compared, None if whole else reason, spec.num_layers),
        compared=compared,
        layers=tuple(layers),
        prompts=(len(prompt.input_ids),),
        covered=seen.covered,
        beyond=seen.beyond,
        unreached=unreached,
        reference=computed_by,
        asked=asked.record(),
        seconds=round(time.monotonic() - started, 1),
    )


def compare_prompt(
    prompt: Prompt, states: ReferenceStates, *, limit: Limit, alone: LayersAlone | None = None
) -> list[LayerParity]:
    """Return the distances of each layer of a prompt.

    Its first and its last rows are compared apart, since a fault may concern the last ones alone;
    the larger distance counts.

    Args:
        limit: the largest distances.
        alone: what each layer gives for the captured rows before it; None to leave that out.
    """
    right = {name: rows[prompt.positions] for name, rows in states.by_name.items()}
    merged, by_name = compare_rows(prompt, right, limit=limit), alone.found if alone else {}
    return [
        judged_alone(
            layer,
            prompt.states[layer.layer][: len(by_name[layer.layer].right)],
            by_name[layer.layer],
            limit=limit,
        )
        if layer.layer in by_name
        else layer
        for layer in merged
    ]


def compare_rows(
    prompt: Prompt, right: Mapping[str, torch.Tensor], *, limit: Limit
) -> list[LayerParity]:
    """Return the distances of each layer of a prompt's rows from others, part by part.

    Args:
        right: the other rows, of the same positions.
        limit: the largest distances.
    """
    found: list[LayerParity] = []
    for part in _parts(len(prompt.positions)):
        captured, others = (
            {name: rows[part] for name, rows in side.items()} for side in (prompt.states, right)
        )
        found += compare(captured, others, limit=limit)
    return _merged(found, rows=len(prompt.positions))


def sample_prompt(shard: Shard, index: int, *, num_layers: int) -> Prompt:
    """Return a captured sample's ids and rows by the names that a reference gives them."""
    sample, header = shard.sample(index), shard.header
    states = {f"r_{k}": sample["hidden_states"][:, i] for i, k in enumerate(header.residual_layers)}
    if "final_hidden_state" in sample:
        last = "post_norm" if header.metadata["final_norm"] == "post_norm" else f"r_{num_layers}"
        states[last] = sample["final_hidden_state"]
    return Prompt(
        input_ids=sample["input_ids"],
        positions=torch.arange(len(sample["input_ids"])),
        states=states,
    )


def limit_of(spec: CaptureSpec, *, text: Mapping[str, Any]) -> Limit:
    """Return the limit of a capture's distances; a server may quantise a plain checkpoint.

    Args:
        text: the language model's part of `config.json`.
    """
    rounding = ServerRounding.of(spec)
    return Limit.of(
        compute=spec.compute_dtype,
        stored=spec.stored_dtype,
        quantization=spec.quantization or rounding.eight_bits or rounding.coarser,
        eight_bits=bool(rounding.eight_bits or rounding.coarser),
        smooth=not chooses(text),
    )


def _check_rounding(spec: CaptureSpec) -> None:
    """Refuse to judge a capture whose roundings no limit tells from a fault.

    Raises:
        NoReference: the server rounds numbers to fewer than 8 bits, which the checkpoint does not.
    """
    if method := ServerRounding.of(spec).coarser:
        raise NoReference(f"no limit tells the roundings of {method} from a fault")


def _chosen(prompts: Sequence[Prompt], *, most: int) -> Prompt:
    fitting = [prompt for prompt in prompts if len(prompt.input_ids) <= most]
    if fitting:
        return max(fitting, key=lambda prompt: len(prompt.input_ids))
    return min(prompts, key=lambda prompt: len(prompt.input_ids))


def _reference(model: ModelFolder, *, spec: CaptureSpec, trust_remote_code: bool) -> StreamedModel:
    """Return the model in float32, or in the capture's dtype where a layer would not fit."""
    found = StreamedModel(model, trust_remote_code=trust_remote_code)
    needed = found.largest_layer * 4 * _PEAK
    if needed <= _SHARE_OF_MEMORY * psutil.virtual_memory().available:
        return found
    return StreamedModel(
        model, dtype=torch_dtype(spec.compute_dtype), trust_remote_code=trust_remote_code
    )


def layers_alone(
    prompt: Prompt, limit: Limit, *, reference: StreamedModel, compute: str
) -> LayersAlone | None:
    """Return what computes each layer alone, or None where that tells nothing.

    Args:
        compute: the server's number format.
    """
    if limit.rounding is None or reference.dtype != torch.float32:
        return None
    return LayersAlone.of(prompt.states, prompt.positions, compute=torch_dtype(compute))


def chooses(text: Mapping[str, Any]) -> bool:
    """Return whether a model may choose experts or keys, where a near tie lets a row jump."""
    return any(value and _CHOICE.search(key) for key, value in text.items())


def _described(reference: StreamedModel) -> str:
    import transformers

    dtype = str(reference.dtype).removeprefix("torch.")
    return f"transformers {transformers.__version__} in {dtype}"


def _compared(names: Collection[str]) -> int:
    """Return how many decoder layers were compared: the first ones, without a gap."""
    return next(k for k in itertools.count() if f"r_{k}" not in names) - 1 if "r_0" in names else 0


def _positions(prompt: Prompt) -> str:
    """Return a prompt's length, and which positions were compared where some were not."""
    tokens, kept = len(prompt.input_ids), prompt.positions.tolist()
    gap = next((place for place, k in enumerate(kept) if k != place), None)
    if gap is None:
        return f"{tokens} tokens"
    return f"{tokens} tokens at positions 0 to {kept[gap - 1]} and {kept[gap]} to {kept[-1]}"


def _missing(names: Sequence[str]) -> str | None:
    """Return what was not compared since the server did not capture it."""
    return f"the server did not capture {', '.join(names)}" if names else None


def _parts(rows: int) -> list[slice]:
    """Return the first rows and the last rows; they overlap in a short prompt."""
    return [slice(rows)] if rows <= SHORT else [slice(SHORT), slice(rows - SHORT, rows)]


def _merged(found: Sequence[LayerParity], *, rows: int) -> list[LayerParity]:
    """Return one entry for each layer: that with the larger median; NaN is larger than all."""
    by_layer: dict[str, list[LayerParity]] = {}
    for each in found:
        by_layer.setdefault(each.layer, []).append(each)
    return [
        dataclasses.replace(
            max(parts, key=_badness),
            rows=rows,
            strays=max(part.strays for part in parts),
            worst=max((part.worst for part in parts), key=_size),
        )
        for parts in sorted(by_layer.values(), key=lambda parts: _place(parts[0].layer))
    ]


def _badness(layer: LayerParity) -> tuple[bool, float]:
    return (fault(layer) is not None, _size(layer.median))


def _size(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _place(layer: str) -> float:
    return math.inf if layer == "post_norm" else int(layer.removeprefix("r_"))


def _result(compared: int, reason: str | None, num_layers: int) -> str:
    if reason is None:
        return f"all {num_layers} layers"
    return f"first {compared} layers ({reason})" if compared else f"none ({reason})"

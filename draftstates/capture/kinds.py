"""Kinds of servers and models that capture cannot use, told by what the loaded runner holds.

A flag may have another name, or be SGLang's own choice; these are the facts that follow from it.
What is not known here is caught at the first capture: a tap that sees no rows, or other rows than
the batch has, refuses the request.
"""

from collections.abc import Iterator
from typing import Any

import torch

from draftstates.capture.seams import find
from draftstates.model.family import HEAD_BIAS, LogitForm

_HEAD = "ParallelLMHead"


def unreachable(runner: Any, parallel: Any) -> Iterator[str]:
    """Yield why the states of this server's layers cannot be read; nothing for a server that works.

    Args:
        runner: SGLang's `ModelRunner`, loaded.
        parallel: SGLang's parallel context.
    """
    if parallel.pp_size > 1:
        yield (
            "it is pipeline parallel, so that no rank sees all layers; use tensor or data parallel"
        )
    context = {"context parallel": "attn_cp_size", "decode context parallel": "dcp_size"}
    for kind, name in context.items():
        if _size(parallel, name) > 1:
            yield f"it is {kind}, so that a rank sees a part of a sequence; use tensor parallel"
    algorithm = getattr(runner, "spec_algorithm", None)
    if algorithm is not None and not algorithm.is_none():
        yield "it decodes speculatively, with a second model; start it without a drafter"
    sequence_parallel = find(("sglang.srt.layers.layernorm_sp", "layernorm_sp_enabled"))
    if sequence_parallel is not None and sequence_parallel():
        yield "its norms are sequence parallel, so that a rank sees a part of the rows"
    overlap = getattr(_settings("get_exec"), "overlap", None)
    if getattr(overlap, "enable_two_batch_overlap", False) or getattr(
        runner.server_args, "enable_two_batch_overlap", False
    ):
        yield "it overlaps two batches, whose layers do not run one after the other"
    split = _settings("get_disagg")
    if getattr(split, "enable_pdmux", False):
        yield "it multiplexes prefill and decode (pdmux), whose layers do not run in one pass"
    if getattr(split, "disaggregation_mode", "null") not in (None, "null"):
        yield (
            "its prefill and decode are disaggregated: it answers no request by itself; start a"
            " server of its own"
        )


def check_logits(model: torch.nn.Module, expected: LogitForm) -> None:
    """Refuse a model whose logits are scaled or capped in another way than its `config.json` says,
    or whose head has a bias, which SGLang loads and leaves out.

    Args:
        model: the loaded model.
        expected: `family.logits` of the model's configuration.

    Raises:
        SystemExit: names both forms, or the bias.
    """
    for name, module in model.named_modules():
        bias = getattr(module, "bias", None)
        if type(module).__name__ == _HEAD and bias is not None and bool(bias.any()):
            raise SystemExit(f"draftstates: {name}.bias: {HEAD_BIAS}")
        if not hasattr(module, "logit_scale") or not hasattr(module, "final_logit_softcapping"):
            continue
        scale = module.logit_scale
        found = LogitForm(
            scale=1.0 if scale is None else float(scale),
            cap=float(module.final_logit_softcapping or 0) or None,
        )
        if abs(found.scale - expected.scale) > 1e-6 * abs(expected.scale) or (
            found.cap != expected.cap
        ):
            raise SystemExit(
                f"draftstates: alignment would compute the logits as {expected}, but SGLang"
                f" computes them as {found}: this model's configuration is not understood"
            )


def _size(parallel: Any, name: str) -> int:
    """Return the size of a parallel group; 1 for a group that this server or version has not."""
    try:
        return getattr(parallel, name, 1) or 1
    except AssertionError:
        # SGLang 0.5.17 asserts that the group was made.
        return 1


def _settings(name: str) -> Any:
    get = find(("sglang.srt.runtime_context", name))
    return get() if get is not None else None

"""The self-test's part in parity: rows of every layer, kept for the comparison with the checkpoint.

The first server of a capture keeps its rows. Every later server, a restarted one or a replica,
must capture the same rows within rounding. So the comparison of the kept rows holds for all of
them, and a shard's receipts name the rows that its server agreed with.
"""

import dataclasses
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftstates import ids
from draftstates.capture.every_layer import read_kept_rows
from draftstates.errors import UserError, make_again
from draftstates.extract.client import Endpoint, Work
from draftstates.extract.extract import ExtractOptions, capture
from draftstates.extract.protocol import SELF_TEST, kept_positions
from draftstates.plan.shard_tokens import ShardTokens
from draftstates.shards import layout
from draftstates.shards.layout import Shard
from draftstates.shards.selftest_rows import Prompt, SelftestRows
from draftstates.spec import CaptureSpec
from draftstates.verify.parity.check import compare_rows, limit_of
from draftstates.verify.parity.compare import fault

_SEED = 20261201


def keep_or_compare(
    path: Path,
    *,
    folder: Path,
    tokens: int,
    text: Mapping[str, Any],
    endpoint: Endpoint,
    spec: CaptureSpec,
) -> str:
    """Capture a prompt in every layer, and keep its rows or compare them with the kept ones.

    Args:
        path: file of the kept rows.
        folder: folder below the server's root to capture in.
        tokens: tokens of the prompt.
        text: the language model's part of `config.json`.

    Returns:
        id of the kept rows.

    Raises:
        UserError: the server captured other rows than the kept ones; the message names the layer,
            the distance found and the limit.
    """
    kept = SelftestRows.read(path) if path.exists() else None
    if kept is not None and kept.capture_key != spec.key:
        raise UserError(
            f"{path}: expected rows of capture {spec.key[:16]}…, found"
            f" {kept.capture_key[:16]}…; {make_again('to have the server test itself again', path)}"
        )
    prompts = [prompt.input_ids.numpy() for prompt in kept.prompts] if kept else []
    if tokens not in map(len, prompts):
        prompts.append(_prompt(tokens, text["vocab_size"]))
    captured = _capture(prompts, folder=folder, endpoint=endpoint, spec=spec)
    if kept is None:
        first = SelftestRows(id=uuid.uuid4().hex, capture_key=spec.key, prompts=captured)
        kept = _publish_first(first, path)
        if kept is first:
            return first.id
    check_same(captured, kept, path=path, spec=spec, text=text)
    if more := captured[len(kept.prompts) :]:
        _replace(dataclasses.replace(kept, prompts=(*kept.prompts, *more)), path)
    return kept.id


def check_same(
    prompts: Sequence[Prompt],
    kept: SelftestRows,
    *,
    path: Path,
    spec: CaptureSpec,
    text: Mapping[str, Any],
) -> None:
    """Refuse a server that captured other rows than an earlier server of the same capture.

    Args:
        prompts: the server's rows.
        kept: the earlier server's.
        path: file of the kept rows, for the message.
        text: the language model's part of `config.json`.

    Raises:
        UserError: names the layer, the distance found and the limit.
    """
    limit = limit_of(spec, text=text)
    by_ids = {ids.ids_hash(prompt.input_ids.numpy()): prompt for prompt in prompts}
    for old in kept.prompts:
        new = by_ids.get(ids.ids_hash(old.input_ids.numpy()))
        if new is None:
            continue
        for layer in compare_rows(new, old.states, limit=limit):
            if what := fault(layer):
                raise UserError(
                    f"this server computes other rows than the one whose rows {path} holds, and"
                    f" that parity compares: {what.replace('the checkpoint', 'that server')}: start"
                    " servers of one version, with the same arguments"
                )


def _prompt(tokens: int, vocabulary: int) -> np.ndarray:
    """Return the ids of the prompt of this length, int32; they are always the same."""
    return np.random.default_rng([_SEED, tokens]).integers(0, vocabulary, tokens).astype(np.int32)


def _capture(
    prompts: Sequence[np.ndarray], *, folder: Path, endpoint: Endpoint, spec: CaptureSpec
) -> tuple[Prompt, ...]:
    shard = folder / "every-layer.safetensors"
    names = [ids.sample_id(prompt, np.ones(len(prompt))) for prompt in prompts]
    lengths = [len(prompt) for prompt in prompts]
    input_ids = np.concatenate(prompts)
    tokens = ShardTokens(
        shard_id=ids.shard_id(names),
        sample_ids=names,
        lengths=lengths,
        input_ids=input_ids,
        loss_mask=np.ones(len(input_ids), np.uint8),
    )
    layout.create(shard, spec=spec, **vars(tokens))
    starts = np.cumsum([0, *lengths])[:-1].tolist()
    work = [
        Work(sample_id=name, shard=shard, first_row=start, input_ids=prompt, kind=SELF_TEST)
        for name, start, prompt in zip(names, starts, prompts, strict=True)
    ]
    capture(work, endpoint=endpoint, options=ExtractOptions(retries=0))
    return tuple(
        _kept(shard, number, first_row=start, ids_sent=prompt, spec=spec)
        for number, (start, prompt) in enumerate(zip(starts, prompts, strict=True))
    )


def _kept(
    shard: Path, number: int, *, first_row: int, ids_sent: np.ndarray, spec: CaptureSpec
) -> Prompt:
    """Return one prompt's rows: those of the captured layers as they lie in the shard.

    Every other layer, and a final state that is not captured, are the self-test's own rows.
    """
    rows = read_kept_rows(shard, first_row=first_row)
    positions = rows.pop("positions", torch.empty(0))
    expected = kept_positions(len(ids_sent))
    if positions.tolist() != expected:
        raise UserError(
            f"the server kept {len(positions)} rows of every layer, expected {len(expected)}: its"
            " plug-in is of another version"
        )
    sample = Shard(shard).sample(number)
    for place, k in enumerate(spec.residual_layers):
        rows[f"r_{k}"] = sample["hidden_states"][positions, place].clone()
    if spec.final_state:
        final = "post_norm" if spec.final_norm == "post_norm" else f"r_{spec.num_layers}"
        rows[final] = sample["final_hidden_state"][positions].clone()
    return Prompt(input_ids=torch.from_numpy(ids_sent.copy()), positions=positions, states=rows)


def _publish_first(rows: SelftestRows, path: Path) -> SelftestRows:
    """Keep the rows unless another server has kept its rows meanwhile; return what is kept."""
    partial = _partial(path)
    rows.save(partial)
    try:
        os.link(partial, path)
    except FileExistsError:
        return SelftestRows.read(path)
    finally:
        partial.unlink(missing_ok=True)
    return rows


def _replace(rows: SelftestRows, path: Path) -> None:
    partial = _partial(path)
    rows.save(partial)
    os.replace(partial, path)


def _partial(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")

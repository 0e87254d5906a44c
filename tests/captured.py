"""A captured shard made without a server.

It has a tiny model's head, random states, and receipts as a server writes them.
"""

import base64
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from draftstates import ids
from draftstates.model.digest import capture_spec
from draftstates.model.folder import ModelFolder
from draftstates.plan.prefixes import Segments, shard_id, share_prefixes
from draftstates.plan.recaptures import choose_compared, choose_recaptures
from draftstates.records import (
    Accounting,
    LayerParity,
    Parity,
    Plan,
    PlannedChecks,
    PlannedShard,
    ShardReceipts,
    SourceAccount,
    Verified,
)
from draftstates.shards import layout
from draftstates.spec import CaptureSpec, torch_dtype
from draftstates.verify.verify import verify_shard

HIDDEN, VOCABULARY, LAYERS, END_TOKEN = 64, 400, (2, 4, 5), 7
# id of the self-test rows that the capturing server agreed with
SELFTEST = "5e1f" * 8
CHECKS = PlannedChecks(recapture_fraction=0.01, recapture_minimum=3)


@dataclasses.dataclass
class Captured:
    """States of a shard's samples as the server captured them.

    A test may spoil them before `write`.

    Attributes:
        hidden: r_k of each sample, [n, K, H].
        final: the final state of each sample, [n, H].
        top: the next tokens that belong to each final state.
        recaptures: pairs (position, rows).
        again_hidden: r_k of each prefix recapture.
        again_final: the final state of each prefix recapture.
        again_next: the next tokens that belong to each of these final states.
        segments: places of the samples' rows where some share rows.
    """

    spec: CaptureSpec
    model: Path
    tokens: list[np.ndarray]
    masks: list[np.ndarray]
    hidden: list[torch.Tensor]
    final: list[torch.Tensor]
    top: list[list[list[float]]]
    recaptures: list[tuple[int, int]]
    again_hidden: list[torch.Tensor]
    again_final: list[torch.Tensor]
    again_next: list[list[list[list[float]]]]
    segments: Segments | None = None

    @property
    def names(self) -> list[str]:
        return [
            ids.sample_id(tokens, mask)
            for tokens, mask in zip(self.tokens, self.masks, strict=True)
        ]

    @property
    def shard_id(self) -> str:
        return shard_id(self.names, self.segments)


@dataclasses.dataclass(frozen=True)
class Files:
    """Files that extraction leaves of a shard, and the plan that asked for the shard."""

    shard_id: str
    plan: Plan
    model: Path
    shard: Path
    recaptures: Path
    receipts: Path

    def change_receipts(self, change: Callable[[dict[str, Any]], None]) -> None:
        said = json.loads(self.receipts.read_text())
        change(said)
        self.receipts.write_text(json.dumps(said))


def tiny_model(folder: Path) -> Path:
    """Write a folder that holds only a Llama's config, final norm and head."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 8,
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    weights = {
        "model.norm.weight": torch.rand(HIDDEN, generator=generator) + 0.5,
        "lm_head.weight": torch.randn(VOCABULARY, HIDDEN, generator=generator) * 0.4,
    }
    save_file(
        {name: tensor.bfloat16() for name, tensor in weights.items()}, folder / "model.safetensors"
    )
    return folder


def capture(model: Path, *, samples: int = 12, seed: int = 0, **changes: Any) -> Captured:
    """Capture random samples that all end in the same token, as whole chats do.

    Their most likely next token is mostly the same one too.

    Args:
        changes: fields of the configuration's `capture` section.
    """
    section = {
        "final_norm": "post_norm",
        "stored_dtype": "bfloat16",
        "compute_dtype": "bfloat16",
        **changes,
    }
    spec = capture_spec(
        ModelFolder(model), name="tiny", capture={"residual_layers": list(LAYERS), **section}
    )
    draw = np.random.default_rng(seed)
    lengths = draw.integers(6, 40, samples).tolist()
    tokens = [
        np.append(draw.integers(10, VOCABULARY, n - 1), END_TOKEN).astype(np.int32) for n in lengths
    ]
    masks = [(np.arange(n) % 3 > 0).astype(np.uint8) for n in lengths]
    return states_of(tokens, masks, spec=spec, model=model, seed=seed)


def capture_sharing(model: Path, *, samples: int = 12, seed: int = 0, **changes: str) -> Captured:
    """Capture samples, most of which begin as an earlier one does, and share its rows."""
    apart = capture(model, samples=samples, seed=seed, **changes)
    tokens: list[np.ndarray] = []
    for number, part in enumerate(apart.tokens):
        head = tokens[number // 2][: 4 * (number % 4)] if tokens else part[:0]
        tokens.append(np.concatenate([head, part]))
    masks = [(np.arange(len(part)) % 3 > 0).astype(np.uint8) for part in tokens]
    segments = share_prefixes(np.concatenate(tokens), list(map(len, tokens)), minimum=4)
    return states_of(tokens, masks, spec=apart.spec, model=model, seed=seed, segments=segments)


def states_of(
    tokens: list[np.ndarray],
    masks: list[np.ndarray],
    *,
    spec: CaptureSpec,
    model: Path,
    seed: int = 0,
    segments: Segments | None = None,
) -> Captured:
    """Make states of these samples that verification accepts.

    Args:
        tokens: ids of each sample, int32 [n].
        masks: mask of each sample, uint8 [n].
        model: folder with the final norm and the head.
        segments: places of the samples' rows where some share rows.
    """
    lengths = [len(part) for part in tokens]
    generator = torch.Generator().manual_seed(seed)
    hidden = [
        torch.randn(n, len(spec.residual_layers), spec.hidden_size, generator=generator).to(
            spec.torch_dtype
        )
        for n in lengths
    ]
    last = [_last_residual(model, n, generator, spec) for n in lengths]
    if segments:
        hidden, last = _shared_rows(hidden, segments), _shared_rows(last, segments)
    final, logprobs = zip(*(_final_states(model, rows, spec) for rows in last), strict=True)
    names = [ids.sample_id(t, m) for t, m in zip(tokens, masks, strict=True)]
    recaptures = choose_recaptures(
        names,
        lengths,
        shard_id=shard_id(names, segments),
        fraction=0.01,
        minimum=3,
        segments=segments,
    )
    again_hidden = [
        _batched_otherwise(hidden[position][:rows], generator, spec)
        for position, rows in recaptures
    ]
    again_last = [
        _batched_otherwise(last[position][:rows], generator, spec) for position, rows in recaptures
    ]
    again_final, again_logprobs = zip(
        *(_final_states(model, rows, spec) for rows in again_last), strict=True
    )
    if spec.num_layers in spec.residual_layers:
        for states, rows in zip(hidden + again_hidden, last + again_last, strict=True):
            states[:, spec.residual_layers.index(spec.num_layers)] = rows.to(spec.torch_dtype)
    return Captured(
        spec,
        model,
        tokens,
        masks,
        hidden,
        list(final),
        [most_likely(each[-1], 5) for each in logprobs],
        recaptures,
        again_hidden,
        list(again_final),
        [
            next_tokens(found, tokens[position][1:rows])
            for found, (position, rows) in zip(again_logprobs, recaptures, strict=True)
        ],
        segments,
    )


def _shared_rows(states: Sequence[torch.Tensor], segments: Segments) -> list[torch.Tensor]:
    """Give each sample the rows of an earlier one that it shares."""
    own = torch.cat([part[segments.shared(index) :] for index, part in enumerate(states)])
    return [own[segments.row_numbers(index)] for index in range(len(states))]


def most_likely(logprobs: torch.Tensor, count: int) -> list[list[float]]:
    best = logprobs.topk(count)
    return [
        [int(token), float(value)] for token, value in zip(best.indices, best.values, strict=True)
    ]


def next_tokens(logprobs: torch.Tensor, following: np.ndarray) -> list[list[list[float]]]:
    """Return each row's two most likely tokens and the one that follows; the last row's is drawn.

    Args:
        logprobs: [n, V].
        following: ids of the tokens behind the first n - 1 rows.
    """
    drawn = [*following.tolist(), int(logprobs[-1].argmax())]
    return [
        [*most_likely(row, 2), [token, float(row[token])]]
        for row, token in zip(logprobs, drawn, strict=True)
    ]


def _last_residual(
    model: Path, rows: int, generator: torch.Generator, spec: CaptureSpec
) -> torch.Tensor:
    """Return r_N of one sample, [n, H] in the compute dtype."""
    from safetensors.torch import load_file

    compute = torch_dtype(spec.compute_dtype)
    head = load_file(model / "model.safetensors")["lm_head.weight"].to(compute)
    drawn = torch.randn(rows, spec.hidden_size, generator=generator) * 3
    return (drawn + 5 * head[END_TOKEN + 1].float()).to(compute)


def _final_states(
    model: Path, residual: torch.Tensor, spec: CaptureSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the final states as stored, and log probabilities, [n, V], of r_N.

    They are those that a server which computes in `compute_dtype` returns.
    """
    from safetensors.torch import load_file

    weights = load_file(model / "model.safetensors")
    compute = torch_dtype(spec.compute_dtype)
    head, norm = weights["lm_head.weight"].to(compute), weights["model.norm.weight"].to(compute)
    wide = residual.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(compute) * norm
    logprobs = (normed @ head.T).float().log_softmax(-1)
    stored = normed if spec.final_norm == "post_norm" else residual
    return stored.to(spec.torch_dtype), logprobs


def _batched_otherwise(
    rows: torch.Tensor, generator: torch.Generator, spec: CaptureSpec
) -> torch.Tensor:
    """Return the same rows from another batch: the last bits that the server computed differ."""
    noise = (
        torch.randn(rows.shape, generator=generator)
        * torch.finfo(torch_dtype(spec.compute_dtype)).eps
    )
    return (rows.float() * (1 + noise)).to(rows.dtype)


def write(captured: Captured, folder: Path) -> Files:
    """Write the captured states, with receipts that agree with them.

    The receipts also agree with states that a test has spoilt.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shard_id, spec = captured.shard_id, captured.spec
    files = Files(
        shard_id=shard_id,
        plan=plan_of(captured),
        model=captured.model,
        shard=folder / f"{shard_id}.safetensors",
        recaptures=folder / f"{shard_id}.recaptures.safetensors",
        receipts=folder / f"{shard_id}.receipts.json",
    )
    names, positions = captured.names, [position for position, _ in captured.recaptures]
    samples = _fill(
        files.shard,
        captured,
        names,
        captured.tokens,
        captured.masks,
        captured.hidden,
        captured.final,
        captured.segments,
    )
    for position in compared_of(captured):
        samples[position]["again_rows"] = captured.segments.shared(position)
    prefix_tokens = [captured.tokens[position][:rows] for position, rows in captured.recaptures]
    prefix_masks = [captured.masks[position][:rows] for position, rows in captured.recaptures]
    prefix_names = [names[position] for position in positions]
    recaptures = _fill(
        files.recaptures,
        captured,
        prefix_names,
        prefix_tokens,
        prefix_masks,
        captured.again_hidden,
        captured.again_final,
    )
    said = {
        "format": "draftstates.receipts",
        "format_version": ShardReceipts.VERSION,
        "shard_id": shard_id,
        "capture_key": spec.key,
        "engine": {"name": "sglang", "version": "0.5.23"},
        "images": {"server": [None], "extract": [None]},
        "samples": [
            {**entry, "prompt_tokens": len(sent), "top": top, "attempts": 1}
            for entry, sent, top in zip(samples, captured.tokens, captured.top, strict=True)
        ],
        "recaptures": [
            {**entry, "position": position, "next_tokens": found}
            for entry, position, found in zip(
                recaptures, positions, captured.again_next, strict=True
            )
        ],
        "selftests": [SELFTEST],
    }
    files.receipts.write_text(json.dumps(said))
    return files


def compared_of(captured: Captured) -> set[int]:
    """Return the samples whose shared rows the server compares with the stored ones."""
    return choose_compared(
        captured.names,
        captured.segments,
        shard_id=captured.shard_id,
        fraction=CHECKS.recapture_fraction,
    )


def verify(files: Files, *, threads: int = 1) -> Verified:
    """Verify the shard as the command does."""
    return verify_shard(
        files.plan.shards[0],
        spec=files.plan.capture,
        checks=files.plan.checks,
        model=files.model,
        shard=files.shard,
        recaptures=files.recaptures,
        receipts=files.receipts,
        threads=threads,
    )


def parity_of(spec: CaptureSpec, **changes: Any) -> Parity:
    """Return a comparison of the capturing server with the checkpoint, all layers right."""
    layer = LayerParity(
        layer="r_8",
        rows=64,
        median=1e-3,
        worst=2e-3,
        limit=0.03,
        neighbours={"r_7": 0.5},
        strays=0.0,
        alone=2e-4,
        alone_limit=6e-4,
        alone_worst=4e-4,
    )
    found = Parity(
        capture_key=spec.key,
        selftest=SELFTEST,
        result="all 8 layers",
        compared=8,
        layers=(layer,),
        prompts=(64,),
        covered={},
        beyond={"sliding_window": 4096},
        reference="transformers 5 in float32, 64 tokens",
        asked={"tokens": "4352", "layers": "all", "code": "0"},
        seconds=1.0,
    )
    return dataclasses.replace(found, **changes)


def plan_of(captured: Captured, *, source: str = "demo") -> Plan:
    """Return a plan of this one shard."""
    tokens = sum(map(len, captured.tokens))
    supervised = int(sum(mask.sum() for mask in captured.masks))
    counts = {"samples": len(captured.tokens), "tokens": tokens, "supervised_tokens": supervised}
    rows = len(captured.tokens)
    account = SourceAccount(rows_in=rows, kept=rows, skipped={}, failed={}, **counts)
    segments = captured.segments or Segments.unshared(list(map(len, captured.tokens)))
    size = captured.spec.shard_bytes(
        samples=counts["samples"],
        tokens=tokens,
        rows=segments.rows,
        segments=len(segments.places) if captured.segments else 0,
    )
    shared = {"shared_tokens": tokens - segments.rows, "bytes": size}
    return Plan(
        capture_folder=captured.spec.folder_name,
        capture=captured.spec,
        checks=CHECKS,
        shards=(PlannedShard(shard_id=captured.shard_id, source=source, **shared, **counts),),
        accounting=Accounting(sources={source: account}, totals=account),
        images={"tokenise": (None,), "plan": (None,)},
        bytes_needed=size,
        bytes_present=0,
        disk_free=0,
    )


def _fill(
    path: Path,
    captured: Captured,
    names: list[str],
    tokens: list[np.ndarray],
    masks: list[np.ndarray],
    hidden: list[torch.Tensor],
    final: list[torch.Tensor],
    segments: Segments | None = None,
) -> list[dict[str, Any]]:
    """Lay out a file, fill it in as the server does, and return the receipts of its samples."""
    lengths = [len(part) for part in tokens]
    header = layout.create(
        path,
        spec=captured.spec,
        shard_id=captured.shard_id,
        sample_ids=names,
        lengths=lengths,
        input_ids=np.concatenate(tokens),
        loss_mask=np.concatenate(masks),
        segments=segments,
    )
    places, receipts = segments or Segments.unshared(lengths), []
    with open(path, "r+b") as file:
        for index, (name, ids_sent, *states) in enumerate(
            zip(names, tokens, hidden, final, strict=True)
        ):
            first, shared = int(places.ends[index]), places.shared(index)
            by_name = dict(zip(("hidden_states", "final_hidden_state"), states, strict=True))
            raw = {tensor: _bytes(by_name[tensor][shared:]) for tensor in header.states()}
            for tensor, (begin, width) in header.states().items():
                file.seek(begin + first * width)
                file.write(raw[tensor])
            receipts.append(
                {
                    "sample_id": name,
                    "first_row": first,
                    "rows": len(ids_sent) - shared,
                    "shared_rows": shared,
                    "chunks": 1,
                    "cached_tokens": 0,
                    "ids_hash": ids.ids_hash(ids_sent),
                    "checksum": layout.sample_checksum(*raw.values()),
                    "last_state": None
                    if captured.spec.final_state
                    else base64.b64encode(_bytes(states[1][-1:])).decode(),
                }
            )
    return receipts


def _bytes(states: torch.Tensor) -> bytes:
    return states.contiguous().view(torch.uint8).numpy().tobytes()

"""A captured shard made without a server: a tiny model's head, random states, and the receipts that a server would give of them."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from draftstates import ids, shards
from draftstates.capture_spec import CaptureSpec, torch_dtype
from draftstates.model import capture_spec, read_model
from draftstates.plan_file import FORMAT, FORMAT_VERSION
from draftstates.probes import choose_probes

HIDDEN, VOCABULARY, LAYERS, END_TOKEN = 64, 400, (2, 4, 5), 7
CHECKS = {"probe_fraction": 0.01, "probe_minimum": 3}


@dataclasses.dataclass
class Captured:
    """States of a shard's samples, to be spoilt at will before `write`: what the server then captured.

    Attributes:
        hidden: r_k of each sample, [n, K, H]; final: its final state, [n, H]; top: the next tokens that belong to it.
        probes: (position, rows); again_hidden, again_final: what the second capture gave.
    """

    spec: CaptureSpec
    model: Path
    tokens: list[np.ndarray]
    masks: list[np.ndarray]
    hidden: list[torch.Tensor]
    final: list[torch.Tensor]
    top: list[list[list[float]]]
    probes: list[tuple[int, int]]
    again_hidden: list[torch.Tensor]
    again_final: list[torch.Tensor]

    @property
    def names(self) -> list[str]:
        return [ids.sample_id(tokens, mask) for tokens, mask in zip(self.tokens, self.masks, strict=True)]

    @property
    def shard_id(self) -> str:
        return ids.shard_id(self.names)


@dataclasses.dataclass(frozen=True)
class Files:
    """What extraction leaves of a shard, and the plan that asked for it."""

    shard_id: str
    plan: dict[str, Any]
    model: Path
    shard: Path
    probe: Path
    receipts: Path

    def change_receipts(self, change: Callable[[dict[str, Any]], None]) -> None:
        said = json.loads(self.receipts.read_text())
        change(said)
        self.receipts.write_text(json.dumps(said))


def tiny_model(folder: Path) -> Path:
    """A folder that holds a Llama's config, final norm and head, and nothing between."""
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
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def capture(model: Path, *, samples: int = 12, seed: int = 0, **changes: str) -> Captured:
    """Capture random samples that all end in the same token, most likely followed by the same token, as whole chats do.

    Args:
        changes: fields of the configuration's `capture` section.
    """
    section = {"final_norm": "post_norm", "stored_dtype": "bfloat16", "compute_dtype": "bfloat16", **changes}
    spec = capture_spec(read_model(model), name="tiny", capture={"residual_layers": list(LAYERS), **section})
    draw = np.random.default_rng(seed)
    lengths = draw.integers(6, 40, samples).tolist()
    tokens = [np.append(draw.integers(10, VOCABULARY, n - 1), END_TOKEN).astype(np.int32) for n in lengths]
    masks = [(np.arange(n) % 3 > 0).astype(np.uint8) for n in lengths]
    generator = torch.Generator().manual_seed(seed)
    hidden = [torch.randn(n, len(LAYERS), HIDDEN, generator=generator).to(spec.torch_dtype) for n in lengths]
    final, top = zip(*(_final_states(model, n, generator, spec) for n in lengths), strict=True)
    names = [ids.sample_id(t, m) for t, m in zip(tokens, masks, strict=True)]
    probes = choose_probes(names, lengths, shard_id=ids.shard_id(names), fraction=0.01, minimum=3)
    again_hidden = [_batched_otherwise(hidden[position][:rows], generator, spec) for position, rows in probes]
    again_final = [_batched_otherwise(final[position][:rows], generator, spec) for position, rows in probes]
    return Captured(spec, model, tokens, masks, hidden, list(final), list(top), probes, again_hidden, again_final)


def _final_states(model: Path, rows: int, generator: torch.Generator, spec: CaptureSpec) -> tuple[torch.Tensor, list[list[float]]]:
    """Final states of one sample as stored, and the top 5 that a server which computes in `compute_dtype` returns."""
    from safetensors.torch import load_file

    weights = load_file(model / "model.safetensors")
    compute = torch_dtype(spec.compute_dtype)
    head, norm = weights["lm_head.weight"].to(compute), weights["model.norm.weight"].to(compute)
    residual = torch.randn(rows, HIDDEN, generator=generator) * 3 + 5 * head[END_TOKEN + 1].float()
    residual = residual.to(compute)
    wide = residual.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(compute) * norm
    logprobs = (normed[-1] @ head.T).float().log_softmax(-1)
    best = logprobs.topk(5)
    top = [[int(token), float(value)] for token, value in zip(best.indices, best.values, strict=True)]
    return (normed if spec.final_norm == "post_norm" else residual).to(spec.torch_dtype), top


def _batched_otherwise(rows: torch.Tensor, generator: torch.Generator, spec: CaptureSpec) -> torch.Tensor:
    """The same rows from another batch: the last bits that the server computed differ."""
    noise = torch.randn(rows.shape, generator=generator) * torch.finfo(torch_dtype(spec.compute_dtype)).eps
    return (rows.float() * (1 + noise)).to(rows.dtype)


def write(captured: Captured, folder: Path) -> Files:
    """Write what was captured, with receipts that agree with it, whatever was done to the states before."""
    folder.mkdir(parents=True, exist_ok=True)
    shard_id, spec = captured.shard_id, captured.spec
    files = Files(
        shard_id=shard_id,
        plan=plan_of(captured),
        model=captured.model,
        shard=folder / f"{shard_id}.safetensors",
        probe=folder / f"{shard_id}.probe.safetensors",
        receipts=folder / f"{shard_id}.receipts.json",
    )
    names, positions = captured.names, [position for position, _ in captured.probes]
    samples = _fill(files.shard, captured, names, captured.tokens, captured.masks, captured.hidden, captured.final)
    prefix_tokens = [captured.tokens[position][:rows] for position, rows in captured.probes]
    prefix_masks = [captured.masks[position][:rows] for position, rows in captured.probes]
    prefix_names = [names[position] for position in positions]
    probes = _fill(files.probe, captured, prefix_names, prefix_tokens, prefix_masks, captured.again_hidden, captured.again_final)
    said = {
        "format": "draftstates.receipts",
        "format_version": 1,
        "shard_id": shard_id,
        "capture_key": spec.key,
        "engine": {"name": "sglang", "version": "0.5.23"},
        "samples": [
            {**entry, "prompt_tokens": entry["rows"], "top": top, "attempts": 1} for entry, top in zip(samples, captured.top, strict=True)
        ],
        "probes": [{**entry, "position": position} for entry, position in zip(probes, positions, strict=True)],
    }
    files.receipts.write_text(json.dumps(said))
    return files


def plan_of(captured: Captured, *, source: str = "demo") -> dict[str, Any]:
    """A plan of this one shard, as it is read from its file."""
    tokens = sum(map(len, captured.tokens))
    supervised = int(sum(mask.sum() for mask in captured.masks))
    counts = {"samples": len(captured.tokens), "tokens": tokens, "supervised_tokens": supervised}
    account = {"rows_in": len(captured.tokens), "kept": len(captured.tokens), "skipped": {}, "failed": {}, **counts}
    size = shards.shard_bytes(spec=captured.spec, samples=counts["samples"], tokens=tokens)
    plan = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "run": captured.spec.run_name,
        "capture": {**dataclasses.asdict(captured.spec), "key": captured.spec.key},
        "checks": CHECKS,
        "shards": [{"shard_id": captured.shard_id, "source": source, "bytes": size, **counts}],
        "accounting": {"sources": {source: account}, "totals": account},
    }
    return json.loads(json.dumps(plan))


def _fill(
    path: Path,
    captured: Captured,
    names: list[str],
    tokens: list[np.ndarray],
    masks: list[np.ndarray],
    hidden: list[torch.Tensor],
    final: list[torch.Tensor],
) -> list[dict[str, Any]]:
    """Lay out a file, fill it in as the server does, and give the receipts of its samples."""
    header = shards.create(
        path,
        spec=captured.spec,
        shard_id=captured.shard_id,
        sample_ids=names,
        lengths=[len(part) for part in tokens],
        input_ids=np.concatenate(tokens),
        loss_mask=np.concatenate(masks),
    )
    receipts, first = [], 0
    with open(path, "r+b") as file:
        for name, ids_sent, *states in zip(names, tokens, hidden, final, strict=True):
            raw = [part.contiguous().view(torch.uint8).numpy().tobytes() for part in states]
            for content, (begin, width) in zip(raw, header.states().values(), strict=True):
                file.seek(begin + first * width)
                file.write(content)
            receipts.append(
                {
                    "sample_id": name,
                    "first_row": first,
                    "rows": len(ids_sent),
                    "chunks": 1,
                    "cached_tokens": 0,
                    "ids_hash": ids.ids_hash(ids_sent),
                    "checksum": shards.sample_checksum(*raw),
                }
            )
            first += len(ids_sent)
    return receipts

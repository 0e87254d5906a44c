"""A manifest of random states, laid out as the workflow lays it out, for what reads manifests."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from draftstates import ids, shards
from draftstates.capture_spec import CaptureSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synthetic:
    """A written manifest and, per sample id, what was written."""

    path: Path
    spec: CaptureSpec
    samples: dict[str, dict[str, torch.Tensor]]


def capture_spec(
    *,
    layers: Sequence[int] = (2, 3, 5),
    num_layers: int = 8,
    hidden_size: int = 16,
    final_norm: str = "pre_norm",
    stored_dtype: str = "bfloat16",
    model_digest: str = "of no model",
) -> CaptureSpec:
    return CaptureSpec(
        model="tiny",
        model_digest=model_digest,
        compute_dtype="float32",
        quantization=None,
        stored_dtype=stored_dtype,
        num_layers=num_layers,
        hidden_size=hidden_size,
        residual_layers=tuple(layers),
        final_norm=final_norm,
    )


def planned(spec: CaptureSpec) -> dict[str, object]:
    """A capture as a plan holds it."""
    return {**dataclasses.asdict(spec), "key": spec.key}


def sample(length: int, *, spec: CaptureSpec, seed: int) -> dict[str, torch.Tensor]:
    """Random tokens below 100, a mask whose last half is set, normal states."""
    rng = torch.Generator().manual_seed(seed)
    layers = len(spec.residual_layers)
    return {
        "input_ids": torch.randint(0, 100, (length,), generator=rng, dtype=torch.int32),
        "loss_mask": (torch.arange(length) >= length // 2).to(torch.uint8),
        "hidden_states": torch.randn(length, layers, spec.hidden_size, generator=rng).to(spec.torch_dtype),
        "final_hidden_state": torch.randn(length, spec.hidden_size, generator=rng).to(spec.torch_dtype),
    }


def write_shard(path: Path, samples: list[dict[str, torch.Tensor]], *, spec: CaptureSpec) -> str:
    """Write a whole shard; returns its id."""
    names = [ids.sample_id(s["input_ids"].numpy(), s["loss_mask"].numpy()) for s in samples]
    shard_id = ids.shard_id(names)
    path = path / f"{shard_id}.safetensors"
    header = shards.create(
        path,
        spec=spec,
        shard_id=shard_id,
        sample_ids=names,
        lengths=[len(s["input_ids"]) for s in samples],
        input_ids=torch.cat([s["input_ids"] for s in samples]).numpy(),
        loss_mask=torch.cat([s["loss_mask"] for s in samples]).numpy(),
    )
    with open(path, "r+b") as file:
        for name, (begin, _) in header.states().items():
            file.seek(begin)
            file.write(torch.cat([s[name] for s in samples]).view(torch.uint8).numpy().tobytes())
    return shard_id


def write_manifest(folder: Path, contents: Sequence[Sequence[dict[str, torch.Tensor]]], *, spec: CaptureSpec) -> Synthetic:
    """Write the shards, one per inner list, with `manifest.json` and `samples.parquet` beside them."""
    (folder / "shards").mkdir(parents=True, exist_ok=True)
    entries, rows, samples = [], [], {}
    for inner in contents:
        shard_id = write_shard(folder / "shards", list(inner), spec=spec)
        shard = shards.Shard(folder / "shards" / f"{shard_id}.safetensors")
        tokens = sum(len(s["input_ids"]) for s in inner)
        entries.append(
            {
                "shard_id": shard_id,
                "path": f"shards/{shard_id}.safetensors",
                "samples": len(inner),
                "tokens": tokens,
                "bytes": shard.header.size,
                "checksum": "0" * 32,
            }
        )
        for position, (name, values) in enumerate(zip(shard.header.sample_ids, inner, strict=True)):
            samples[name] = values
            rows.append(
                {
                    "sample_id": name,
                    "source": "synthetic",
                    "row": len(rows),
                    "shard_id": shard_id,
                    "position": position,
                    "offset": int(shard.offsets[position]),
                    "tokens": len(values["input_ids"]),
                    "supervised": int(values["loss_mask"].sum()),
                    "checksum": shard.checksum(position),
                }
            )
    capture = planned(spec)
    tokens, supervised = sum(row["tokens"] for row in rows), sum(row["supervised"] for row in rows)
    totals = {"samples": len(rows), "tokens": tokens, "supervised_tokens": supervised}
    document = {"format": "draftstates.manifest", "format_version": 1, "capture": capture, "totals": totals, "shards": entries}
    (folder / "manifest.json").write_text(json.dumps(document))
    pq.write_table(pa.Table.from_pylist(rows), folder / "samples.parquet")
    return Synthetic(path=folder / "manifest.json", spec=spec, samples=samples)


def small(folder: Path, *, spec: CaptureSpec | None = None, shard_sizes: Sequence[int] = (4, 3)) -> Synthetic:
    """A few short samples of distinct lengths in shards of the given sizes."""
    spec = spec or capture_spec()
    numbers = iter(range(sum(shard_sizes)))
    contents = [[sample(5 + 3 * i, spec=spec, seed=i) for i in (next(numbers) for _ in range(size))] for size in shard_sizes]
    return write_manifest(folder, contents, spec=spec)


def norm_model(folder: Path, *, hidden_size: int = 16, model_type: str = "llama") -> Path:
    """A model folder with nothing but a final norm; its weight is random."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "rms_norm_eps": 1e-5, "vocab_size": 100}))
    save_file(
        {"model.norm.weight": torch.rand(hidden_size, generator=torch.Generator().manual_seed(7)) + 0.5}, folder / "model.safetensors"
    )
    return folder


def arrays(count: int, *, seed: int, low: int = 1, high: int = 500) -> np.ndarray:
    """Sample lengths, int64 [count]."""
    return np.random.default_rng(seed).integers(low, high, count)

"""Manifest of random states in the workflow's layout, for tests that read manifests."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from draftstates import ids
from draftstates.documents import sealed
from draftstates.files import file_checksum
from draftstates.paths import samples_of
from draftstates.plan.prefixes import Segments, share_prefixes
from draftstates.plan.prefixes import shard_id as id_of_shard
from draftstates.records import (
    Accounting,
    Engine,
    Figures,
    Manifest,
    ManifestShard,
    ManifestTotals,
    Plan,
    PlannedChecks,
    PlannedShard,
    SourceAccount,
)
from draftstates.shards import layout
from draftstates.spec import CaptureSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synthetic:
    """A written manifest and, per sample id, the written values."""

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
    final_state: bool = True,
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
        final_state=final_state,
    )


def account(**numbers: int) -> SourceAccount:
    """Return an account of one row, with the given numbers in place of the defaults."""
    counts = {"rows_in": 1, "kept": 1, "samples": 1, "tokens": 1, "supervised_tokens": 1}
    return SourceAccount(**{**counts, **numbers}, skipped={}, failed={})


def plan_with(
    shards: Sequence[PlannedShard], *, capture_folder: str, totals: SourceAccount | None = None
) -> Plan:
    """Return a plan of these shards."""
    return Plan(
        capture_folder=capture_folder,
        capture=capture_spec(),
        checks=PlannedChecks(recapture_fraction=0.01, recapture_minimum=3),
        shards=tuple(shards),
        accounting=Accounting(sources={}, totals=totals or account()),
        images={"tokenise": (None,), "plan": (None,)},
        bytes_needed=0,
        bytes_present=0,
        disk_free=0,
    )


def planned_shard(shard_id: str, **numbers: int) -> PlannedShard:
    """Return an entry of a plan."""
    counts = {"samples": 1, "tokens": 1, "supervised_tokens": 1, "bytes": 1}
    return PlannedShard(shard_id=shard_id, source="a", **{**counts, **numbers})


def manifest_with(
    shard_ids: Sequence[str], *, sources: dict[str, SourceAccount] | None = None
) -> Manifest:
    """Return a manifest that lists these shards."""
    sources = sources or {"a": account()}
    shards = [
        ManifestShard(
            shard_id=name,
            path=f"shards/{name}.safetensors",
            source="a",
            samples=1,
            tokens=1,
            supervised_tokens=1,
            bytes=1,
            checksum="0" * 32,
        )
        for name in shard_ids
    ]
    return Manifest(
        capture=capture_spec(),
        engine=Engine(name="none", version="0"),
        totals=ManifestTotals(**vars(next(iter(sources.values()))), bytes=5),
        sources=sources,
        checks=Figures(
            recaptures=0,
            recaptured_tokens=0,
            alignment_share_of_limit=0.0,
            prefix_distance=0.0,
        ),
        images={},
        shards=tuple(shards),
        samples_checksum="0" * 32,
    )


def sample(length: int, *, spec: CaptureSpec, seed: int) -> dict[str, torch.Tensor]:
    """Return random tokens below 100, a mask whose last half is set, and normal states."""
    rng = torch.Generator().manual_seed(seed)
    layers = len(spec.residual_layers)
    return {
        "input_ids": torch.randint(0, 100, (length,), generator=rng, dtype=torch.int32),
        "loss_mask": (torch.arange(length) >= length // 2).to(torch.uint8),
        "hidden_states": (
            torch.randn(length, layers, spec.hidden_size, generator=rng).to(spec.torch_dtype)
        ),
        "final_hidden_state": (
            torch.randn(length, spec.hidden_size, generator=rng).to(spec.torch_dtype)
        ),
    }


def write_shard(
    path: Path,
    samples: list[dict[str, torch.Tensor]],
    *,
    spec: CaptureSpec,
    min_shared_tokens: int | None = None,
) -> str:
    """Write a whole shard, and return its id.

    Args:
        min_shared_tokens: shortest prefix whose rows are shared; those of the samples must be the
            same. None shares nothing.
    """
    names = [ids.sample_id(s["input_ids"].numpy(), s["loss_mask"].numpy()) for s in samples]
    lengths = [len(s["input_ids"]) for s in samples]
    input_ids = torch.cat([s["input_ids"] for s in samples]).numpy()
    segments = (
        share_prefixes(input_ids, lengths, minimum=min_shared_tokens) if min_shared_tokens else None
    )
    places = segments or Segments.unshared(lengths)
    shard = id_of_shard(names, segments)
    path = path / f"{shard}.safetensors"
    header = layout.create(
        path,
        spec=spec,
        shard_id=shard,
        sample_ids=names,
        lengths=lengths,
        input_ids=input_ids,
        loss_mask=torch.cat([s["loss_mask"] for s in samples]).numpy(),
        segments=segments,
    )
    with open(path, "r+b") as file:
        for name, (begin, _) in header.states().items():
            own = [s[name][places.shared(index) :] for index, s in enumerate(samples)]
            file.seek(begin)
            file.write(torch.cat(own).view(torch.uint8).numpy().tobytes())
    return shard


def write_manifest(
    folder: Path,
    contents: Sequence[Sequence[dict[str, torch.Tensor]]],
    *,
    spec: CaptureSpec,
    min_shared_tokens: int | None = None,
) -> Synthetic:
    """Write the shards, one per inner list, with `manifest.json` and `samples.parquet`."""
    (folder / "shards").mkdir(parents=True, exist_ok=True)
    entries, rows, samples = [], [], {}
    for inner in contents:
        shard_id = write_shard(
            folder / "shards", list(inner), spec=spec, min_shared_tokens=min_shared_tokens
        )
        shard = layout.Shard(folder / "shards" / f"{shard_id}.safetensors")
        tokens = sum(len(s["input_ids"]) for s in inner)
        supervised = sum(int(s["loss_mask"].sum()) for s in inner)
        entries.append(
            ManifestShard(
                shard_id=shard_id,
                path=f"shards/{shard_id}.safetensors",
                source="synthetic",
                samples=len(inner),
                tokens=tokens,
                supervised_tokens=supervised,
                bytes=shard.header.size,
                checksum="0" * 32,
            )
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
    tokens, supervised = sum(row["tokens"] for row in rows), sum(row["supervised"] for row in rows)
    counts = {"samples": len(rows), "tokens": tokens, "supervised_tokens": supervised}
    total = account(rows_in=len(rows), kept=len(rows), **counts)
    pq.write_table(pa.Table.from_pylist(rows), folder / "samples.parquet")
    dataclasses.replace(
        manifest_with([], sources={"synthetic": total}),
        capture=spec,
        shards=tuple(entries),
        samples_checksum=file_checksum(folder / "samples.parquet"),
    ).publish(folder / "manifest.json")
    return Synthetic(path=folder / "manifest.json", spec=spec, samples=samples)


def change_manifest(
    path: Path, change: Callable[[dict[str, Any]], object] = lambda document: None
) -> None:
    """Change a manifest as its writer would have written it: with the checksums of the result."""
    document = json.loads(path.read_text())
    change(document)
    document["samples_checksum"] = file_checksum(samples_of(path))
    path.write_text(json.dumps(sealed(document)))


def small(
    folder: Path, *, spec: CaptureSpec | None = None, shard_sizes: Sequence[int] = (4, 3)
) -> Synthetic:
    """Write a few short samples of distinct lengths in shards of the given sizes."""
    spec = spec or capture_spec()
    numbers = iter(range(sum(shard_sizes)))
    contents = [
        [sample(5 + 3 * i, spec=spec, seed=i) for i in (next(numbers) for _ in range(size))]
        for size in shard_sizes
    ]
    return write_manifest(folder, contents, spec=spec)


def sharing(folder: Path, *, spec: CaptureSpec | None = None) -> Synthetic:
    """Write a shard of samples of which each begins as the one before it, and shares its rows."""
    spec = spec or capture_spec()
    samples: list[dict[str, torch.Tensor]] = []
    for number in range(6):
        own = sample(5 + number, spec=spec, seed=number)
        # all of the one before, but for its last tokens: a history that a template rewrites
        head = (
            {name: t[: len(t) - number % 3] for name, t in samples[-1].items()} if samples else {}
        )
        samples.append({name: torch.cat([head.get(name, t[:0]), t]) for name, t in own.items()})
    return write_manifest(folder, [samples], spec=spec, min_shared_tokens=4)


def norm_model(folder: Path, *, hidden_size: int = 16, model_type: str = "llama") -> Path:
    """Write a model folder with nothing but embeddings, final norm and head, all random."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({"model_type": model_type, "rms_norm_eps": 1e-5, "vocab_size": 100})
    )
    draw = torch.Generator().manual_seed(7)
    tensors = {"model.norm.weight": torch.rand(hidden_size, generator=draw) + 0.5}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.randn(100, hidden_size, generator=draw)
    save_file(tensors, folder / "model.safetensors")
    return folder


def arrays(count: int, *, seed: int, low: int = 1, high: int = 500) -> np.ndarray:
    """Return sample lengths, int64 [count]."""
    return np.random.default_rng(seed).integers(low, high, count)

"""Extraction: one shard's samples through the server into one file, with the receipts that verification holds it to."""

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from draftstates import shards, wire
from draftstates.building import building_folder, publish, withdraw_manifest
from draftstates.capture_spec import CaptureSpec
from draftstates.client import Captured, Client, Endpoint, Work
from draftstates.containers import distinct, present_image
from draftstates.errors import UserError
from draftstates.probes import choose_probes
from draftstates.progress import Progress
from draftstates.reuse import Copied, copy_captured
from draftstates.shard_tokens import ShardTokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtractOptions:
    """How to extract; none of this changes what is captured.

    Attributes:
        tokens_in_flight: tokens that this job keeps at the server at once.
        retries: further attempts at a sample that failed, alone.
        probe_fraction, probe_minimum: see `probes.choose_probes`.
        reuse: copy rows that verified shards hold, rather than capture them again.
    """

    tokens_in_flight: int = 65536
    retries: int = 2
    probe_fraction: float = 0.01
    probe_minimum: int = 3
    reuse: bool = True


def extract_shard(
    tokens: ShardTokens,
    *,
    spec: CaptureSpec,
    endpoint: Endpoint,
    engine: str,
    options: ExtractOptions,
    output: Path,
    planned: Collection[str],
    server_image: str | None = None,
) -> dict[str, float]:
    """Make one shard and give it its final name only when it is complete, synced and every sample has its receipt.

    Samples that verified shards outside the plan hold are copied, the others captured (see `reuse`).

    Args:
        output: `<run>/shards/<shard id>.safetensors`; beside it appear `<shard id>.probe.safetensors` and `<shard id>.receipts.json`.
        planned: ids of all planned shards.
        server_image: file name of the image that the server runs in, for the record.

    Returns:
        figures: captured and copied tokens, probe tokens and seconds.

    Raises:
        UserError: names each sample that could not be captured, and why.
    """
    probe_path, receipts_file = companions(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with building_folder(output.parent, tokens.shard_id) as folder:
        shard, probe = folder / "shard.safetensors", folder / "probe.safetensors"
        lay_out_shard(tokens, spec=spec, shard=shard)
        start = time.monotonic()
        copied = copy_captured(shard, run=output.parent.parent, planned=planned) if options.reuse else Copied()
        work, probes = lay_out_work(tokens, spec=spec, options=options, shard=shard, probe=probe, copied=copied.receipts)
        captured = _capture_others(work, copied.receipts, endpoint=endpoint, options=options, shard_id=tokens.shard_id)
        seconds = time.monotonic() - start
        receipts = folder / "receipts.json"
        engines = {engine, *copied.engines}
        said = receipts_document(tokens, spec=spec, engines=engines, captured=captured, probes=probes, copied=copied.receipts)
        said["images"] = {"server": distinct([server_image, *copied.images]), "extract": [present_image()]}
        receipts.write_text(json.dumps(said, indent=1))
        withdraw_manifest(output.parent.parent, {tokens.shard_id}, "is made anew and not yet verified")
        publish(probe, probe_path)
        publish(receipts, receipts_file)
        publish(shard, output)  # last: a shard that has its name has all that belongs to it
    return {
        "captured_tokens": len(tokens.input_ids) - copied.rows,
        "copied_tokens": copied.rows,
        "probe_tokens": sum(rows for _, rows in probes),
        "seconds": round(seconds, 3),
    }


def _capture_others(
    work: list[Work], copied: Mapping[int, dict[str, Any]], *, endpoint: Endpoint, options: ExtractOptions, shard_id: str
) -> list[Captured]:
    """Capture the work that was not copied; the server is told of the rows that were, so that it knows when a file is full."""
    shard, left = work[0].shard, [item for position, item in enumerate(work) if position not in copied]
    copied_line = wire.copied_line(sum(receipt["rows"] for receipt in copied.values()))
    wire.receipts_path(shard).write_bytes(copied_line)
    files = {item.shard for item in left}  # not the shard, where all of it was copied
    rows = {file: sum(len(item.input_ids) for item in work if item.shard == file) for file in files}
    total = sum(len(item.input_ids) for item in left)
    progress = Progress(shard.parent, shard_id=shard_id, total=total, server=endpoint.url)
    return asyncio.run(capture(left, endpoint=endpoint, options=options, rows=rows, progress=progress.add))


def companions(output: Path) -> tuple[Path, Path]:
    """The probe file and the receipts file of a shard."""
    return output.with_suffix(".probe.safetensors"), output.with_suffix(".receipts.json")


def lay_out(
    tokens: ShardTokens, *, spec: CaptureSpec, options: ExtractOptions, shard: Path, probe: Path, kind: str = wire.PLAIN
) -> tuple[list[Work], list[tuple[int, int]]]:
    """Lay out the shard and its probe file; the work that fills them: every sample (requests of `kind`), then every probe."""
    lay_out_shard(tokens, spec=spec, shard=shard)
    return lay_out_work(tokens, spec=spec, options=options, shard=shard, probe=probe, kind=kind)


def lay_out_shard(tokens: ShardTokens, *, spec: CaptureSpec, shard: Path) -> None:
    shards.create(
        shard,
        spec=spec,
        shard_id=tokens.shard_id,
        sample_ids=tokens.sample_ids,
        lengths=tokens.lengths,
        input_ids=tokens.input_ids,
        loss_mask=tokens.loss_mask,
    )


def lay_out_work(
    tokens: ShardTokens,
    *,
    spec: CaptureSpec,
    options: ExtractOptions,
    shard: Path,
    probe: Path,
    kind: str = wire.PLAIN,
    copied: Collection[int] = (),
) -> tuple[list[Work], list[tuple[int, int]]]:
    """Lay out the probe file of a laid-out shard; the work as `lay_out` gives it. `copied`: samples that the shard already holds."""
    starts = np.concatenate([[0], np.cumsum(tokens.lengths)]).tolist()
    work = [
        Work(sample_id=name, shard=shard, first_row=starts[i], input_ids=tokens.input_ids[starts[i] : starts[i + 1]], kind=kind)
        for i, name in enumerate(tokens.sample_ids)
    ]
    asked = {"fraction": options.probe_fraction, "minimum": options.probe_minimum}
    probes = choose_probes(tokens.sample_ids, tokens.lengths, shard_id=tokens.shard_id, copied=copied, **asked)
    pieces = [slice(starts[i], starts[i] + rows) for i, rows in probes]
    shards.create(
        probe,
        spec=spec,
        shard_id=tokens.shard_id,
        sample_ids=[tokens.sample_ids[i] for i, _ in probes],
        lengths=[rows for _, rows in probes],
        input_ids=np.concatenate([tokens.input_ids[piece] for piece in pieces]),
        loss_mask=np.concatenate([tokens.loss_mask[piece] for piece in pieces]),
    )
    first = 0
    for (position, rows), piece in zip(probes, pieces, strict=True):
        work.append(
            Work(sample_id=tokens.sample_ids[position], shard=probe, first_row=first, input_ids=tokens.input_ids[piece], prefix=True)
        )
        first += rows
    return work, probes


async def capture(
    work: list[Work],
    *,
    endpoint: Endpoint,
    options: ExtractOptions,
    rows: dict[Path, int],
    progress: Callable[[int], None] = lambda tokens: None,
) -> list[Captured]:
    """Send all work and wait until the server has synced every file.

    Args:
        rows: each file's rows; progress: called with each finished sample's tokens.

    Raises:
        UserError: names each sample that could not be captured, and why.
    """
    async with Client(endpoint, tokens_in_flight=options.tokens_in_flight) as client:
        captured, reasons = await client.capture_all(work, retries=options.retries, progress=progress)
        if reasons:
            raise UserError(_failure(work, reasons, options.retries))
        for path, count in rows.items():
            await client.synced(path, rows=count)
    return captured


def _failure(work: list[Work], reasons: dict[int, str], retries: int) -> str:
    named: dict[str, str] = {}
    for position, reason in reasons.items():
        named.setdefault(work[position].sample_id, reason)
    lines = [f"  {name}: {reason}" for name, reason in list(named.items())[:20]]
    more = [f"  … and {len(named) - 20} more"] if len(named) > 20 else []
    return "\n".join(
        [f"{len(named)} samples could not be captured in {retries + 1} attempts:"]
        + lines
        + more
        + ["Run again to try once more; to go on without them, add their ids to `exclude` in the configuration."]
    )


def receipts_document(
    tokens: ShardTokens,
    *,
    spec: CaptureSpec,
    engines: set[str],
    captured: list[Captured],
    probes: list[tuple[int, int]],
    copied: Mapping[int, dict[str, Any]] = MappingProxyType({}),
) -> dict[str, Any]:
    """The content of a shard's receipts file.

    Args:
        engines: versions of the engines that captured the rows.
        captured: in the order of `lay_out`'s work; copied: by position, receipts of the samples that are not among them.
    """
    done = iter(captured)
    samples = [copied[position] if position in copied else _whole(next(done)) for position in range(len(tokens.sample_ids))]
    return {
        "format": wire.RECEIPTS_FORMAT,
        "format_version": wire.RECEIPTS_VERSION,
        "shard_id": tokens.shard_id,
        "capture_key": spec.key,
        "engine": {"name": "sglang", "version": ", ".join(sorted(engines))},
        "samples": samples,
        "probes": [{**_entry(item), "position": position} for item, (position, _) in zip(done, probes, strict=True)],
    }


def _whole(item: Captured) -> dict:
    return {**_entry(item), "prompt_tokens": item.prompt_tokens, "top": item.top, "attempts": item.attempts}


def _entry(item: Captured) -> dict:
    receipt = item.receipt
    return {
        "sample_id": item.work.sample_id,
        "first_row": item.work.first_row,
        "rows": receipt.rows,
        "chunks": receipt.chunks,
        "cached_tokens": receipt.cached_tokens,
        "ids_hash": receipt.ids_hash,
        "checksum": receipt.checksum,
    }

"""The manifest: the shards that were verified, their samples in a table, and the accounts of every row. Nothing else may enter."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from draftstates import shards
from draftstates.building import publish, publish_text
from draftstates.containers import distinct, present_image
from draftstates.errors import UserError
from draftstates.plan_file import check_accounting, check_run_folder
from draftstates.verified import FORMAT as VERIFIED_FORMAT
from draftstates.verified import FORMAT_VERSION as VERIFIED_VERSION
from draftstates.verified import sealed

FORMAT = "draftstates.manifest"
FORMAT_VERSION = 1
_SAMPLES = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("shard_id", pa.string(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("supervised", pa.int32(), nullable=False),
        pa.field("checksum", pa.string(), nullable=False),
    ]
)
_GROUP_SAMPLES = 50_000


def write_manifest(plan: Mapping[str, Any], *, tokens: Path, run: Path, manifest: Path, samples: Path) -> dict[str, Any]:
    """Write `samples.parquet`, then `manifest.json`: the manifest is there only when all it speaks of is.

    Args:
        plan: the content of `plan.json`; tokens: folder of the planned shards' tokens.
        run: the capture's folder, with `shards/` and `verified/`.

    Returns:
        the manifest's content.

    Raises:
        UserError: `run` is not the plan's folder; a shard that is missing, not verified, or other than planned; rows that are not accounted
            for; or no samples.
    """
    check_run_folder(plan, run)
    if not plan["shards"]:
        raise UserError("the plan has no shards: a manifest of nothing is an error")
    verified = [_read_verified(run, plan, entry) for entry in plan["shards"]]
    totals = _totals(plan, verified)
    _write_samples(samples, plan, verified, tokens)
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "capture": _capture(plan["capture"], verified),
        "totals": totals,
        "sources": plan["accounting"]["sources"],
        "checks": _checks(verified),
        "images": _images(plan, verified),
        "shards": [_shard(entry, found, run, manifest) for entry, found in zip(plan["shards"], verified, strict=True)],
    }
    publish_text(json.dumps(content, indent=1) + "\n", manifest)
    return content


def _read_verified(run: Path, plan: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """What verification found of a planned shard, held to the plan and to the file as it lies there."""
    shard_id = entry["shard_id"]
    path = run / "verified" / f"{shard_id}.json"
    try:
        found = json.loads(path.read_bytes())
        said = {
            "format": (found["format"], found["format_version"]),
            "shard_id": found["shard_id"],
            "capture_key": found["capture_key"],
            "samples": len(found["samples"]),
            "tokens": sum(sample["rows"] for sample in found["samples"]),
            "supervised_tokens": sum(sample["supervised"] for sample in found["samples"]),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: expected what verification found of shard {shard_id}: {type(error).__name__}: {error}") from error
    planned = {
        "format": (VERIFIED_FORMAT, VERIFIED_VERSION),
        "capture_key": plan["capture"]["key"],
        **{name: entry[name] for name in ("shard_id", "samples", "tokens", "supervised_tokens")},
    }
    for name, expected in planned.items():
        if said[name] != expected:
            raise UserError(
                f"{path}: expected {name} {expected}, found {said[name]}; delete it and run again, and the shard is verified again"
            )
    if sealed(found) != found:
        raise UserError(f"{path}: changed since verification wrote it; delete it and run again, and the shard is verified again")
    _check_file(run / "shards" / f"{shard_id}.safetensors", found)
    return found


def _check_file(path: Path, found: Mapping[str, Any]) -> None:
    """The file that was verified must be there still: its header and its size, not again all its bytes."""
    try:
        header = shards.read_header(path)
    except OSError as error:
        raise UserError(f"{path}: verified, but it cannot be read: {error.strerror}; run again") from error
    for what, expected, value in (
        ("bytes", found["bytes"], header.size),
        ("shard_id", found["shard_id"], header.metadata["shard_id"]),
        ("capture_key", found["capture_key"], header.metadata["capture_key"]),
    ):
        if expected != value:
            raise UserError(f"{path}: verified with {what} {expected}, found {value}; verify it again")


def _totals(plan: Mapping[str, Any], verified: list[dict[str, Any]]) -> dict[str, Any]:
    """The plan's totals and the bytes on the disk; promise 1 is held to here once more, up to the shards' own sums."""
    accounting = plan["accounting"]
    for name, account in accounting["sources"].items():
        check_accounting(f"source {name}", account)
    check_accounting("all sources", accounting["totals"])
    for field in ("samples", "tokens", "supervised_tokens"):
        in_sources, counted = sum(account[field] for account in accounting["sources"].values()), accounting["totals"][field]
        if in_sources != counted:
            raise UserError(f"unexplained rows: {counted:,} {field} in all, the sources have {in_sources:,}; plan again")
        in_shards = sum(entry[field] for entry in plan["shards"])
        if in_shards != counted:
            raise UserError(f"unexplained rows: {counted:,} {field} are accounted for, the shards have {in_shards:,}; plan again")
    return {**accounting["totals"], "bytes": sum(found["bytes"] for found in verified)}


def _capture(capture: Mapping[str, Any], verified: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields that the key is made of, what they are called for people, and the engine."""
    engines = {found["engine"]["name"] for found in verified}
    versions = {version for found in verified for version in found["engine"]["version"].split(", ")}
    return {
        **capture,
        "revision": capture["model_digest"],
        "dtype": capture["stored_dtype"],
        "engine": ", ".join(sorted(engines)),
        "engine_version": ", ".join(sorted(versions)),
    }


def _images(plan: Mapping[str, Any], verified: list[dict[str, Any]]) -> dict[str, list[str | None]]:
    """File names of the images that each step ran in; None for the host, or for a server that was not started here.

    What was made before steps noted their image was made on the host.
    """
    images = {"tokenise": [None], "plan": [None], **plan.get("images", {})}
    for step in ("server", "extract", "verify"):
        images[step] = distinct(name for found in verified for name in found.get("images", {}).get(step, [None]))
    return {**images, "manifest": [present_image()]}


def _checks(verified: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest disagreements that were found and passed, over all shards."""
    figures = [found["figures"] for found in verified]
    return {
        "probes": sum(figure["probes"] for figure in figures),
        "probe_tokens": sum(figure["probe_tokens"] for figure in figures),
        "alignment_share_of_limit": max(figure["alignment_share_of_limit"] for figure in figures),
        "prefix_distance": max(figure["prefix_distance"] for figure in figures),
    }


def _shard(entry: Mapping[str, Any], found: Mapping[str, Any], run: Path, manifest: Path) -> dict[str, Any]:
    path = os.path.relpath(run / "shards" / f"{entry['shard_id']}.safetensors", manifest.parent)
    planned = {name: entry[name] for name in ("samples", "tokens", "supervised_tokens", "source")}
    return {"shard_id": entry["shard_id"], "path": path, **planned, "bytes": found["bytes"], "checksum": found["checksum"]}


def _write_samples(path: Path, plan: Mapping[str, Any], verified: list[dict[str, Any]], tokens: Path) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with pq.ParquetWriter(partial, _SAMPLES, compression="zstd") as writer:
        for frame in _groups(_frame(entry, found, tokens) for entry, found in zip(plan["shards"], verified, strict=True)):
            writer.write_table(pa.Table.from_pandas(frame, schema=_SAMPLES, preserve_index=False))
    publish(partial, path)


def _groups(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    """The shards' samples in groups large enough to be read fast and small enough to be held."""
    held: list[pd.DataFrame] = []
    for frame in frames:
        held.append(frame)
        if sum(map(len, held)) >= _GROUP_SAMPLES:
            yield pd.concat(held)
            held.clear()
    if held:
        yield pd.concat(held)


def _frame(entry: Mapping[str, Any], found: Mapping[str, Any], tokens: Path) -> pd.DataFrame:
    """One shard's samples: where each came from and where it lies."""
    path = tokens / f"{entry['shard_id']}.parquet"
    try:
        frame = pd.read_parquet(path, columns=["sample_id", "source", "row"])
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: tokens of shard {entry['shard_id']} cannot be read ({error}); plan again") from error
    samples = found["samples"]
    if frame["sample_id"].tolist() != [sample["sample_id"] for sample in samples]:
        raise UserError(f"{path}: expected the samples that were verified as shard {entry['shard_id']}, found others; plan again")
    lengths = np.array([sample["rows"] for sample in samples], dtype=np.int64)
    return frame.assign(
        shard_id=entry["shard_id"],
        position=np.arange(len(frame)),
        offset=np.cumsum(lengths) - lengths,
        tokens=lengths,
        supervised=[sample["supervised"] for sample in samples],
        checksum=[sample["checksum"] for sample in samples],
    )

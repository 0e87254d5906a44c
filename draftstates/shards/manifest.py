"""The writer of the manifest: verified shards, a table of their samples, and the accounting."""

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError, safe_open

from draftstates.containers import distinct, present_image
from draftstates.errors import UserError, capture_again, counted, make_again
from draftstates.files import file_checksum, first_difference, publishing
from draftstates.paths import Capture
from draftstates.records import (
    PLAN_AGAIN,
    Engine,
    Figures,
    Images,
    Manifest,
    ManifestShard,
    ManifestTotals,
    Parity,
    Plan,
    PlannedShard,
    Stored,
    Verified,
)
from draftstates.shards import layout

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


def write_manifest(
    plan: Plan,
    *,
    tokens: Path,
    capture_folder: Path,
    manifest: Path,
    samples: Path,
    parity: str = "auto",
    form: str | None = None,
) -> Manifest:
    """Write `samples.parquet`, then `manifest.json`.

    In this order, a manifest exists only when every file that it lists exists.

    Args:
        plan: plan whose shards are all verified.
        tokens: folder of the planned shards' tokens.
        capture_folder: folder with `shards/` and `verified/`.
        manifest: path of the manifest to write.
        samples: path of the table to write.
        parity: `checks.parity`: whether the comparison with the checkpoint is required.
        form: name of the form in which the shards are stored; None for as captured.

    Raises:
        UserError: `capture_folder` is not the plan's; a shard is missing, not verified, not as
            planned, or captured by a server that was not compared with the checkpoint; the
            accounting does not close; or the plan has no shards.
    """
    plan.check_capture_folder(capture_folder)
    if not plan.shards:
        raise UserError("the plan has no shards: expected at least one; check the configuration")
    verified = [_read_verified(capture_folder, plan, entry, form) for entry in plan.shards]
    capture = Capture(capture_folder)
    kept = [_kept(capture, found, form) for found in verified]
    compared = _read_parity(capture_folder, plan, verified, mode=parity)
    totals = _totals(plan, kept)
    _write_samples(samples, plan, zip(verified, kept, strict=True), tokens)
    content = Manifest(
        capture=plan.capture,
        engine=Engine.of(found.engine for found in verified),
        totals=totals,
        sources=plan.accounting.sources,
        checks=Figures.of(found.figures for found in verified),
        images=_images(plan, verified),
        shards=tuple(
            ManifestShard(
                **{
                    **vars(entry),
                    "path": os.path.relpath(found.path, manifest.parent),
                    "bytes": found.bytes,
                    "checksum": found.checksum,
                }
            )
            for entry, found in zip(plan.shards, kept, strict=True)
        ),
        samples_checksum=file_checksum(samples),
        parity=compared,
        storage=kept[0].storage,
    )
    content.publish(manifest)
    return content


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kept:
    """The file in which a verified shard stays.

    Attributes:
        storage: how its states are stored; None for as captured.
        samples: checksum of each sample's states in it.
    """

    path: Path
    bytes: int
    checksum: str
    samples: tuple[str, ...]
    storage: dict | None = None


def _kept(capture: Capture, verified: Verified, form: str | None) -> _Kept:
    """Return the file in which a shard stays; a compact form is compared with its record.

    Of a form that is newer than its record, the whole content is.
    """
    if form is None:
        return _Kept(
            path=capture.shard(verified.shard_id),
            bytes=verified.bytes,
            checksum=verified.checksum,
            samples=verified.samples.checksum,
        )
    record, path = (each(verified.shard_id, form) for each in (capture.stored, capture.compact))
    found = Stored.read(record)
    found.check(record, verified=verified)
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
        status, recorded = path.stat(), record.stat()
        is_newer = status.st_mtime_ns > recorded.st_mtime_ns
        checksum = file_checksum(path) if is_newer else found.checksum
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path}: verified, but it cannot be read: {error}; {capture_again(path)}"
        ) from error
    expected = {
        "bytes": found.bytes,
        "shard_id": found.shard_id,
        "capture_key": found.capture_key,
        "storage": json.dumps(found.storage, sort_keys=True),
        "checksum": found.checksum,
    }
    changed = {**metadata, "bytes": status.st_size, "checksum": checksum}
    if difference := first_difference(expected, changed):
        raise UserError(f"{path}: changed since it was made: {difference}; {capture_again(path)}")
    return _Kept(
        path=path,
        bytes=found.bytes,
        checksum=found.checksum,
        samples=found.samples,
        storage=found.storage,
    )


def _read_verified(
    capture_folder: Path, plan: Plan, planned: PlannedShard, form: str | None
) -> Verified:
    """Read the findings of a planned shard's verification.

    The findings are compared with the plan and, unless it was removed, with the captured file.
    """
    capture = Capture(capture_folder)
    path = capture.verified(planned.shard_id)
    found = Verified.read(path)
    found.check(path, planned=planned, capture_key=plan.capture.key)
    _check_limit(found, path, plan, planned, form)
    if form is None:
        _check_file(capture.shard(planned.shard_id), found, path)
    return found


def _check_limit(
    found: Verified, path: Path, plan: Plan, planned: PlannedShard, form: str | None
) -> None:
    """Refuse findings that were made with a wider limit of answers than the present one."""
    asked, had = plan.checks.answers, found.answers_limit
    is_within = asked is not None and had is not None and had <= asked
    if not planned.answered or asked == had or is_within:
        return
    if form is None:
        remedy = found.remedy(path)
    else:
        # the states that a verification would read are gone
        remedy = "set it back; " + capture_again(
            Capture(path.parents[1]).compact(planned.shard_id, form)
        )
    raise UserError(f"{path}: verified with checks.answers {had}, expected {asked}; {remedy}")


def _read_parity(
    capture_folder: Path, plan: Plan, verified: list[Verified], *, mode: str
) -> Parity:
    """Read the comparison with the checkpoint, and hold every shard's server to it."""
    path = Capture(capture_folder).parity
    found = Parity.read(path)
    if found.capture_key != plan.capture.key:
        raise UserError(
            f"{path}: expected capture_key {plan.capture.key}, found {found.capture_key};"
            f" {Parity.remedy(path)}"
        )
    found.require(mode)
    others = [each.shard_id for each in verified if set(each.selftests) != {found.selftest}]
    if others:
        receipts = [Capture(capture_folder).receipts(name) for name in others]
        raise UserError(
            f"{counted(len(others), 'shard')}, such as {others[0]}: captured by a server that was"
            " not compared with the checkpoint, or that differed from it: expected the self-test"
            f" {found.selftest}; {make_again('to capture them again', *receipts)}"
        )
    return found


def _check_file(shard: Path, verified: Verified, path: Path) -> None:
    """Compare the header and the size of a shard's file with the findings of its verification.

    Args:
        shard: the shard's file.
        verified: the findings.
        path: file of the findings, for the message.
    """
    try:
        header = layout.read_header(shard)
    except OSError as error:
        raise UserError(
            f"{shard}: verified, but it cannot be read: {error.strerror}; {capture_again(shard)}"
        ) from error
    except UserError as error:
        raise UserError(f"{error}; {capture_again(shard)}") from error
    expected = {
        "bytes": verified.bytes,
        "shard_id": verified.shard_id,
        "capture_key": verified.capture_key,
    }
    if difference := first_difference(expected, {**header.metadata, "bytes": header.size}):
        raise UserError(
            f"{shard}: changed since verification: {difference}; {verified.remedy(path)}"
        )


def _totals(plan: Plan, kept: list[_Kept]) -> ManifestTotals:
    """Return the plan's totals and the bytes on the disk.

    This is the last check of the accounting, up to the sums of the shards.
    """
    plan.accounting.check()
    totals = plan.accounting.totals
    for field in ("samples", "tokens", "supervised_tokens"):
        counted = getattr(totals, field)
        in_shards = sum(getattr(entry, field) for entry in plan.shards)
        if in_shards != counted:
            raise UserError(
                f"unexplained rows: {counted:,} {field} are accounted for, the shards have"
                f" {in_shards:,}; {PLAN_AGAIN}"
            )
    return ManifestTotals(**vars(totals), bytes=sum(found.bytes for found in kept))


def _images(plan: Plan, verified: list[Verified]) -> Images:
    """Return the file names of the images in which each step ran.

    None stands for the host, or for a server that another program started.
    """
    steps = {
        step: tuple(distinct(name for found in verified for name in found.images.get(step, [None])))
        for step in ("server", "extract", "verify")
    }
    return {**plan.images, **steps, "manifest": (present_image(),)}


def _write_samples(
    path: Path, plan: Plan, found: Iterable[tuple[Verified, _Kept]], tokens: Path
) -> None:
    with (
        publishing(path) as partial,
        pq.ParquetWriter(partial, _SAMPLES, compression="zstd") as writer,
    ):
        for frame in _groups(
            _frame(entry, *each, tokens) for entry, each in zip(plan.shards, found, strict=True)
        ):
            writer.write_table(pa.Table.from_pandas(frame, schema=_SAMPLES, preserve_index=False))


def _groups(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    """Join the shards' samples to groups that are fast to read and still fit into memory."""
    held: list[pd.DataFrame] = []
    for frame in frames:
        held.append(frame)
        if sum(map(len, held)) >= _GROUP_SAMPLES:
            yield pd.concat(held)
            held.clear()
    if held:
        yield pd.concat(held)


def _frame(planned: PlannedShard, found: Verified, kept: _Kept, tokens: Path) -> pd.DataFrame:
    """Return one shard's samples with their source, row and place in the shard."""
    path = tokens / f"{planned.shard_id}.parquet"
    try:
        frame = pd.read_parquet(
            path, columns=["sample_id", "source", "row"], page_checksum_verification=True
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: tokens of shard {planned.shard_id} cannot be read ({error}); {PLAN_AGAIN}"
        ) from error
    samples = found.samples
    if tuple(frame["sample_id"]) != samples.sample_id:
        raise UserError(
            f"{path}: expected the samples that were verified as shard {planned.shard_id}, found"
            f" others; {PLAN_AGAIN}"
        )
    lengths = np.array(samples.tokens, dtype=np.int64)
    return frame.assign(
        shard_id=planned.shard_id,
        position=np.arange(len(frame)),
        # in `input_ids`: where samples share rows, `segments` has the places of the states
        offset=np.cumsum(lengths) - lengths,
        tokens=lengths,
        supervised=samples.supervised_tokens,
        checksum=kept.samples,
    )

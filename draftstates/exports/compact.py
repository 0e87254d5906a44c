"""Compact copy of a capture's manifest and shards, in a folder of its own."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from draftstates.errors import UserError
from draftstates.exports.builder import Builder
from draftstates.files import file_checksum
from draftstates.model.digest import check_content
from draftstates.model.folder import ModelFolder
from draftstates.model.head import read_head
from draftstates.paths import Capture, samples_of
from draftstates.records import Manifest, ManifestShard
from draftstates.shards.compact import (
    FORMAT,
    FORMAT_VERSION,
    CompactShard,
    Storage,
    TopToken,
    compact_sample,
    write_compact,
)
from draftstates.shards.dataset import check_table
from draftstates.shards.layout import Shard
from draftstates.spec import CaptureSpec

# Rows whose logits are computed at a time.
_ROWS = 1024


def compact_manifest(
    manifest: Path, output: Path, storage: Storage, model_folder: Path | None = None
) -> Manifest:
    """Write a compact copy of a manifest and its shards to the folder `output`.

    The folder gets its name when every shard has been read back. A shard of an earlier copy is kept
    if it has the same capture, samples and storage, and if it still reads back.

    Args:
        model_folder: folder of the target model; needed for `keep_top_token` alone.

    Returns:
        The content of the copy's `manifest.json`.

    Raises:
        UserError: the manifest is compact already, a shard is damaged, or the copy differs when it
            is read back.
    """
    document = Manifest.read(manifest)
    if document.storage is not None:
        raise UserError(f"{manifest}: compact already: {document.storage}")
    if not (storage.fp8 or storage.supervised_rows):
        raise UserError("nothing to do: ask for fp8 or supervised_rows")
    top_token = _top_token(model_folder, document.capture) if storage.keep_top_token else None
    check_table(manifest, document)
    table = pq.read_table(samples_of(manifest))
    checksums = dict(zip(_places(table), table["checksum"].to_pylist(), strict=True))
    shards = []
    identity = f"{FORMAT} {FORMAT_VERSION} {document.capture.key} {storage.text}"
    with Builder(output, identity=identity) as builder:
        copy = Capture(builder.partial)
        for entry in document.shards:
            source = Shard(manifest.parent / entry.path)
            for index, sample_id in enumerate(source.header.sample_ids):
                _check_source(source, index, sample_id, checksums[entry.shard_id, index])
            path = copy.shard(entry.shard_id)
            name = path.relative_to(copy.folder).as_posix()
            _add_shard(builder, name, entry, source, storage, top_token)
            compact = CompactShard(path)
            for index in range(len(source)):
                checksums[entry.shard_id, index] = compact.checksum(index)
            written = dataclasses.replace(
                entry, path=name, bytes=path.stat().st_size, checksum=file_checksum(path)
            )
            shards.append(written)
        document = dataclasses.replace(
            document,
            storage=json.loads(storage.text),
            shards=tuple(shards),
            totals=dataclasses.replace(document.totals, bytes=sum(each.bytes for each in shards)),
        )
        _write_table(table, checksums, copy.samples)
        document = dataclasses.replace(document, samples_checksum=file_checksum(copy.samples))
        document.publish(copy.manifest)
        builder.include(copy.samples.name, copy.manifest.name)
        builder.finish()
    return document


def _add_shard(
    builder: Builder,
    name: str,
    entry: ManifestShard,
    source: Shard,
    storage: Storage,
    top_token: TopToken | None,
) -> None:
    """Add the compact form of a shard to the builder."""

    def check(path: Path) -> None:
        compact = CompactShard(path)
        for index in range(len(source)):
            _check_sample(compact, source, index, storage, top_token)

    builder.add(
        name,
        f"{entry.shard_id}-{entry.checksum}",
        lambda path: write_compact(source, path, storage, top_token),
        check,
        check_kept=True,
    )


def _check_source(source: Shard, index: int, sample_id: str, checksum: str) -> None:
    """Refuse a sample whose states, tokens or mask are not those of the manifest."""
    if source.checksum(index) != checksum:
        raise UserError(
            f"{source.path}: sample {sample_id} does not have the checksum that the manifest says"
        )
    if source.content_id(index) != sample_id:
        raise UserError(
            f"{source.path}: sample {sample_id} has other tokens or another mask than its id says"
        )


def _top_token(folder: Path | None, capture: CaptureSpec) -> TopToken:
    """Return a function that gives the most likely token of final states."""
    if folder is None:
        raise UserError("keep_top_token needs the captured model's folder")
    model = ModelFolder(folder)
    check_content(model, expected=capture.model_digest)
    head = read_head(model, final_norm=capture.final_norm)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = head.weight.float().to(device)

    def top_token(rows: torch.Tensor) -> torch.Tensor:
        rows = head.norm(rows) if head.norm else rows
        blocks = rows.float().to(device).split(_ROWS)
        return (
            torch.cat([(block @ weight.T).argmax(-1).cpu() for block in blocks])
            if len(rows)
            else torch.zeros(0, dtype=torch.int64)
        )

    return top_token


def _check_sample(
    compact: CompactShard, source: Shard, index: int, storage: Storage, top_token: TopToken | None
) -> None:
    """Compare a compact sample with what was to be written."""
    expected, found = compact_sample(source, index, storage, top_token), compact.stored(index)
    tokens = all(
        np.array_equal(a, b)
        for a, b in zip(compact.tokens(index), _tokens(source, index), strict=True)
    )
    same = all(
        found[name].dtype == value.dtype and torch.equal(_raw(found[name]), _raw(value))
        for name, value in expected.items()
    )
    if not tokens or not same:
        raise UserError(
            f"{compact.path}: sample {source.header.sample_ids[index]} reads back as something else"
            " than was written"
        )


def _tokens(shard: Shard, index: int) -> tuple:
    first, end = shard.rows(index)
    return shard.input_ids[first:end], shard.loss_mask[first:end]


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    # torch does not compare e4m3 numbers.
    return tensor.contiguous().view(torch.uint8)


def _places(table: pa.Table) -> Iterator[tuple[str, int]]:
    """Return shard and position of each row.

    A sample id may occur several times if duplicates are kept.
    """
    return zip(table["shard_id"].to_pylist(), table["position"].to_pylist(), strict=True)


def _write_table(table: pa.Table, checksums: dict[tuple[str, int], str], path: Path) -> None:
    column = pa.array([checksums[place] for place in _places(table)])
    place = table.schema.get_field_index("checksum")
    pq.write_table(table.set_column(place, "checksum", column), path)

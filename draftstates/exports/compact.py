"""Compact copy of a capture's manifest and shards, in a folder of its own."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from draftstates.errors import UserError
from draftstates.exports.builder import Builder
from draftstates.files import file_checksum
from draftstates.paths import Capture, samples_of
from draftstates.records import Manifest, ManifestShard
from draftstates.shards.compact import (
    FORMAT,
    FORMAT_VERSION,
    CompactShard,
    Storage,
    TopToken,
    write_compact,
)
from draftstates.shards.compacting import check_compact, check_source, top_token_of
from draftstates.shards.dataset import check_table
from draftstates.shards.layout import Shard


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
    top_token = top_token_of(model_folder, document.capture) if storage.keep_top_token else None
    check_table(manifest, document)
    table = pq.read_table(samples_of(manifest))
    checksums = dict(zip(_places(table), table["checksum"].to_pylist(), strict=True))
    shards = []
    identity = f"{FORMAT} {FORMAT_VERSION} {document.capture.key} {storage.text}"
    with Builder(output, identity=identity) as builder:
        copy = Capture(builder.partial)
        for entry in document.shards:
            source = Shard(manifest.parent / entry.path)
            named = [checksums[entry.shard_id, index] for index in range(len(source))]
            check_source(source, named)
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
    builder.add(
        name,
        f"{entry.shard_id}-{entry.checksum}",
        lambda path: write_compact(source, path, storage, top_token),
        lambda path: check_compact(path, source, storage, top_token),
        check_kept=True,
    )


def _places(table: pa.Table) -> Iterator[tuple[str, int]]:
    """Return shard and position of each row.

    A sample id may occur several times if duplicates are kept.
    """
    return zip(table["shard_id"].to_pylist(), table["position"].to_pylist(), strict=True)


def _write_table(table: pa.Table, checksums: dict[tuple[str, int], str], path: Path) -> None:
    column = pa.array([checksums[place] for place in _places(table)])
    place = table.schema.get_field_index("checksum")
    pq.write_table(table.set_column(place, "checksum", column), path)

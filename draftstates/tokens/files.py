"""The tokeniser's Parquet files, read a row group at a time: an index of one source, and the tokens of each shard in a file of its own."""

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from draftstates.building import publish
from draftstates.errors import UserError

COLUMNS = ["row", "part", "sample_id", "input_ids", "loss_mask"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceIndex:
    """What the plan needs to know of a source, without its tokens.

    Attributes:
        rows: row of each sample in the source, int64 [S]; names: sample ids, S32 [S].
        lengths, supervised: tokens and targets of each sample, int64 [S].
        accounting: the tokeniser's `<source>.json`.
    """

    path: Path
    source: str
    rows: np.ndarray
    names: np.ndarray
    lengths: np.ndarray
    supervised: np.ndarray
    accounting: dict[str, Any]


def read_index(path: Path) -> SourceIndex:
    """Read a source's samples but for their tokens, and its accounting.

    Args:
        path: `<source>.parquet`; `<source>.json` lies beside it.

    Raises:
        UserError: a file is missing or of another kind, or the two disagree.
    """
    accounting = _read_accounting(path.with_suffix(".json"))
    parts: list[tuple[np.ndarray, ...]] = [(np.empty(0, np.int64), np.empty(0, "S32"), np.empty(0, np.int64), np.empty(0, np.int64))]
    with open_tokens(path) as file:
        for batch in file.iter_batches(batch_size=1024, columns=["row", "sample_id", "input_ids", "loss_mask"]):
            parts.append(_index_batch(path, batch))
    rows, names, lengths, supervised = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    found = {
        "kept": len(np.unique(rows)),
        "samples": len(names),
        "tokens": int(lengths.sum()),
        "supervised_tokens": int(supervised.sum()),
    }
    for field, count in found.items():
        if accounting[field] != count:
            raise UserError(
                f"{path}: unexplained rows: its accounting says {accounting[field]:,} {field}, the file has {count:,}; tokenise again"
            )
    return SourceIndex(path=path, source=path.stem, rows=rows, names=names, lengths=lengths, supervised=supervised, accounting=accounting)


def write_shard_tokens(index: SourceIndex, shard_of: np.ndarray, shard_ids: Sequence[str], *, folder: Path) -> int:
    """Write `<shard id>.parquet` for each shard of a source that has none like it: the source's columns, and `source`.

    A shard's name says which samples it has, not where they stood: a file that names other rows or another source is written anew.

    Args:
        shard_of: shard of each sample, int [S]: ascending, -1 for a sample that is in none.

    Returns:
        the number of files written. A final name exists only when its file is complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    members = np.flatnonzero(shard_of >= 0)
    ends = np.searchsorted(shard_of[members], np.arange(len(shard_ids) + 1))
    parts = [members[first:end] for first, end in zip(ends, ends[1:], strict=False)]
    current_files = [_is_current(folder / f"{name}.parquet", index, part) for name, part in zip(shard_ids, parts, strict=True)]
    absent = ~np.array([*current_files, True])  # [-1]: in no shard
    written, current, writer = 0, -1, None
    partial = folder / f".{index.source}.{os.getpid()}.partial"
    try:
        for number, table in _pieces(index, shard_of, absent):
            if number != current:
                written += _close(writer, partial, folder, shard_ids, current)
                current, writer = number, pq.ParquetWriter(partial, table.schema, compression="zstd")
            writer.write_table(table)
        written += _close(writer, partial, folder, shard_ids, current)
    finally:
        partial.unlink(missing_ok=True)
    return written


def _is_current(path: Path, index: SourceIndex, members: np.ndarray) -> bool:
    """Whether a shard's file holds these samples of the source, from the rows where they stand now."""
    try:
        table = pq.read_table(path, columns=["row", "sample_id", "source"])
    except (OSError, ValueError, KeyError):
        return False  # absent, cut short, or of another kind: written anew
    rows, names = table["row"].to_numpy(), np.array(table["sample_id"].to_pylist(), dtype="S32")
    same = len(rows) == len(members) and (rows == index.rows[members]).all() and (names == index.names[members]).all()
    return bool(same) and set(table["source"].to_pylist()) == {index.source}


def _close(writer: pq.ParquetWriter | None, partial: Path, folder: Path, shard_ids: Sequence[str], number: int) -> int:
    if writer is None:
        return 0
    writer.close()
    publish(partial, folder / f"{shard_ids[number]}.parquet")
    return 1


def _pieces(index: SourceIndex, shard_of: np.ndarray, absent: np.ndarray) -> Iterator[tuple[int, pa.Table]]:
    """The rows of each wanted shard, in order, in pieces of at most one row group; other row groups are not read."""
    with open_tokens(index.path) as file:
        first = 0
        for group in range(file.num_row_groups):
            end = first + file.metadata.row_group(group).num_rows
            here = shard_of[first:end]
            wanted = np.unique(here[absent[here]])
            if len(wanted):
                table = file.read_row_group(group, columns=COLUMNS)
                table = table.append_column("source", pa.array([index.source] * len(table), pa.string()))
                for number in wanted.tolist():
                    yield number, table.take(pa.array(np.flatnonzero(here == number)))
            first = end


def _index_batch(path: Path, batch: pa.RecordBatch) -> tuple[np.ndarray, ...]:
    ids, mask = batch.column("input_ids"), batch.column("loss_mask")
    lengths = np.diff(ids.offsets.to_numpy()).astype(np.int64)
    mask_lengths = np.diff(mask.offsets.to_numpy())
    names = batch.column("sample_id").to_pylist()
    for wrong in np.flatnonzero((lengths != mask_lengths) | (lengths == 0))[:1]:
        raise UserError(f"{path}: sample {names[wrong]}: {lengths[wrong]} tokens, {mask_lengths[wrong]} mask values; tokenise again")
    starts = (mask.offsets.to_numpy() - mask.offsets[0].as_py())[:-1]
    supervised = np.add.reduceat(mask.flatten().to_numpy().astype(np.int64), starts) if len(names) else np.empty(0, np.int64)
    return batch.column("row").to_numpy().astype(np.int64), np.array(names, dtype="S32"), lengths, supervised


def open_tokens(path: Path) -> pq.ParquetFile:
    """Open a source's Parquet file of tokens.

    Raises:
        UserError: no such file, or one of another kind.
    """
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path}: expected a Parquet file of tokens: {error}") from error
    missing = [name for name in COLUMNS if name not in file.schema_arrow.names]
    if missing:
        raise UserError(f"{path}: expected the columns {', '.join(COLUMNS)}, missing {', '.join(missing)}")
    return file


def _read_accounting(path: Path) -> dict[str, Any]:
    try:
        accounting = json.loads(path.read_bytes())
        for field in ("rows_in", "kept", "samples", "skipped", "failed", "tokens", "supervised_tokens"):
            accounting[field]  # noqa: B018 (a missing field must be named here)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: expected a source's accounting: {type(error).__name__}: {error}") from error
    return accounting

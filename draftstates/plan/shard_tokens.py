"""Tokens of a planned shard: their writer, and a reader that checks their ids.

The reader compares the tokens with the sample ids, and the sample ids with the shard id.
"""

import dataclasses
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from draftstates import ids
from draftstates.errors import UserError
from draftstates.files import publish
from draftstates.tokens.files import SourceIndex, open_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledTokens:
    """What the server that answered said of one sample's supervised tokens.

    Attributes:
        logprobs: log probability of each, float32 [n].
        temperature: temperature of these; 0 for none.
    """

    logprobs: np.ndarray
    temperature: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardTokens:
    """A shard's samples as tokens.

    Attributes:
        sample_ids: S sample ids.
        lengths: tokens of each sample.
        input_ids: ids of all samples in sequence, int32 [T].
        loss_mask: mask values of all samples in sequence, uint8 [T].
    """

    shard_id: str
    sample_ids: list[str]
    lengths: list[int]
    input_ids: np.ndarray
    loss_mask: np.ndarray


def read_tokens(path: Path, *, shard_id: str) -> ShardTokens:
    """Read a planned shard's tokens.

    Raises:
        UserError: the file is missing, unreadable, or of another shard.
    """
    again = _again(path)
    try:
        table = pq.read_table(path, columns=["sample_id", "input_ids", "loss_mask"])
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: tokens of shard {shard_id} cannot be read ({error}); {again}"
        ) from error
    names = table["sample_id"].to_pylist()
    if ids.shard_id(names) != shard_id:
        raise UserError(
            f"{path}: expected the tokens of shard {shard_id}, found those of"
            f" {ids.shard_id(names)}; {again}"
        )
    for name, sample, mask in zip(names, table["input_ids"], table["loss_mask"], strict=True):
        found = ids.sample_id(sample.values.to_numpy(), mask.values.to_numpy())
        if found != name:
            raise UserError(
                f"{path}: the tokens of sample {name} are those of {found}: the file is damaged;"
                f" {again}"
            )
    column = table["input_ids"].combine_chunks()
    lengths = np.diff(column.offsets.to_numpy()).tolist()
    return ShardTokens(
        shard_id=shard_id,
        sample_ids=names,
        lengths=lengths,
        input_ids=column.flatten().to_numpy().astype(np.int32),
        loss_mask=table["loss_mask"].combine_chunks().flatten().to_numpy().astype(np.uint8),
    )


def read_sampled(path: Path, *, shard_id: str) -> dict[str, SampledTokens]:
    """Return what the server that answered said of a shard's samples, by sample id.

    Raises:
        UserError: the file is missing, unreadable or of another shard, or says nothing of a sample.
    """
    tokens = read_tokens(path, shard_id=shard_id)
    table = pq.read_table(path, columns=["logprobs", "temperature"])
    said = zip(table["logprobs"], table["temperature"].to_pylist(), strict=True)
    found = {}
    for name, (logprobs, temperature) in zip(tokens.sample_ids, said, strict=True):
        if not logprobs.is_valid or temperature is None:
            raise UserError(
                f"{path}: sample {name}: expected the log probabilities of its answers, found none;"
                f" {_again(path)}"
            )
        found[name] = SampledTokens(
            logprobs=logprobs.values.to_numpy(), temperature=float(temperature)
        )
    return found


def _again(path: Path) -> str:
    return f"run: rm -f {shlex.quote(str(path))} && snakemake --cores all --forcerun plan"


def write_shard_tokens(
    index: SourceIndex, shard_of: np.ndarray, shard_ids: Sequence[str], *, folder: Path
) -> int:
    """Write `<shard id>.parquet` for each shard of a source: the source's columns, and `source`.

    A present file with the same rows is kept. A file that names other rows or another source is
    replaced: the shard id depends on the samples alone, not on their rows.

    Args:
        index: the source's samples.
        shard_of: shard of each sample, int [S]: ascending, -1 for a sample in no shard.
        shard_ids: ids of the source's shards.
        folder: folder of the files.

    Returns:
        The number of files written. A final name exists only when its file is complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    members = np.flatnonzero(shard_of >= 0)
    ends = np.searchsorted(shard_of[members], np.arange(len(shard_ids) + 1))
    parts = [members[first:end] for first, end in zip(ends, ends[1:], strict=False)]
    current_files = [
        _is_current(folder / f"{name}.parquet", index, part)
        for name, part in zip(shard_ids, parts, strict=True)
    ]
    # the last element, at index -1, is for samples in no shard
    absent = ~np.array([*current_files, True])
    written, current, writer = 0, -1, None
    partial = folder / f".{index.source}.{os.getpid()}.partial"
    try:
        for number, table in _pieces(index, shard_of, absent):
            if number != current:
                written += _close(writer, partial, folder, shard_ids, current)
                current, writer = (
                    number,
                    pq.ParquetWriter(partial, table.schema, compression="zstd"),
                )
            writer.write_table(table)
        written += _close(writer, partial, folder, shard_ids, current)
    finally:
        partial.unlink(missing_ok=True)
    return written


def _is_current(path: Path, index: SourceIndex, members: np.ndarray) -> bool:
    """Return whether a shard's file holds these samples with their present rows and source.

    The same answers may be sampled a second time, with other log probabilities.
    """
    if index.is_answered:
        return False
    try:
        table = pq.read_table(path, columns=["row", "sample_id", "source"])
    except (OSError, ValueError, KeyError):
        # the file is missing, cut short, or of another kind: it is replaced
        return False
    rows, names = table["row"].to_numpy(), np.array(table["sample_id"].to_pylist(), dtype="S32")
    same = (
        len(rows) == len(members)
        and (rows == index.rows[members]).all()
        and (names == index.names[members]).all()
    )
    return bool(same) and set(table["source"].to_pylist()) == {index.source}


def _close(
    writer: pq.ParquetWriter | None,
    partial: Path,
    folder: Path,
    shard_ids: Sequence[str],
    number: int,
) -> int:
    """Publish the file of a shard; return the number of files that this is, 0 without a writer."""
    if writer is None:
        return 0
    writer.close()
    publish(partial, folder / f"{shard_ids[number]}.parquet")
    return 1


def _pieces(
    index: SourceIndex, shard_of: np.ndarray, absent: np.ndarray
) -> Iterator[tuple[int, pa.Table]]:
    """Yield the rows of each shard that has no file, in order, in pieces of at most one row group.

    Row groups without such rows are not read.
    """
    with open_tokens(index.path) as file:
        first = 0
        for group in range(file.num_row_groups):
            end = first + file.metadata.row_group(group).num_rows
            here = shard_of[first:end]
            wanted = np.unique(here[absent[here]])
            if len(wanted):
                table = file.read_row_group(group)
                table = table.append_column(
                    "source", pa.array([index.source] * len(table), pa.string())
                )
                for number in wanted.tolist():
                    yield number, table.take(pa.array(np.flatnonzero(here == number)))
            first = end

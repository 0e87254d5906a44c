"""The tokeniser's Parquet files: a writer of samples, and an index of one source's samples."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from draftstates.documents import sealed
from draftstates.errors import UserError
from draftstates.files import differences, file_checksum, publish, publish_json
from draftstates.tokens.turns import Sample

SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("part", pa.int32(), nullable=False),
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
        # of answers by the target model: one of each supervised token, see `turns.Sample`
        pa.field("logprobs", pa.list_(pa.float32())),
        pa.field("temperature", pa.float32()),
    ]
)
_GROUP_ROWS = 1024
_AGAIN = "run: snakemake --cores all --forcerun tokenise"
COLUMNS = ["row", "part", "sample_id", "input_ids", "loss_mask"]


class SampleWriter:
    """A writer of samples in row groups; without `finish` it leaves no file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._writer = pq.ParquetWriter(self._temporary, SCHEMA, compression="zstd")
        self._rows: list[tuple[int, int, str, Sample]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writer.close()
        self._temporary.unlink(missing_ok=True)

    def add(self, *, row: int, part: int, sample_id: str, sample: Sample) -> None:
        """Add one sample."""
        self._rows.append((row, part, sample_id, sample))
        if len(self._rows) == _GROUP_ROWS:
            self._flush()

    def finish(self, renderer: str) -> None:
        """Write the remaining samples and what rendered them; give the file its final name."""
        self._flush()
        self._writer.add_key_value_metadata({"draftstates.renderer": renderer})
        self._writer.close()
        publish(self._temporary, self.path)

    def _flush(self) -> None:
        if not self._rows:
            return
        rows, parts, names, samples = zip(*self._rows, strict=True)
        offsets = pa.array(
            np.cumsum([0, *(len(sample.input_ids) for sample in samples)], dtype=np.int32)
        )
        ids = pa.ListArray.from_arrays(
            offsets, pa.array(np.concatenate([sample.input_ids for sample in samples]))
        )
        mask = pa.ListArray.from_arrays(
            offsets, pa.array(np.concatenate([sample.loss_mask for sample in samples]))
        )
        columns = [
            pa.array(rows, pa.int64()),
            pa.array(parts, pa.int32()),
            pa.array(names, pa.string()),
            ids,
            mask,
            pa.array([sample.logprobs for sample in samples], pa.list_(pa.float32())),
            pa.array([sample.temperature for sample in samples], pa.float32()),
        ]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=SCHEMA))
        self._rows.clear()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceIndex:
    """The facts of a source that the plan needs, without its tokens.

    Attributes:
        rows: row of each sample in the source, int64 [S].
        names: sample ids, S32 [S].
        lengths: tokens of each sample, int64 [S].
        supervised: supervised tokens of each sample, int64 [S].
        accounting: the tokeniser's `<source>.json`.
    """

    path: Path
    source: str
    rows: np.ndarray
    names: np.ndarray
    lengths: np.ndarray
    supervised: np.ndarray
    accounting: dict[str, Any]

    @property
    def is_answered(self) -> bool:
        """Whether the supervised tokens are the target model's own answers."""
        return "answers" in self.accounting


def read_index(path: Path) -> SourceIndex:
    """Read a source's samples without their tokens, and its accounting.

    Args:
        path: `<source>.parquet`; `<source>.json` lies beside it.

    Raises:
        UserError: a file is missing or of another kind, or the two disagree.
    """
    accounting = _checked_accounting(path)
    parts: list[tuple[np.ndarray, ...]] = [
        (np.empty(0, np.int64), np.empty(0, "S32"), np.empty(0, np.int64), np.empty(0, np.int64))
    ]
    with open_tokens(path) as file:
        for batch in file.iter_batches(
            batch_size=1024, columns=["row", "sample_id", "input_ids", "loss_mask"]
        ):
            parts.append(_index_batch(path, batch))
    rows, names, lengths, supervised = (
        np.concatenate(columns) for columns in zip(*parts, strict=True)
    )
    found = {
        "kept": len(np.unique(rows)),
        "samples": len(names),
        "tokens": int(lengths.sum()),
        "supervised_tokens": int(supervised.sum()),
    }
    for field in differences(found, accounting):
        raise UserError(
            f"{path}: unexplained rows: its accounting says {field.found:,} {field.name}, the"
            f" file has {field.expected:,}; {_AGAIN}"
        )
    return SourceIndex(
        path=path,
        source=path.stem,
        rows=rows,
        names=names,
        lengths=lengths,
        supervised=supervised,
        accounting=accounting,
    )


def _index_batch(path: Path, batch: pa.RecordBatch) -> tuple[np.ndarray, ...]:
    ids, mask = batch.column("input_ids"), batch.column("loss_mask")
    lengths = np.diff(ids.offsets.to_numpy()).astype(np.int64)
    mask_lengths = np.diff(mask.offsets.to_numpy())
    names = batch.column("sample_id").to_pylist()
    for wrong in np.flatnonzero((lengths != mask_lengths) | (lengths == 0))[:1]:
        raise UserError(
            f"{path}: sample {names[wrong]}: {lengths[wrong]} tokens, {mask_lengths[wrong]} mask"
            f" values; {_AGAIN}"
        )
    starts = (mask.offsets.to_numpy() - mask.offsets[0].as_py())[:-1]
    supervised = (
        np.add.reduceat(mask.flatten().to_numpy().astype(np.int64), starts)
        if len(names)
        else np.empty(0, np.int64)
    )
    return (
        batch.column("row").to_numpy().astype(np.int64),
        np.array(names, dtype="S32"),
        lengths,
        supervised,
    )


def open_tokens(path: Path) -> pq.ParquetFile:
    """Open a source's Parquet file of tokens.

    Raises:
        UserError: the file is missing, or of another kind.
    """
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path}: expected a Parquet file of tokens: {error}; {_AGAIN}") from error
    missing = [name for name in COLUMNS if name not in file.schema_arrow.names]
    if missing:
        raise UserError(
            f"{path}: expected the columns {', '.join(COLUMNS)}, missing {', '.join(missing)};"
            f" {_AGAIN}"
        )
    return file


def publish_accounting(counts: Mapping[str, Any], path: Path, *, tokens: Path) -> None:
    """Write a source's accounting, with what shows a later change of it or of the tokens."""
    publish_json(sealed({**counts, "checksum": file_checksum(tokens)}), path)


def read_accounting(path: Path) -> dict[str, Any]:
    """Return a source's accounting.

    Raises:
        UserError: the file cannot be read, or was changed since it was written.
    """
    try:
        accounting = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: expected a source's accounting: {type(error).__name__}: {error}; {_AGAIN}"
        ) from error
    if not isinstance(accounting, dict) or sealed(accounting) != accounting:
        raise UserError(
            f"{path}: expected a source's accounting as it was written, found another digest;"
            f" {_AGAIN}"
        )
    return accounting


def _checked_accounting(tokens: Path) -> dict[str, Any]:
    """Read the accounting beside a source's tokens, and hold both to their checksums."""
    path = tokens.with_suffix(".json")
    accounting = read_accounting(path)
    try:
        found = file_checksum(tokens)
    except OSError as error:
        raise UserError(
            f"{tokens}: expected a Parquet file of tokens: {error.strerror}; {_AGAIN}"
        ) from error
    if found != accounting.get("checksum"):
        raise UserError(
            f"{tokens}: changed since it was written: expected checksum"
            f" {accounting.get('checksum')}, as {path} says, found {found}; {_AGAIN}"
        )
    return accounting

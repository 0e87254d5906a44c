"""Writing samples to Parquet; a final name exists only when its file is complete and synced."""

import os
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from draftstates.building import publish
from draftstates.tokens.turns import Sample

SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("part", pa.int32(), nullable=False),
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
    ]
)
_GROUP_ROWS = 1024


class SampleWriter:
    """Collects samples and writes them in row groups; without `finish` nothing is left behind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._writer = pq.ParquetWriter(self._temporary, SCHEMA, compression="zstd")
        self._rows: list[tuple[int, int, str, Sample]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._writer.close()
        self._temporary.unlink(missing_ok=True)

    def add(self, *, row: int, part: int, sample_id: str, sample: Sample) -> None:
        """Append one sample."""
        self._rows.append((row, part, sample_id, sample))
        if len(self._rows) == _GROUP_ROWS:
            self._flush()

    def finish(self) -> None:
        """Write what is left and give the file its final name."""
        self._flush()
        self._writer.close()
        publish(self._temporary, self.path)

    def _flush(self) -> None:
        if not self._rows:
            return
        rows, parts, names, samples = zip(*self._rows, strict=True)
        offsets = pa.array(np.cumsum([0, *(len(sample.input_ids) for sample in samples)], dtype=np.int32))
        ids = pa.ListArray.from_arrays(offsets, pa.array(np.concatenate([sample.input_ids for sample in samples])))
        mask = pa.ListArray.from_arrays(offsets, pa.array(np.concatenate([sample.loss_mask for sample in samples])))
        columns = [pa.array(rows, pa.int64()), pa.array(parts, pa.int32()), pa.array(names, pa.string()), ids, mask]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=SCHEMA))
        self._rows.clear()

"""Data files of every kind with any bytes damaged, and records of the hub with any value changed:
rows are read, or the file is refused by name.
"""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzz import changed, damaged
from hypothesis import given
from hypothesis import strategies as st
from token_kit import chat

from draftstates.errors import UserError
from draftstates.tokens.conversations import parse_row
from draftstates.tokens.hub_data import RECORD_FORMAT, read_record
from draftstates.tokens.rows import RowSkipped, read_rows

ROWS = [{"messages": chat(f"question {i}", f"answer {i}")} for i in range(4)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
RECORD = {
    "format": RECORD_FORMAT,
    "id": "a/b",
    "subset": None,
    "split": "train",
    "revision": "0" * 40,
    "rows": 4,
    "asked": None,
}


def write(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    if path.name.endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress(LINES))
    elif path.name.endswith(".jsonl.zst"):
        path.write_bytes(pa.Codec("zstd").compress(LINES, asbytes=True))
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS))
    elif path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    else:
        path.write_bytes(LINES)


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.parquet", "a.arrow"]
)
@given(data=st.data())
def test_damaged_data_are_read_or_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("data") / name
    write(path)
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    try:
        found = list(read_rows([path]))
    except UserError as error:
        assert str(path) in str(error)
        return
    assert [row.number for row in found] == list(range(len(found)))
    for row in found:
        try:
            parse_row(row.value)
        except RowSkipped:
            continue


@given(document=changed(RECORD))
def test_a_record_of_the_hub_with_any_value_changed_is_read_or_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, document: object
) -> None:
    path = tmp_path_factory.mktemp("record") / "one.json"
    path.write_text(json.dumps(document))
    try:
        found = read_record(path)
    except UserError as error:
        assert str(path) in str(error)
        assert "snakemake --cores all --forcerun hub_data" in str(error)
    else:
        assert type(found["rows"]) is int

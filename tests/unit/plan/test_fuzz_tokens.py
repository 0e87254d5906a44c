"""Files of tokens, their accounting and a shard's tokens with any bytes damaged or any value
changed: planned as they were, or refused by name.
"""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from fuzz import changed, damaged, flip_in_column
from hypothesis import given
from hypothesis import strategies as st

from draftstates import ids
from draftstates.errors import UserError
from draftstates.plan.shard_tokens import read_tokens, write_shard_tokens
from draftstates.tokens.files import (
    SampleWriter,
    SourceIndex,
    publish_accounting,
    read_index,
)
from draftstates.tokens.turns import Sample

SAMPLES = [
    Sample(np.arange(n, 2 * n, dtype=np.int32), (np.arange(n) % 2).astype(np.uint8))
    for n in (3, 5, 9)
]
NAMES = [ids.sample_id(sample.input_ids, sample.loss_mask) for sample in SAMPLES]
SHARD = ids.shard_id(NAMES)


def plan(tokens: Path) -> SourceIndex:
    """Read a source as the plan does, and write the tokens of its one shard."""
    index = read_index(tokens)
    (shards := tokens.parent / "shards").mkdir(exist_ok=True)
    (shards / f"{SHARD}.parquet").unlink(missing_ok=True)
    write_shard_tokens(index, np.zeros(len(index.names), np.int32), [SHARD], [None], folder=shards)
    return index


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "one.parquet"
    with SampleWriter(path) as writer:
        for row, (name, sample) in enumerate(zip(NAMES, SAMPLES, strict=True)):
            writer.add(row=row, part=0, sample_id=name, sample=sample)
        writer.finish("template")
    counts = {"tokens": 17, "supervised_tokens": sum(int(s.loss_mask.sum()) for s in SAMPLES)}
    accounting = {
        **{"source": "one", "rows_in": 4, "kept": 3, "samples": 3, **counts},
        **{"skipped": {"empty": 1}, "failed": {}, "examples": [], "image": None},
    }
    publish_accounting(accounting, path.with_suffix(".json"), tokens=path)
    for published in (path, path.with_suffix(".json")):
        published.chmod(0o644)
    return path


def check(tokens: Path) -> None:
    """Plan; the result is refused by name, or read with the samples that are in the file."""
    try:
        plan(tokens)
        found = read_tokens(tokens.parent / "shards" / f"{SHARD}.parquet", shard_id=SHARD)
    except UserError as error:
        assert str(tokens.parent) in str(error)
        assert "snakemake --cores all" in str(error)
    else:
        assert found.sample_ids == NAMES
        assert found.input_ids.tolist() == np.concatenate([s.input_ids for s in SAMPLES]).tolist()


@given(data=st.data())
def test_damaged_tokens_are_refused_by_name_or_planned_as_they_were(
    tokens: Path, data: st.DataObject
) -> None:
    whole = tokens.read_bytes()
    tokens.write_bytes(data.draw(damaged(whole)))
    try:
        check(tokens)
    finally:
        tokens.write_bytes(whole)


@given(data=st.data())
def test_an_accounting_with_any_value_changed_is_refused_by_name_or_closes(
    tokens: Path, data: st.DataObject
) -> None:
    accounting = tokens.with_suffix(".json")
    whole = accounting.read_text()
    accounting.write_text(json.dumps(data.draw(changed(json.loads(whole)))))
    try:
        check(tokens)
    finally:
        accounting.write_text(whole)


@given(data=st.data())
def test_damaged_tokens_of_a_shard_are_refused_by_name_or_read_as_they_were(
    tokens: Path, data: st.DataObject
) -> None:
    plan(tokens)
    path = tokens.parent / "shards" / f"{SHARD}.parquet"
    path.chmod(0o644)
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    try:
        found = read_tokens(path, shard_id=SHARD)
    except UserError as error:
        assert str(path) in str(error)
        assert "snakemake --cores all --forcerun plan" in str(error)
    else:
        assert found.sample_ids == NAMES
        assert found.lengths == [3, 5, 9]


@pytest.mark.parametrize("column", ["row", "source", "part", "loss_mask", "logprobs"])
def test_every_column_of_a_shards_tokens_is_held_to_its_checksum(tokens: Path, column: str) -> None:
    """No id covers a sample's row and source, which the manifest's table takes from here."""
    plan(tokens)
    path = tokens.parent / "shards" / f"{SHARD}.parquet"
    path.chmod(0o644)
    flip_in_column(path, column)
    with pytest.raises(OSError, match="CRC checksum"):
        pq.read_table(path, columns=[column], page_checksum_verification=True)

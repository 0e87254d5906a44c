"""A captured shard with any receipt changed or any file damaged: verification refuses it by name,
or it is as good as it was.
"""

import json
import shutil
from pathlib import Path

import pytest
from captured import Files, capture, tiny_model, verify, write
from fuzz import changed, damaged
from hypothesis import given
from hypothesis import strategies as st

from draftstates.errors import ShardRefused


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("verify")
    return write(capture(tiny_model(folder / "model"), samples=4), folder / "shards")


def refused(files: Files) -> bool:
    try:
        verify(files)
    except ShardRefused as error:
        assert files.shard_id in str(error)
        assert "snakemake --cores all" in str(error)
        return True
    return False


@given(data=st.data())
def test_receipts_with_any_value_changed_are_refused_by_name_or_say_the_same(
    files: Files, data: st.DataObject
) -> None:
    whole = files.receipts.read_text()
    files.receipts.write_text(json.dumps(data.draw(changed(json.loads(whole)))))
    try:
        refused(files)
    finally:
        files.receipts.write_text(whole)


@pytest.mark.parametrize("name", ["shard", "recaptures"])
@given(data=st.data(), head=st.booleans())
def test_a_damaged_file_is_refused_by_name(
    files: Files, name: str, data: st.DataObject, head: bool
) -> None:
    path: Path = getattr(files, name)
    kept = path.with_name("kept")
    shutil.copy2(path, kept)
    whole = path.read_bytes()
    length = 4096 if head else len(whole)
    changed = data.draw(damaged(whole[:length])) + whole[length:]
    path.write_bytes(changed)
    try:
        assert refused(files) or changed == whole
    finally:
        kept.replace(path)

"""Shard files with any bytes damaged: a reader refuses them by name, or gives what was captured."""

from pathlib import Path

import pytest
import torch
from fuzz import damaged
from hypothesis import given
from hypothesis import strategies as st
from synthetic import Synthetic, small

from draftstates import ShardDataset
from draftstates.errors import UserError
from draftstates.exports.compact import compact_manifest
from draftstates.shards.compact import Storage

STATES = ("hidden_states", "final_hidden_state")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Synthetic:
    return small(tmp_path_factory.mktemp("shards"), shard_sizes=(3,))


@pytest.fixture(scope="module", params=["captured", "compact"])
def manifest(made: Synthetic, request: pytest.FixtureRequest) -> Path:
    if request.param == "captured":
        return made.path
    output = made.path.parent / "copy"
    storage = Storage(fp8="all", supervised_rows=True)
    compact_manifest(made.path, output, storage)
    return output / "manifest.json"


def read_all(manifest: Path, *, verify: bool) -> list[dict[str, torch.Tensor]]:
    samples = ShardDataset(manifest, verify=verify)
    return [samples[i] for i in range(len(samples))]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], names: list[str]) -> bool:
    return all(
        one[name].shape == other[name].shape
        and torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8))
        for name in names
    )


@given(data=st.data(), verify=st.booleans(), head=st.booleans())
def test_a_damaged_shard_is_refused_by_name_or_gives_what_was_captured(
    manifest: Path, data: st.DataObject, verify: bool, head: bool
) -> None:
    shard = next((manifest.parent / "shards").iterdir())
    shard.chmod(0o644)
    whole = shard.read_bytes()
    right = read_all(manifest, verify=True)
    # most bytes are states: half of the tries are about the header and what stands beside it
    length = 4096 + 400 if head else len(whole)
    changed = data.draw(damaged(whole[:length])) + whole[length:]
    shard.write_bytes(changed)
    try:
        found = read_all(manifest, verify=verify)
    except UserError as error:
        assert shard.name in str(error)
        assert f"rm -f {shard}" in str(error)
    else:
        names = [name for name in right[0] if verify or name not in STATES]
        assert all(same(*pair, names) for pair in zip(found, right, strict=True))
    finally:
        shard.write_bytes(whole)


@given(data=st.data())
def test_a_damaged_table_of_samples_is_refused_by_name(
    made: Synthetic, data: st.DataObject
) -> None:
    table = made.path.with_name("samples.parquet")
    whole = table.read_bytes()
    table.write_bytes(data.draw(damaged(whole)))
    try:
        if table.read_bytes() != whole:
            with pytest.raises(UserError, match="samples.parquet: changed since the manifest was"):
                read_all(made.path, verify=False)
    finally:
        table.write_bytes(whole)

"""Compact shards read as what they were made from: exactly, or within e4m3's step, and zero only
where no loss reads.
"""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from synthetic import (
    Synthetic,
    capture_spec,
    norm_model,
    sample,
    sharing,
    small,
    write_manifest,
    write_shard,
)

from draftstates.errors import UserError
from draftstates.exports.compact import compact_manifest
from draftstates.exports.export import export_manifest
from draftstates.model.digest import model_digest
from draftstates.model.folder import ModelFolder
from draftstates.shards.compact import (
    CompactShard,
    Storage,
    dequantise,
    quantise,
    rows_of_loss,
    write_compact,
)
from draftstates.shards.compacting import check_compact
from draftstates.shards.dataset import ShardDataset
from draftstates.shards.layout import Shard, read_header

FP8 = Storage(fp8="all", supervised_rows=False)
LAYERS = Storage(fp8="layers", supervised_rows=False)
ROWS = Storage(fp8=None, supervised_rows=True)
BOTH = Storage(fp8="all", supervised_rows=True)


@pytest.fixture
def manifest(tmp_path: Path) -> Synthetic:
    return small(tmp_path / "run", spec=capture_spec(hidden_size=64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_quantised_value_is_within_a_step_of_its_row(dtype: torch.dtype) -> None:
    rows = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    # a residual stream has a few huge components
    rows[:, :, 7] *= 300
    rows[0] = 0
    found = dequantise(*quantise(rows), dtype)
    step = rows.float().abs() / 16 + rows.float().abs().amax(-1, keepdim=True) / 448 / 2**9
    assert ((found.float() - rows.float()).abs() <= step * 1.02).all()
    assert torch.equal(found[0], rows[0])
    assert not torch.equal(found, rows)


def test_the_rows_of_a_loss_are_the_supervised_ones_and_their_neighbours() -> None:
    assert rows_of_loss(np.array([0, 0, 0, 1, 0, 0, 1, 1, 0, 0], np.uint8)).tolist() == [
        0,
        0,
        1,
        1,
        1,
        1,
        1,
        1,
        1,
        0,
    ]
    assert rows_of_loss(np.array([1, 0, 0], np.uint8)).tolist() == [1, 1, 0]
    assert not rows_of_loss(np.zeros(4, np.uint8)).any()


@pytest.mark.parametrize(
    "storage", [FP8, LAYERS, ROWS, BOTH, Storage(fp8="layers", supervised_rows=True)]
)
def test_a_compact_manifest_reads_as_the_whole_one(
    tmp_path: Path, manifest: Synthetic, storage: Storage
) -> None:
    compact_manifest(manifest.path, tmp_path / "compact", storage)
    whole = ShardDataset(manifest.path)
    compact = ShardDataset(tmp_path / "compact" / "manifest.json", verify=True)
    assert len(compact) == len(whole)
    for i in range(len(whole)):
        found, expected = compact[i], whole[i]
        needed = (
            torch.from_numpy(rows_of_loss(expected["loss_mask"].numpy()))
            if storage.supervised_rows
            else slice(None)
        )
        for name in ("input_ids", "loss_mask"):
            assert torch.equal(found[name], expected[name])
        for name, rows in (("hidden_states", slice(None)), ("final_hidden_state", needed)):
            right = expected[name][rows]
            coded = storage.fp8 == "all" or (storage.fp8 == "layers" and name == "hidden_states")
            right = dequantise(*quantise(right), right.dtype) if coded else right
            assert found[name].dtype == right.dtype and torch.equal(found[name][rows], right)
        if storage.supervised_rows:
            assert not found["final_hidden_state"][~needed].any() and (~needed).any()


def test_a_sample_that_several_shards_hold_is_made_compact_in_each(tmp_path: Path) -> None:
    """Without deduplication; one batch or another, so the copies' states differ in the last bits
    and have checksums of their own.
    """
    spec = capture_spec(hidden_size=64)
    first, twice, last = (sample(5 + i, spec=spec, seed=i) for i in range(3))
    again = {**twice, "hidden_states": twice["hidden_states"] * 1.01}
    manifest = write_manifest(tmp_path / "run", [[first, twice], [again, last, first]], spec=spec)
    compact_manifest(manifest.path, tmp_path / "compact", ROWS)
    compact_manifest(manifest.path, tmp_path / "compact", ROWS)
    whole = ShardDataset(manifest.path)
    compact = ShardDataset(tmp_path / "compact" / "manifest.json", verify=True)
    assert len(compact) == len(whole) == 5
    assert all(
        torch.equal(compact[i]["hidden_states"], whole[i]["hidden_states"]) for i in range(5)
    )


def test_states_whose_top_token_would_change_are_stored_in_full(tmp_path: Path) -> None:
    folder = norm_model(tmp_path / "model", hidden_size=64)
    weight = load_file(folder / "model.safetensors")
    head = torch.randn(500, 64, generator=torch.Generator().manual_seed(1))
    save_file({**weight, "lm_head.weight": head}, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 500})
    )
    manifest = small(
        tmp_path / "run",
        spec=capture_spec(
            hidden_size=64, final_norm="post_norm", model_digest=model_digest(ModelFolder(folder))
        ),
    )
    storage = Storage(fp8="all", supervised_rows=True, keep_top_token=True)
    compact_manifest(manifest.path, tmp_path / "kept", storage, folder)
    compact_manifest(manifest.path, tmp_path / "all", BOTH)
    whole, kept, coded = (
        ShardDataset(tmp_path / name / "manifest.json", verify=True)
        for name in ("run", "kept", "all")
    )
    changed = 0
    for i in range(len(whole)):
        expected, found, plain = (
            dataset[i]["final_hidden_state"] for dataset in (whole, kept, coded)
        )
        needed = torch.from_numpy(rows_of_loss(whole[i]["loss_mask"].numpy()))
        top, code = ((states[needed].float() @ head.T).argmax(-1) for states in (expected, plain))
        assert torch.equal((found[needed].float() @ head.T).argmax(-1), top)
        assert torch.equal(found[needed][top != code], expected[needed][top != code])
        assert torch.equal(found[needed][top == code], plain[needed][top == code])
        changed += int((top != code).sum())
    assert changed
    with pytest.raises(UserError, match="needs the captured model's folder"):
        compact_manifest(manifest.path, tmp_path / "other", storage)
    with pytest.raises(UserError, match="not the captured model"):
        compact_manifest(manifest.path, tmp_path / "other", storage, norm_model(tmp_path / "wrong"))
    with pytest.raises(UserError, match="goes with fp8 'all'"):
        Storage(fp8="layers", supervised_rows=False, keep_top_token=True)


def test_e4m3_takes_little_more_than_half_the_bytes(tmp_path: Path) -> None:
    manifest = small(tmp_path / "run", spec=capture_spec(hidden_size=576))
    document = compact_manifest(manifest.path, tmp_path / "compact", FP8)
    states = [load_file(tmp_path / "compact" / shard.path) for shard in document.shards]
    names = ("hidden_states", "final_hidden_state", "hidden_scales", "final_scales")
    stored = sum(shard[name].nbytes for shard in states for name in names)
    tokens = sum(shard.tokens for shard in document.shards)
    assert stored / tokens <= 0.52 * manifest.spec.row_bytes


@pytest.mark.parametrize("name", ["speculators", "model_optimizer"])
def test_a_compact_manifest_is_exported(tmp_path: Path, manifest: Synthetic, name: str) -> None:
    compact_manifest(manifest.path, tmp_path / "compact", BOTH)
    compact = tmp_path / "compact" / "manifest.json"
    export_manifest(compact, tmp_path / "out", name=name, final_norm="pre_norm")
    assert json.loads((tmp_path / "out" / "export.json").read_text())["storage"] == {
        "fp8": "all",
        "keep_top_token": False,
        "supervised_rows": True,
    }
    summary = export_manifest(manifest.path, tmp_path / "out", name=name, final_norm="pre_norm")
    # the whole states are other states
    assert summary["files_reused"] == 0


def test_a_second_pass_writes_no_shard_and_other_storage_all(
    tmp_path: Path, manifest: Synthetic
) -> None:
    def times() -> list[int]:
        return [
            path.stat().st_mtime_ns for path in sorted((tmp_path / "compact" / "shards").iterdir())
        ]

    compact_manifest(manifest.path, tmp_path / "compact", FP8)
    before = times()
    compact_manifest(manifest.path, tmp_path / "compact", FP8)
    assert times() == before
    compact_manifest(manifest.path, tmp_path / "compact", BOTH)
    assert not set(times()) & set(before)


def test_a_shard_with_another_mask_is_not_made_compact(tmp_path: Path, manifest: Synthetic) -> None:
    path = manifest.path.parent / json.loads(manifest.path.read_text())["shards"][1]["path"]
    data = bytearray(path.read_bytes())
    data[read_header(path).tensors["loss_mask"][2]] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="has other tokens or another mask"):
        compact_manifest(manifest.path, tmp_path / "compact", FP8)


def test_a_damaged_shard_is_not_made_compact(tmp_path: Path, manifest: Synthetic) -> None:
    path = manifest.path.parent / json.loads(manifest.path.read_text())["shards"][1]["path"]
    with open(path, "r+b") as file:
        file.seek(5000)
        file.write(b"\x55\xaa\x55")
    with pytest.raises(UserError, match="does not have the checksum"):
        compact_manifest(manifest.path, tmp_path / "compact", FP8)
    assert not (tmp_path / "compact" / "manifest.json").exists()


@pytest.mark.parametrize(
    "name", ["hidden_states", "final_hidden_state", "hidden_scales", "final_scales"]
)
def test_a_changed_byte_of_a_compact_shard_is_found_and_mended(
    tmp_path: Path, manifest: Synthetic, name: str
) -> None:
    copy = tmp_path / "compact" / "manifest.json"
    document = compact_manifest(manifest.path, copy.parent, FP8)
    path = copy.parent / document.shards[0].path
    whole, status = path.read_bytes(), path.stat()
    data = bytearray(whole)
    header = 8 + int.from_bytes(data[:8], "little")
    data[header + json.loads(data[8:header])[name]["data_offsets"][0] + 1] ^= 1
    path.write_bytes(data)
    # as a fault of the disk, which leaves no trace in the folder
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(UserError, match="does not have the checksum"):
        ShardDataset(copy, verify=True)[0]
    compact_manifest(manifest.path, copy.parent, FP8)
    assert path.read_bytes() == whole
    path.write_bytes(data[:-10])
    with pytest.raises(UserError, match="not a whole safetensors file"):
        ShardDataset(copy)[0]


def test_a_compact_shard_that_reads_back_as_something_else_is_not_published(
    tmp_path: Path, manifest: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_wrong(source: Shard, path: Path, storage: Storage, top_token: object) -> None:
        write_compact(source, path, storage)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr("draftstates.exports.compact.write_compact", write_wrong)
    with pytest.raises(UserError, match="reads back as something else"):
        compact_manifest(manifest.path, tmp_path / "compact", FP8)
    assert not (tmp_path / "compact").exists()


def test_what_cannot_be_made_compact_is_refused(tmp_path: Path, manifest: Synthetic) -> None:
    with pytest.raises(UserError, match="nothing to do"):
        compact_manifest(
            manifest.path, tmp_path / "compact", Storage(fp8=None, supervised_rows=False)
        )
    compact_manifest(manifest.path, tmp_path / "compact", FP8)
    with pytest.raises(UserError, match="compact already"):
        compact_manifest(tmp_path / "compact" / "manifest.json", tmp_path / "again", ROWS)


def test_the_table_keeps_its_columns(tmp_path: Path, manifest: Synthetic) -> None:
    compact_manifest(manifest.path, tmp_path / "compact", FP8)
    before, after = (
        pq.read_table(folder / "samples.parquet")
        for folder in (manifest.path.parent, tmp_path / "compact")
    )
    assert after.schema == before.schema
    assert after.drop(["checksum"]).equals(before.drop(["checksum"]))


@pytest.mark.parametrize("changes", [{"final_state": False}, {"layers": ()}])
@pytest.mark.parametrize("storage", [FP8, LAYERS, ROWS, BOTH])
def test_what_is_not_captured_is_not_stored(
    tmp_path: Path, storage: Storage, changes: dict
) -> None:
    spec = capture_spec(hidden_size=64, **changes)
    manifest = small(tmp_path / "run", spec=spec)
    compact_manifest(manifest.path, tmp_path / "compact", storage)
    whole = ShardDataset(manifest.path)
    compact = ShardDataset(tmp_path / "compact" / "manifest.json", verify=True)
    for i in range(len(whole)):
        expected, found = whole[i], compact[i]
        assert list(found) == list(expected)
        needed = torch.from_numpy(rows_of_loss(expected["loss_mask"].numpy()))
        for name in set(expected) & {"hidden_states", "final_hidden_state"}:
            assert found[name].shape == expected[name].shape
            whole_rows = name == "hidden_states" or not storage.supervised_rows
            rows = slice(None) if whole_rows else needed
            difference = (found[name].float() - expected[name].float()).abs()[rows]
            assert difference.numel() == 0 or difference.max() < 0.2


@pytest.mark.parametrize(
    "storage",
    [
        Storage(fp8="layers", supervised_rows=False),
        Storage(fp8="all", supervised_rows=False),
        Storage(fp8="all", supervised_rows=True, keep_top_token=True),
        Storage(fp8=None, supervised_rows=True),
    ],
    ids=lambda storage: storage.text,
)
def test_a_compact_shard_shares_rows_and_reads_as_one_that_does_not(
    tmp_path: Path, storage: Storage
) -> None:
    """In fewer bytes; a final state that only the other sample's loss reads is zero here too."""
    spec = capture_spec(hidden_size=64)
    samples = list(sharing(tmp_path, spec=spec).samples.values())
    found = {}
    for name, minimum in (("shared", 4), ("apart", None)):
        (tmp_path / name).mkdir()
        shard_id = write_shard(tmp_path / name, samples, spec=spec, min_shared_tokens=minimum)
        source = Shard(tmp_path / name / f"{shard_id}.safetensors")
        path = tmp_path / name / "compact"
        write_compact(source, path, storage, lambda rows: rows.float().argmax(-1))
        found[name] = check_compact(path, source, storage, lambda rows: rows.float().argmax(-1))
    shared, apart = found["shared"], found["apart"]
    assert shared.path.stat().st_size < 0.7 * apart.path.stat().st_size
    assert max(len(shared.pieces(index)) for index in range(len(samples))) > 2
    for index in range(len(samples)):
        assert all(map(np.array_equal, shared.tokens(index), apart.tokens(index)))
        for one, other in zip(shared.states(index), apart.states(index), strict=True):
            assert torch.equal(one, other)


def test_a_changed_byte_of_a_shared_row_changes_the_checksum_of_each_sample_that_has_it(
    tmp_path: Path,
) -> None:
    sharing(tmp_path)
    (path,) = (tmp_path / "shards").iterdir()
    storage = Storage(fp8="all", supervised_rows=False)
    write_compact(Shard(path), tmp_path / "compact", storage)
    before = [CompactShard(tmp_path / "compact").checksum(index) for index in range(6)]
    data = bytearray((tmp_path / "compact").read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:start])
    data[start + entries["hidden_states"]["data_offsets"][0]] ^= 1
    (tmp_path / "compact").write_bytes(data)
    after = [CompactShard(tmp_path / "compact").checksum(index) for index in range(6)]
    assert all(one != other for one, other in zip(before, after, strict=True))


def test_segments_of_a_compact_shard_that_are_not_those_of_its_id_are_refused(
    tmp_path: Path,
) -> None:
    sharing(tmp_path)
    (path,) = (tmp_path / "shards").iterdir()
    write_compact(Shard(path), tmp_path / "compact", Storage(fp8="all", supervised_rows=False))
    data = bytearray((tmp_path / "compact").read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + json.loads(data[8:start])["segments"]["data_offsets"][0]] ^= 1
    (tmp_path / "compact").write_bytes(data)
    with pytest.raises(UserError, match="its segments are not those of its shard id"):
        CompactShard(tmp_path / "compact").states(0)

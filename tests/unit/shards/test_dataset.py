"""ShardDataset gives what was captured, under the trainer's names, or says on opening what does not
fit.
"""

import dataclasses
import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from synthetic import (
    Synthetic,
    capture_spec,
    change_manifest,
    norm_model,
    sample,
    sharing,
    small,
    write_manifest,
)
from torch.utils.data import DataLoader

from draftstates.errors import UserError
from draftstates.model.final_norm import FinalNorm
from draftstates.model.folder import ModelFolder
from draftstates.shards.dataset import ShardDataset, pad_batch, split_values
from draftstates.shards.layout import Shard, read_header

# what `cross_entropy` and an index take
USABLE = {"input_ids": torch.int64, "loss_mask": torch.bool}


@pytest.fixture
def manifest(tmp_path: Path) -> Synthetic:
    return small(tmp_path)


def test_every_sample_equals_what_was_written(manifest: Synthetic) -> None:
    dataset = ShardDataset(manifest.path, verify=True)
    assert len(dataset) == 7
    for i in range(len(dataset)):
        expected = manifest.samples[dataset.sample_id(i)]
        assert dataset[i].keys() == expected.keys()
        for name, tensor in dataset[i].items():
            dtype = USABLE.get(name, expected[name].dtype)
            assert tensor.dtype == dtype
            assert torch.equal(tensor, expected[name].to(dtype)), name
        assert dataset.lengths[i] == len(expected["input_ids"])
    assert torch.equal(dataset[-1]["input_ids"], dataset[6]["input_ids"])
    with pytest.raises(IndexError):
        dataset[7]


def test_a_capture_folder_names_its_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-12345678"
    made = small(folder)
    assert ShardDataset(str(folder)).path == made.path
    with pytest.raises(UserError, match=f"the capture folders {folder}: name one"):
        ShardDataset(tmp_path)
    with pytest.raises(UserError, match="found none: complete the run first"):
        ShardDataset(folder / "shards")


def test_a_slice_is_a_dataset_of_its_samples(manifest: Synthetic) -> None:
    dataset = ShardDataset(manifest.path)
    part = dataset[5:1:-2]
    assert [part.sample_id(i) for i in range(len(part))] == [dataset.sample_id(i) for i in (5, 3)]
    assert torch.equal(part[0]["hidden_states"], dataset[5]["hidden_states"])
    assert len(part[1:]) == 1
    assert len(dataset[9:]) == 0
    assert len(dataset) == 7


def test_a_dataset_prints_what_it_holds(manifest: Synthetic) -> None:
    dataset = ShardDataset(manifest.path, split="train")
    tokens = sum(len(dataset[i]["input_ids"]) for i in range(len(dataset)))
    supervised = sum(int(dataset[i]["loss_mask"].sum()) for i in range(len(dataset)))
    assert repr(dataset) == (
        f"ShardDataset('{manifest.path}': {len(dataset)} samples, {tokens} tokens, {supervised}"
        " supervised; r_2, r_3, r_5 and the final state pre_norm as bfloat16)"
    )


def test_a_read_sample_can_be_written_to_without_touching_the_shard(manifest: Synthetic) -> None:
    dataset = ShardDataset(manifest.path)
    file = dataset._shard(0).path.read_bytes()
    before = dataset[0]
    written = dataset[0]
    for tensor in written.values():
        tensor.zero_()
    expected = manifest.samples[dataset.sample_id(0)]
    for item in (before, dataset[0]):
        assert all(
            torch.equal(item[name], tensor.to(item[name].dtype))
            for name, tensor in expected.items()
        )
    assert dataset._shard(0).path.read_bytes() == file


@pytest.mark.parametrize(("context", "workers"), [("fork", 2), ("spawn", 1)])
def test_workers_give_the_same_as_one_process(
    manifest: Synthetic, context: str, workers: int
) -> None:
    dataset = ShardDataset(manifest.path)
    # a map is open already when the workers start
    dataset[0]
    batches = [[0, 3], [6, 1], [2, 5], [4]]
    loader = DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=pad_batch,
        multiprocessing_context=context,
    )
    for batch, indices in zip(loader, batches, strict=True):
        for row, i in enumerate(indices):
            length = int(batch["lengths"][row])
            assert torch.equal(batch["hidden_states"][row, :length], dataset[i]["hidden_states"])
            assert not batch["hidden_states"][row, length:].any()


@pytest.mark.parametrize("write", [small, sharing])
@pytest.mark.parametrize("layers", [None, [3], [2, 5]])
def test_a_batch_is_what_pad_batch_collates(
    tmp_path: Path, write: Callable[..., Synthetic], layers: list[int] | None
) -> None:
    dataset = ShardDataset(write(tmp_path).path, residual_layers=layers, verify=True)
    numbers = [4, 0, 5, 2]
    batch, expected = dataset.batch(numbers), pad_batch([dataset[i] for i in numbers])
    assert batch.keys() == expected.keys()
    for name, tensor in expected.items():
        assert batch[name].dtype == tensor.dtype
        assert torch.equal(batch[name], tensor), name
    (same,) = DataLoader(numbers, batch_size=4, collate_fn=dataset.batch)
    assert torch.equal(same["hidden_states"], batch["hidden_states"])


@pytest.mark.parametrize("asked", [{"final_state": False}, {"layers": ()}])
def test_a_batch_lacks_what_is_not_captured(tmp_path: Path, asked: dict) -> None:
    dataset = ShardDataset(sharing(tmp_path, spec=capture_spec(**asked)).path)
    batch, expected = dataset.batch([1, 4]), pad_batch([dataset[1], dataset[4]])
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[name], tensor) for name, tensor in expected.items())


def test_a_batch_is_read_without_another_copy_of_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is copied into the batch are maps of the file, and no sample is put together first."""
    dataset = ShardDataset(sharing(tmp_path).path)
    shard = dataset._shard(0)
    assert max(len(shard.segments.of_sample(i)) for i in range(len(shard))) > 2
    monkeypatch.setattr(type(shard), "states", lambda *_: pytest.fail("a sample was put together"))
    monkeypatch.setattr(torch, "cat", lambda *_: pytest.fail("pieces were put together"))
    dataset.batch(range(len(dataset)))


@pytest.mark.parametrize("verify", [False, True])
def test_a_sample_that_shares_rows_reads_as_written(tmp_path: Path, verify: bool) -> None:
    written = sharing(tmp_path)
    dataset = ShardDataset(written.path, verify=verify)
    for i in range(len(dataset)):
        for name, tensor in written.samples[dataset.sample_id(i)].items():
            assert torch.equal(dataset[i][name], tensor)


def test_a_changed_shared_row_fails_every_sample_that_has_it(tmp_path: Path) -> None:
    dataset = ShardDataset(sharing(tmp_path).path, verify=True)
    shard = dataset._shard(0)
    begin, _ = shard.header.states()["hidden_states"]
    data = bytearray(shard.path.read_bytes())
    data[begin] ^= 1
    shard.path.write_bytes(data)
    for i in range(len(dataset)):
        with pytest.raises(UserError, match="does not have the checksum"):
            dataset[i]


def test_damaged_offsets_of_segments_end_no_loop_in_silence(tmp_path: Path) -> None:
    dataset = ShardDataset(sharing(tmp_path).path)
    (path,) = (tmp_path / "shards").iterdir()
    _, _, begin, _ = read_header(path).tensors["segment_offsets"]
    data = bytearray(path.read_bytes())
    data[begin + 8 + 3] ^= 128
    path.write_bytes(data)
    with pytest.raises(UserError, match="are not those of shard"):
        list(dataset)


def test_no_index_error_of_a_shard_ends_a_loop_in_silence(
    manifest: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = ShardDataset(manifest.path)
    assert len(list(dataset)) == len(dataset)
    with pytest.raises(IndexError):
        dataset[len(dataset)]
    monkeypatch.setattr(Shard, "states", lambda *_: [][0])
    with pytest.raises(UserError, match=f"sample {dataset.sample_id(0)} cannot be read"):
        list(dataset)


def test_a_pickle_of_the_dataset_carries_no_map(manifest: Synthetic) -> None:
    dataset = ShardDataset(manifest.path)
    size = len(pickle.dumps(dataset))
    dataset[0], dataset[6]
    assert len(pickle.dumps(dataset)) == size


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"model": "other"}, "captured from 'tiny', the trainer asks for 'other'"),
        (
            {"residual_layers": [2, 4]},
            r"captured r_k for k in \[2, 3, 5\], the trainer asks for \[2, 4\]",
        ),
        ({"residual_layers": [5, 2]}, r"asks for \[5, 2\] \(ascending\)"),
        ({"final_norm": "post_norm"}, "post_norm is asked for and the capture holds pre_norm"),
        ({"final_norm": "both"}, "'pre_norm' or 'post_norm', found 'both'"),
        ({"trainer": "someone"}, "no trainer is called 'someone'"),
        ({"split": "test"}, "'train' or 'validation'"),
    ],
)
def test_opening_says_what_is_not_as_asked(manifest: Synthetic, asked: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        ShardDataset(manifest.path, **asked)


@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        (lambda found: found["shards"][0].pop("path"), r"shards\[0\].path: expected a value"),
        (lambda found: found["shards"].insert(0, 1), r"shards\[0\]: expected an object, found 1"),
        (lambda found: found.update(shards={}), "shards: expected a list, found {}"),
    ],
)
def test_a_manifest_without_a_field_that_reading_needs_is_refused(
    tmp_path: Path, change: Callable[[dict], object], lacks: str
) -> None:
    manifest = small(tmp_path)
    change_manifest(manifest.path, change)
    with pytest.raises(UserError, match=f"expected a manifest: {lacks}"):
        ShardDataset(manifest.path)


def test_what_fits_opens(manifest: Synthetic) -> None:
    dataset = ShardDataset(
        manifest.path, model="tiny", residual_layers=[2, 5], final_norm="pre_norm"
    )
    expected = manifest.samples[dataset.sample_id(3)]["hidden_states"]
    assert torch.equal(dataset[3]["hidden_states"], expected[:, [0, 2]])


def test_layer_numbers_are_the_trainers(manifest: Synthetic, tmp_path: Path) -> None:
    norm = FinalNorm.from_model(ModelFolder(norm_model(tmp_path / "model")))
    expected = {
        "draftstates": [2, 3, 5],
        "speculators": [2, 3, 5],
        "specforge": [1, 2, 4],
        "model_optimizer": [1, 2, 4],
        "deepspec": [1, 2, 4],
        "nemo_automodel": [1, 2, 4],
    }
    for name, numbers in expected.items():
        dataset = ShardDataset(manifest.path, trainer=name, norm=norm)
        assert dataset.layer_numbers == numbers, name
    embeddings = small(tmp_path / "r0", spec=capture_spec(layers=(0, 3), final_norm="post_norm"))
    assert ShardDataset(embeddings.path, trainer="deepspec").layer_numbers == [-1, 2]
    with pytest.raises(UserError, match="specforge cannot name r_0"):
        ShardDataset(embeddings.path, trainer="specforge")


def test_splits_are_disjoint_whole_and_steady_under_new_rows(tmp_path: Path) -> None:
    spec = capture_spec(hidden_size=2)
    samples = [sample(6, spec=spec, seed=i) for i in range(200)]
    before = write_manifest(tmp_path / "before", [samples[:100]], spec=spec)
    after = write_manifest(
        tmp_path / "after", [samples[100:150], samples[:100] + samples[150:]], spec=spec
    )

    def names(path: Path, split: str | None, seed: int = 0) -> set[str]:
        dataset = ShardDataset(path, split=split, validation_fraction=0.3, split_seed=seed)
        return {dataset.sample_id(i) for i in range(len(dataset))}

    train, validation = names(before.path, "train"), names(before.path, "validation")
    assert not train & validation
    assert train | validation == names(before.path, None)
    assert train <= names(after.path, "train")
    assert validation <= names(after.path, "validation")
    assert 40 < len(names(after.path, "validation")) < 80
    assert names(after.path, "validation", seed=1) != names(after.path, "validation")


def test_split_values_are_uniform() -> None:
    values = split_values(
        pa.chunked_array([[hashlib.md5(str(i).encode()).hexdigest() for i in range(4000)]]), seed=3
    )
    assert 0 <= values.min() < values.max() < 1
    assert abs(values.mean() - 0.5) < 0.02
    assert abs((values < 0.05).mean() - 0.05) < 0.015


def test_a_changed_byte_is_found_when_verifying(manifest: Synthetic) -> None:
    dataset = ShardDataset(manifest.path, verify=True)
    path = dataset._shard(0).path
    begin, width = read_header(path).states()["hidden_states"]
    with open(path, "r+b") as file:
        file.seek(begin + width * 2)
        byte = file.read(1)
        file.seek(begin + width * 2)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(UserError, match="does not have the checksum"):
        ShardDataset(manifest.path, verify=True)[0]
    ShardDataset(manifest.path, verify=True)[1]


@pytest.mark.parametrize("tensor", ["input_ids", "loss_mask"])
def test_changed_tokens_or_masks_are_found_at_every_read(manifest: Synthetic, tensor: str) -> None:
    """They have no checksum of their own: the sample's id is made of them."""
    path = ShardDataset(manifest.path)._shard(0).path
    flip(path, read_header(path).tensors[tensor][2] + 1)
    dataset = ShardDataset(manifest.path)
    for read in (dataset.__getitem__, dataset.tokens):
        with pytest.raises(
            UserError,
            match=(
                f"sample {dataset.sample_id(0)} has other tokens or another mask than its id says"
            ),
        ):
            read(0)
        read(1)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_digest": "other"}, "capture_key"),
        ({"residual_layers": (2, 4, 5)}, "capture_key"),
        ({"final_norm": "post_norm"}, "capture_key"),
    ],
)
def test_a_shard_that_is_not_of_the_manifests_capture_is_refused(
    tmp_path: Path, changes: dict, named: str
) -> None:
    manifest = small(tmp_path)
    other = dataclasses.replace(manifest.spec, **changes).document()
    change_manifest(manifest.path, lambda document: document["capture"].update(other))
    with pytest.raises(UserError, match=f"{named}: the manifest lists"):
        ShardDataset(manifest.path)[0]


@pytest.mark.parametrize("place", [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("name", ["manifest.json", "samples.parquet"])
def test_one_flipped_bit_of_what_a_trainer_opens_is_named_with_what_mends_it(
    tmp_path: Path, name: str, place: float
) -> None:
    manifest = small(tmp_path)
    damaged = tmp_path / name
    data = bytearray(damaged.read_bytes())
    data[int(len(data) * place)] ^= 4
    damaged.write_bytes(data)
    with pytest.raises(UserError, match=rf"{name}: .*rm -f .*manifest.json && snakemake"):
        ShardDataset(manifest.path)


def test_a_manifest_whose_capture_was_changed_is_refused(tmp_path: Path) -> None:
    manifest = small(tmp_path)
    change_manifest(
        manifest.path, lambda document: document["capture"].update(final_norm="post_norm")
    )
    with pytest.raises(UserError, match=r"manifest.json: .*capture.key: expected .*, found"):
        ShardDataset(manifest.path)


@pytest.mark.parametrize(
    "change", [lambda rows: rows[:-1], lambda rows: [{**rows[0], "supervised": 0}, *rows[1:]]]
)
def test_a_table_that_is_not_the_manifests_is_refused(
    manifest: Synthetic, change: Callable[[list], list]
) -> None:
    table = manifest.path.with_name("samples.parquet")
    pq.write_table(pa.Table.from_pylist(change(pq.read_table(table).to_pylist())), table)
    with pytest.raises(UserError, match="samples.parquet: changed since the manifest"):
        ShardDataset(manifest.path)
    change_manifest(manifest.path)
    with pytest.raises(UserError, match="but samples.parquet beside it has"):
        ShardDataset(manifest.path)


def test_a_shard_that_is_gone_is_named(manifest: Synthetic) -> None:
    dataset = ShardDataset(manifest.path)
    gone = next((manifest.path.parent / "shards").iterdir())
    gone.unlink()
    with pytest.raises(
        UserError, match=f"{gone.name}: .*lists this shard, but it cannot be read: No such file"
    ):
        [dataset[i] for i in range(len(dataset))]


def test_a_sample_of_another_length_is_refused(tmp_path: Path) -> None:
    manifest = small(tmp_path)
    table = pq.read_table(tmp_path / "samples.parquet")
    tokens = table["tokens"].to_pylist()
    tokens[1] += 1
    tokens[2] -= 1
    pq.write_table(
        table.set_column(table.schema.get_field_index("tokens"), "tokens", pa.array(tokens)),
        tmp_path / "samples.parquet",
    )
    change_manifest(manifest.path)
    with pytest.raises(UserError, match="has 8 rows, the manifest says 9"):
        ShardDataset(manifest.path)[1]


def test_a_manifest_that_is_none_is_refused(tmp_path: Path) -> None:
    manifest = small(tmp_path)
    whole = manifest.path.read_text()
    for text, words in (
        ("{", "expected a manifest, found no JSON"),
        ("[]", "found a document without `format`"),
        ('{"format": "x"}', r"expected a manifest \(draftstates.manifest\), found x"),
    ):
        manifest.path.write_text(text)
        with pytest.raises(UserError, match=words):
            ShardDataset(manifest.path)
    manifest.path.write_text(whole)
    change_manifest(manifest.path, lambda document: document["capture"].pop("model"))
    with pytest.raises(UserError, match=r"capture\.model: expected a value"):
        ShardDataset(manifest.path)


def test_more_shards_than_maps_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftstates.shards.dataset._OPEN_SHARDS", 3)
    manifest = small(tmp_path, shard_sizes=[1] * 8)
    dataset = ShardDataset(manifest.path)
    for i in [*range(8), *range(8)]:
        assert torch.equal(
            dataset[i]["input_ids"], manifest.samples[dataset.sample_id(i)]["input_ids"]
        )
        assert len(dataset._open) <= 3
    maps = {
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(tmp_path) in line
    }
    assert len(maps) <= 3


@pytest.mark.parametrize("verify", [False, True])
def test_what_is_not_captured_is_not_in_the_items(tmp_path: Path, verify: bool) -> None:
    layers_alone = small(tmp_path / "layers", spec=capture_spec(final_state=False))
    dataset = ShardDataset(layers_alone.path, verify=verify)
    for i in range(len(dataset)):
        expected = layers_alone.samples[dataset.sample_id(i)]
        assert list(dataset[i]) == ["input_ids", "loss_mask", "hidden_states"]
        assert torch.equal(dataset[i]["hidden_states"], expected["hidden_states"])
    with pytest.raises(UserError, match="post_norm is asked for and the capture holds no final"):
        ShardDataset(layers_alone.path, final_norm="post_norm")
    final_alone = small(tmp_path / "final", spec=capture_spec(layers=()))
    dataset = ShardDataset(final_alone.path, verify=verify)
    for i in range(len(dataset)):
        expected = final_alone.samples[dataset.sample_id(i)]
        assert dataset[i]["hidden_states"].shape == (len(expected["input_ids"]), 0, 16)
        assert torch.equal(dataset[i]["final_hidden_state"], expected["final_hidden_state"])

"""SpecForge 0.2 reads the export."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import VOCAB, assert_same

from draftstates.shards.dataset import ShardDataset

eagle3 = pytest.importorskip(
    "specforge.algorithms.eagle3.data", reason="specforge is not installed here: make test-exports"
)
feature_dataloader = pytest.importorskip("specforge.runtime.data_plane.feature_dataloader")
feature_store = pytest.importorskip("specforge.runtime.data_plane.feature_store")
preprocessing = pytest.importorskip("specforge.data.preprocessing")
vocab_mapping = pytest.importorskip("specforge.training.vocab_mapping")


def in_their_order(paths: list[str]) -> list[int]:
    return [int(Path(path).stem.removeprefix("data_")) for path in paths]


def test_its_offline_reader_gives_every_captured_sample(
    exported: Callable[..., Path],
    ours: Callable[..., ShardDataset],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPECFORGE_VALIDATE_OFFLINE_FEATURES", "1")
    expected = ours("specforge")
    refs = eagle3.build_offline_reader(
        str(exported("specforge")), run_id="test", ttt_length=1, max_len=64
    ).read()
    assert len(refs) == len(expected) == 12
    loader = feature_dataloader.FeatureDataLoader(
        feature_store.LocalFeatureStore(),
        refs=refs,
        collate_fn=eagle3.build_offline_collator(),
        per_sample_transform=eagle3.build_offline_normalizer(64),
    )
    paths = [ref.feature_store_uri.removeprefix("file://") for ref in refs]
    for batch, i in zip(loader, in_their_order(paths), strict=True):
        assert_same({name: batch.tensors[name] for name in expected[i]}, expected[i])


def test_its_offline_dataset_gives_the_same(
    exported: Callable[..., Path], ours: Callable[..., ShardDataset]
) -> None:
    expected = ours("specforge")
    paths = preprocessing.list_local_files(str(exported("specforge")))
    dataset = preprocessing.OfflineEagle3Dataset(paths, max_len=64)
    for i, number in enumerate(in_their_order(paths)):
        assert_same(dataset[i], expected[number])


def test_the_vocabulary_is_the_one_that_it_makes_itself(exported: Callable[..., Path]) -> None:
    folder = exported("specforge", draft_vocab_size=90)
    counts = vocab_mapping.count_effective_feature_tokens(
        str(folder), max_length=64, target_vocab_size=VOCAB
    )
    # no tie decides: all tokens that occur, and three that do not
    size = len(counts) + 3
    folder = exported("specforge", draft_vocab_size=size)
    d2t, t2d = preprocessing.process_token_dict_to_mappings(counts, size, VOCAB)
    assert_same(
        torch.load(folder / "vocab_mapping.pt", weights_only=True), {"d2t": d2t, "t2d": t2d}
    )


def test_a_short_capture_is_padded_without_a_word_as_the_drafter_example_does_it(
    exported: Callable[..., Path],
) -> None:
    """The loader pads withheld rows as `examples/train_drafter/damage.py` does."""
    spec = importlib.util.spec_from_file_location(
        "damage", Path(__file__).parents[2] / "examples" / "train_drafter" / "damage.py"
    )
    assert spec and spec.loader
    damage = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(damage)
    path = preprocessing.list_local_files(str(exported("specforge")))[-1]
    whole, cached = torch.load(path, weights_only=True), 3
    short = whole | {name: whole[name][:, cached:] for name in ("hidden_state", "aux_hidden_state")}
    batch = eagle3.build_offline_collator()(
        [preprocessing.OfflineEagle3Dataset.process_data(short, max_len=64)]
    )
    assert torch.equal(
        batch["hidden_state"][0], damage.damaged(whole["aux_hidden_state"][0], cached)
    )
    assert torch.equal(batch["target"][0], damage.damaged(whole["hidden_state"][0], cached))

"""speculators 0.9 reads the export, and trains on it."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import VOCAB, assert_same
from safetensors.torch import load_file, save_file

from draftstates.shards.dataset import ShardDataset

data = pytest.importorskip(
    "speculators.train.data", reason="speculators is not installed here: make test-exports"
)
offline = pytest.importorskip("speculators.data_generation.offline")
vocab_mapping = pytest.importorskip("speculators.train.vocab_mapping")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def by_id(dataset: ShardDataset) -> dict[bytes, dict]:
    samples = (dataset[i] for i in range(len(dataset)))
    return {sample["input_ids"].numpy().tobytes(): sample for sample in samples}


def test_its_dataset_gives_every_captured_sample(
    exported: Callable[..., Path], ours: Callable[..., ShardDataset]
) -> None:
    theirs = data.ArrowDataset(
        max_len=64,
        datapath=exported("speculators"),
        on_missing="raise",
        hidden_states_dtype=torch.bfloat16,
    )
    expected = by_id(ours("speculators"))
    assert len(theirs) == len(expected) == 12
    for i in range(len(theirs)):
        found = theirs[i]
        assert_same(found, expected.pop(found["input_ids"].numpy().tobytes()))
        assert theirs.approx_lengths[i] == len(found["input_ids"])
    assert not expected


def test_both_of_its_splits_are_there(exported: Callable[..., Path]) -> None:
    folder = exported("speculators")
    for split, samples in (("train", 9), ("val", 3)):
        found = data.ArrowDataset(
            max_len=64, datapath=folder, on_missing="raise", train_ratio=0.75, split=split
        )
        assert len(found) == samples
        assert all(isinstance(found[i], dict) for i in range(samples))


def test_its_collator_and_sampler_make_batches(exported: Callable[..., Path]) -> None:
    loader = pytest.importorskip("speculators.train.dataloader")
    shift_batch = pytest.importorskip("speculators.models.eagle3.data").shift_batch
    dataset = data.ArrowDataset(max_len=64, datapath=exported("speculators"), on_missing="raise")
    batches = list(
        loader._setup_dataloader(dataset, 64, hidden_size=16, num_workers=0, preprocess=shift_batch)
    )
    assert sum(int((batch["document_ids"] >= 0).sum()) for batch in batches) == sum(
        dataset.approx_lengths
    ) - len(dataset)
    assert all(
        batch["hidden_states"].shape == (1, 64, 48) and batch["error_records"] == 0
        for batch in batches
    )


def test_its_own_check_passes_every_file_and_fails_a_broken_one(
    exported: Callable[..., Path],
) -> None:
    folder = exported("speculators")
    states = folder / "hidden_states"
    indices = offline.get_existing_hidden_state_indices(states)
    assert indices == list(range(12))
    assert offline.find_corrupt_hidden_state_indices(states, indices) == {}
    rows = data.load_from_disk(str(folder))
    for i in indices:
        offline.check_hidden_states(
            load_file(states / f"hs_{i}.safetensors"), rows[i]["input_ids"].tolist()
        )

    tensors = load_file(states / "hs_3.safetensors")
    tensors["hidden_states"][1, 0, 0] = math.nan
    save_file(tensors, states / "hs_3.safetensors")
    with pytest.raises(ValueError, match="non-finite"):
        offline.check_hidden_states(
            load_file(states / "hs_3.safetensors"), rows[3]["input_ids"].tolist()
        )


def test_token_frequencies_and_vocabulary_are_those_that_it_makes_itself(
    exported: Callable[..., Path], tmp_path: Path
) -> None:
    folder = exported("speculators", draft_vocab_size=40)
    vocab_mapping.save_token_frequency_distribution(
        data.load_from_disk(str(folder)), tmp_path / "theirs.pt"
    )
    theirs = torch.load(tmp_path / "theirs.pt", weights_only=True)
    assert torch.load(folder / "token_freq.pt", weights_only=True) == theirs
    d2t, t2d = vocab_mapping.build_vocab_mappings_from_distribution(theirs, 40, VOCAB)
    found = {name: torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("d2t", "t2d")}
    assert_same(found, {"d2t": d2t, "t2d": t2d})


def test_its_mapping_loader_takes_the_vocabulary(exported: Callable[..., Path]) -> None:
    cli = pytest.importorskip("speculators.train.cli")
    folder = exported("speculators", draft_vocab_size=40)
    d2t, t2d, size = cli._load_mappings(folder / "d2t.npy", folder / "t2d.npy", 40)
    assert size == 40 and t2d.sum() == 40
    assert torch.equal(torch.arange(40) + d2t, torch.nonzero(t2d).flatten())

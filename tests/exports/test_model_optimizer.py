"""NVIDIA Model-Optimizer reads the export."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import assert_same

from draftstates.shards.dataset import ShardDataset

utils = pytest.importorskip(
    "modelopt.torch.speculative.eagle.utils",
    reason="nvidia-modelopt is not installed here: make test-exports",
)


@pytest.mark.parametrize("final_norm", [None, "pre_norm"])
def test_its_dataset_gives_every_captured_sample(
    exported: Callable[..., Path], ours: Callable[..., ShardDataset], final_norm: str | None
) -> None:
    expected = ours("model_optimizer", final_norm=final_norm)
    folder = exported("model_optimizer", final_norm=final_norm)
    files = [str(folder / f"{expected.sample_id(i)}.pt") for i in range(len(expected))]
    assert sorted(files) == sorted(map(str, folder.rglob("*.pt")))
    dataset = utils.OfflineSupervisedDataset(files, answer_only_loss=True)
    for i in range(len(expected)):
        assert_same(dataset[i], expected[i])
        assert dataset[i]["base_hidden_prenorm"] == (final_norm == "pre_norm")


def test_its_collator_takes_them(exported: Callable[..., Path]) -> None:
    files = sorted(map(str, exported("model_optimizer").rglob("*.pt")))
    dataset = utils.OfflineSupervisedDataset(files, answer_only_loss=True)
    batch = utils.EagleOfflineDataCollator(train_len=40)([dataset[i] for i in range(4)])
    assert batch["base_model_outputs"]["aux_hidden_states"].shape == (4, 40, 48)
    assert batch["base_model_outputs"]["base_model_hidden_states"].dtype == torch.bfloat16

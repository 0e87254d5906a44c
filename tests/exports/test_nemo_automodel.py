"""NeMo Automodel reads the export as its own offline cache of EAGLE-3."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftstates.shards.dataset import ShardDataset

cache = pytest.importorskip(
    "nemo_automodel.components.datasets.llm.eagle3_cache",
    reason="nemo-automodel is not installed here: make test-exports",
)


@pytest.mark.parametrize("topk", [None, 5])
def test_its_cache_gives_every_captured_sample(
    exported: Callable[..., Path], ours: Callable[..., ShardDataset], topk: int | None
) -> None:
    folder = exported("nemo_automodel", draft_vocab_size=20, target_probs_topk=topk)
    expected = ours("nemo_automodel")
    theirs = cache.CachedEagle3Dataset(str(folder))
    assert len(theirs) == len(expected) == 12
    for i in range(12):
        found, n = theirs[i], len(expected[i]["input_ids"])
        assert set(found) == set(cache.CACHE_KEYS)
        for name in ("input_ids", "attention_mask", "loss_mask", "aux_hidden_states"):
            assert torch.equal(found[name][:n], expected[i][name]), name
            assert not found[name][n:].any(), name
        assert found["target_probs"].shape == (37, 20)
        assert ((found["target_probs"] > 0).sum(-1) == (topk or 20)).all()
        sums = found["target_probs"].float().sum(-1)
        torch.testing.assert_close(sums, torch.ones(37), rtol=0.01, atol=0)


def test_its_loader_makes_batches_and_reads_what_its_training_needs(
    exported: Callable[..., Path],
) -> None:
    folder = str(exported("nemo_automodel", target_model="org/tiny"))
    loader = cache.build_cached_eagle3_dataloader(cache_dir=folder, batch_size=4, shuffle=True)
    batches = list(loader)
    assert [len(batch["input_ids"]) for batch in batches] == [4, 4, 4]
    assert batches[0]["target_probs"].shape == (4, 37, 100)
    assert batches[0]["position_mask"].dtype == torch.bool
    about = cache.read_manifest(folder)
    assert (about["aux_hidden_dim"], about["target_vocab_size"]) == (3 * 16, 100)
    assert about["selected_token_ids"] == list(range(100))
    assert cache.read_target_embeddings(folder).shape == (100, 16)

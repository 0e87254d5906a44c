"""DeepSpec reads the export.

DeepSpec is published only as a repository: put a checkout on PYTHONPATH.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import assert_same

from draftstates.shards.dataset import ShardDataset

cache = pytest.importorskip(
    "deepspec.data.target_cache_dataset", reason="no checkout of DeepSpec on PYTHONPATH"
)


def test_its_cache_gives_every_captured_sample(
    exported: Callable[..., Path], ours: Callable[..., ShardDataset]
) -> None:
    expected = ours("deepspec")
    theirs = cache.CacheDataset(str(exported("deepspec")), max_open_shards=1)
    assert len(theirs) == len(expected) == 12
    for i in [*range(12), 0]:
        assert_same(theirs[i], expected[i])


def test_its_check_before_training_passes_what_fits_and_nothing_else(
    exported: Callable[..., Path],
) -> None:
    theirs = cache.CacheDataset(str(exported("deepspec", target_model="org/tiny")))
    draft = SimpleNamespace(target_layer_ids=[1, 2, 4], config=SimpleNamespace(hidden_size=16))
    cache.validate_train_cache(
        train_dataset=theirs, draft_model=draft, target_model_name_or_path="org/tiny"
    )
    draft.target_layer_ids = [2, 3, 5]
    with pytest.raises(AssertionError, match="target_layer_ids"):
        cache.validate_train_cache(
            train_dataset=theirs, draft_model=draft, target_model_name_or_path="org/tiny"
        )

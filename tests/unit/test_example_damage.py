"""The drafter example's fault is the radix cache's: what it takes from a capture is what the cache would have held."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def damage() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "train_drafter" / "damage.py"
    spec = importlib.util.spec_from_file_location("damage", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_sample_shares_its_longest_prefix_with_any_before_it(damage: ModuleType) -> None:
    tree = damage.PrefixTree()
    shared = [tree.insert(ids) for ids in ([1, 2, 3, 4], [1, 2, 9, 4], [1, 2, 9, 5, 6], [7, 2, 3], [1, 2, 3, 4, 5])]
    assert shared == [0, 2, 3, 0, 4]


def test_the_last_token_is_computed_even_of_a_repeated_sample(damage: ModuleType) -> None:
    tree = damage.PrefixTree()
    assert [tree.insert([5, 6, 7]) for _ in range(2)] == [0, 2]


def test_the_computed_rows_come_first_and_zeros_fill_up(damage: ModuleType) -> None:
    states = torch.arange(10).view(5, 2) + 1
    assert damage.damaged(states, 2).tolist() == [[5, 6], [7, 8], [9, 10], [0, 0], [0, 0]]
    assert torch.equal(damage.damaged(states, 0), states)

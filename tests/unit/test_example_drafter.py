"""The drafter example: its fault is the radix cache's, its prompts are not alike, and its agreement
counts what it says.
"""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from draftstates.errors import UserError

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_drafter"


def load(name: str) -> ModuleType:
    """Return a script of the example, as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def damage() -> ModuleType:
    return load("damage")


@pytest.fixture(scope="module")
def prompts() -> ModuleType:
    return load("prompts")


def test_a_sample_shares_its_longest_prefix_with_any_before_it(damage: ModuleType) -> None:
    tree = damage.PrefixTree()
    shared = [
        tree.insert(ids)
        for ids in ([1, 2, 3, 4], [1, 2, 9, 4], [1, 2, 9, 5, 6], [7, 2, 3], [1, 2, 3, 4, 5])
    ]
    assert shared == [0, 2, 3, 0, 4]


def test_the_last_token_is_computed_even_of_a_repeated_sample(damage: ModuleType) -> None:
    tree = damage.PrefixTree()
    assert [tree.insert([5, 6, 7]) for _ in range(2)] == [0, 2]


def test_the_computed_rows_come_first_and_zeros_fill_up(damage: ModuleType) -> None:
    states = torch.arange(10).view(5, 2) + 1
    assert damage.damaged(states, 2).tolist() == [[5, 6], [7, 8], [9, 10], [0, 0], [0, 0]]
    assert torch.equal(damage.damaged(states, 0), states)


def test_questions_that_share_half_their_words_are_not_both_chosen(prompts: ModuleType) -> None:
    texts = [
        "How do I sort a list in Python?",
        "how do i sort a list in Java",
        "Who wrote the play about Hamlet?",
        "too short",
        "naïve " * 9,
    ]
    assert len(prompts.choose(iter(texts), 2)) == 2
    with pytest.raises(UserError, match="expected at least 3 .* found 2"):
        prompts.choose(iter(texts), 3)


def test_agreement_is_counted_by_draft_step_from_supervised_tokens_alone() -> None:
    own = torch.tensor([10, 11, 12, 13, 14])
    supervised = torch.tensor([False, True, True, True, False])
    drafted = [
        # of the drafts at 1, 2, 3: right, wrong, right
        torch.tensor([10, 11, 99, 13, 14]),
        # at 1, 2, for the tokens 2, 3: both right
        torch.tensor([11, 12, 13, 99, 99]),
        # at 1, for token 3: wrong; at 2 it would be for token 4, which is not supervised
        torch.tensor([12, 99, 14, 99, 99]),
    ]
    assert load("agreement").count_agreement(drafted, own, supervised) == ([2, 2, 0], [3, 2, 1])


def test_a_drafter_that_is_one_token_late_is_seen() -> None:
    own = torch.arange(8)
    agreed, total = load("agreement").count_agreement(
        [own.roll(1), own.roll(1)], own, torch.ones(8, dtype=torch.bool)
    )
    assert (agreed, total) == ([0, 0], [8, 7])

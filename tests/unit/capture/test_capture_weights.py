"""Weights that are changed while the server runs: nothing is captured until a self-test passes."""

import itertools
from pathlib import Path

import pytest
import torch

from draftstates.capture import numbers, weights
from draftstates.paths import Results


class Updater:
    """Stands for SGLang's `WeightUpdater`."""

    model: torch.nn.Module

    def update_weights_from_disk(self) -> bool:
        self.model.weight.data[0, 0] += 1
        # the innermost method is not the one to name
        self.model.load_weights([])
        return True

    def update_weights_of_tomorrow(self) -> bool:
        raise RuntimeError("half of the weights are written")

    def init_weights_update_group(self) -> bool:
        return True


class Checker:
    """Stands for SGLang's `WeightChecker` and for what releases memory."""

    def _reset_tensors(self) -> None:
        pass


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(300, 7))
        self.bias = torch.nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.experts = torch.nn.Parameter(torch.randn(128, 8, 4))
        self.register_buffer("scalar", torch.ones(3))
        self.register_buffer("cache", torch.ones(3), persistent=False)

    def load_weights(self, tensors: list) -> None:
        pass


@pytest.fixture
def watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[weights.Weights, Model, Updater]:
    for name in ("DRAFTSTATES_GIVEN_VARIABLES", "DRAFTSTATES_SERVER"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    numbers.remember_start()
    for owner in (Updater, Checker):
        for name, method in list(vars(owner).items()):
            if callable(method) and not name.startswith("__"):
                monkeypatch.setattr(owner, name, method)
    monkeypatch.setattr(weights, "UPDATER", f"{__name__}.Updater")
    monkeypatch.setattr(weights, "OTHERS", (f"{__name__}.Checker._reset_tensors",))
    model = Model()
    found = weights.Weights(model, root=tmp_path)
    weights.watch(found, model)
    Updater.model = model
    return found, model, Updater()


def admitted(found: weights.Weights) -> tuple[bool, bool]:
    """Return whether a plain request and one of a self-test are captured."""
    return found.refusal(self_test=False) is None, found.refusal(self_test=True) is None


def passes(found: weights.Weights, root: Path) -> None:
    mark = Results(root).passed(str(found.mark))
    mark.parent.mkdir(exist_ok=True)
    mark.touch()


def test_other_weights_are_never_captured_again(watched: tuple, tmp_path: Path) -> None:
    found, _, updater = watched
    assert admitted(found) == (True, True)
    assert updater.update_weights_from_disk()
    assert "changed by update_weights_from_disk since the self-test" in found.refusal(
        self_test=False
    )
    assert "no longer those of the model that was loaded" in found.refusal(self_test=True)
    # not even where a self-test is said to have passed
    passes(found, tmp_path)
    assert admitted(found) == (False, False)


def test_an_update_to_the_same_weights_needs_a_new_self_test(
    watched: tuple, tmp_path: Path
) -> None:
    found, model, _ = watched
    model.load_weights([])
    assert admitted(found) == (False, True)
    passes(found, tmp_path)
    assert admitted(found) == (True, True)
    model.load_weights([])
    assert admitted(found) == (False, True)


def test_of_weights_on_several_ranks_this_one_knows_its_own_part(
    watched: tuple, tmp_path: Path
) -> None:
    """An update may have changed experts of another rank alone."""
    found, model, _ = watched
    found._ranks = 2
    assert admitted(found) == (True, True)
    model.load_weights([])
    assert "spread over 2 ranks" in found.refusal(self_test=True)
    passes(found, tmp_path)
    assert admitted(found) == (False, False)


def test_every_method_that_writes_weights_is_noticed(watched: tuple) -> None:
    found, model, updater = watched
    updater.init_weights_update_group()
    assert found.mark is None
    with pytest.raises(RuntimeError, match="half of the weights"):
        updater.update_weights_of_tomorrow()
    marks = [found.mark]
    Checker()._reset_tensors()
    marks.append(found.mark)
    model.load_weights([])
    marks.append(found.mark)
    assert len(set(marks)) == 3
    assert None not in marks


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.weight.data.add_(1e-6),
        lambda model: model.weight.data[299].neg_(),
        lambda model: model.bias.data[4:].add_(1),
        lambda model: model.weight.data.copy_(model.weight.data.roll(60, 0)),
        lambda model: exchange(model.weight.data, 3, 7),
        lambda model: exchange(model.weight.data, 298, 299),
        lambda model: exchange(model.weight.data.t(), 0, 1),
        lambda model: exchange(model.experts.data, 0, 1),
        lambda model: exchange(model.bias.data, 3, 4),
        lambda model: model.scalar.zero_(),
        lambda model: setattr(model, "bias", torch.nn.Parameter(model.bias.data.float())),
    ],
)
def test_the_checksum_follows_every_parameter(change: object) -> None:
    model = Model()
    before = weights.fingerprint(model)
    assert weights.fingerprint(model) == before
    change(model)
    assert weights.fingerprint(model) != before


def exchange(tensor: torch.Tensor, one: int, other: int) -> None:
    tensor[[one, other]] = tensor[[other, one]]


def test_the_checksum_sees_what_was_exchanged_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose sums are equal, in one part and in two."""
    monkeypatch.setattr(weights, "_WORDS", 32)
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.stack([torch.arange(8.0).roll(n) for n in range(8)]))
    found = [weights.fingerprint(model)]
    for one, other in itertools.combinations(range(8), 2):
        exchange(model.weight.data, one, other)
        found.append(weights.fingerprint(model))
        exchange(model.weight.data, one, other)
    assert weights.fingerprint(model) == found[0]
    assert len(set(found)) == 29


def test_what_a_server_fills_as_it_runs_is_no_weight() -> None:
    model = Model()
    before = weights.fingerprint(model)
    model.cache.zero_()
    assert weights.fingerprint(model) == before


def test_the_checksum_reads_any_layout_and_number_format() -> None:
    model = torch.nn.Module()
    values = torch.randn(96, 33)
    for name, tensor in {
        "transposed": values.t(),
        "view": values[1:, 1:],
        "fp8": values.to(torch.float8_e4m3fn),
        "packed": torch.arange(77, dtype=torch.uint8),
        "odd": torch.arange(9, dtype=torch.uint8)[1:],
        "none": torch.empty(0),
    }.items():
        model.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    before = weights.fingerprint(model)
    assert before
    model.odd.data[7] = 1
    changed = weights.fingerprint(model)
    model.view.data[3, 3] = 0
    assert len({before, changed, weights.fingerprint(model)}) == 3

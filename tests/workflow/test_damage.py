"""A sample of the damage matrix of `tests/campaign/damage.py`."""

from pathlib import Path

import damage
import pytest
from finished import Finished, make_finished


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, preloaded_libraries: None) -> Finished:
    return make_finished(
        tmp_path_factory.mktemp("damage") / "work",
        rows=2,
        exports={"specforge": {}},
        draft_vocab_size=64,
    )


def test_every_file_of_a_tree_is_of_a_kind(finished: Finished) -> None:
    assert damage.unnamed(finished.workspace.results) == []
    assert [
        kind for kind in damage.AS_CAPTURED if not damage.files_of(finished.workspace.results, kind)
    ] == []


@pytest.mark.parametrize(
    ("kind", "how", "who"),
    [
        ("plan", "truncated", "snakemake: results/plan.json: expected a plan"),
        ("shard", "truncated", "cut short or overlong"),
        ("tokens", "bit in the middle", "changed since it was written: expected checksum"),
        ("manifest", "bit in the middle", "ShardDataset: "),
    ],
)
def test_a_damage_is_noticed_by_name_and_its_remedy_helps(
    finished: Finished, tmp_path: Path, kind: str, how: str, who: str
) -> None:
    (case,) = damage.cases(finished.workspace.results, [kind], [how])
    outcome = damage.try_damage(finished, tmp_path / "copy", *case)
    assert outcome.wrong == []
    assert who in str(outcome)


def test_a_damage_that_nobody_notices_and_that_has_no_reason_is_wrong(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (case,) = damage.cases(finished.workspace.results, ["server"], ["emptied"])
    monkeypatch.setattr(damage, "HARMLESS", {})
    outcome = damage.try_damage(finished, tmp_path / "copy", *case)
    assert outcome.wrong == ["not noticed, and no reason is stated"]

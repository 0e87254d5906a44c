"""What follows from tokens alone: a drafter's vocabulary and the statistics of a run, before
anything is captured.
"""

import dataclasses
import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from synthetic import account, capture_spec, plan_with, planned_shard
from token_kit import chat, run_script, run_source, template

from draftstates.errors import UserError
from draftstates.exports.vocabulary import (
    check_draft_size,
    draft_vocabulary,
    vocabulary_key,
    write_vocabulary,
)
from draftstates.plan.plan import PlanOptions, make_plan
from draftstates.plan.room import forecast, hours
from draftstates.records import Plan, PlannedShard
from draftstates.report.statistics import EDGES, MOST_TURNS, Prefixes, _turns, statistics
from draftstates.tokens import tokenise as tokeniser

SPEC = capture_spec(layers=(2, 15, 27), num_layers=30, hidden_size=8, final_norm="post_norm")
ROWS = [
    {"messages": chat(f"Question {n % 7}", "word " * (n % 5) + f"answer {n}")} for n in range(40)
]
ROWS[3]["metadata"] = {"from": "a test"}
ROWS += [ROWS[0], ROWS[1], {"messages": []}]


@pytest.fixture
def planned(tmp_path, demo_model, monkeypatch):
    """Return a plan of one source: its content and the folder of its tokens."""
    monkeypatch.setattr(tokeniser, "ChatTemplate", lambda folder, **_: template("smollm2"))
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    run_source(tokens, ROWS)
    options = PlanOptions(
        min_bytes=20_000, max_bytes=60_000, budget=None, exclude=[], deduplicate=True
    )
    return (
        make_plan([tokens / "test.parquet"], spec=SPEC, results=tmp_path, options=options),
        tokens,
    )


def targets(tokens) -> np.ndarray:
    """Return all targets of the source, read by other means than those under test."""
    table = pq.read_table(tokens / "test.parquet").to_pylist()
    return np.concatenate(
        [np.array(sample["input_ids"])[np.array(sample["loss_mask"]) == 1] for sample in table]
    )


def vocabulary(planned, output, draft_size: int = 64):
    plan, tokens = planned
    return write_vocabulary(
        plan,
        shard_tokens=tokens / "shards",
        draft_size=draft_size,
        target_size=49152,
        output=output,
    )


def test_the_most_frequent_targets_are_chosen_and_files_are_as_the_trainers_read_them(
    planned, tmp_path
) -> None:
    folder = vocabulary(planned, tmp_path / "v")
    values, counts = np.unique(targets(planned[1]), return_counts=True)
    assert torch.load(folder / "token_freq.pt", weights_only=True) == dict(
        zip(values.tolist(), counts.tolist(), strict=True)
    )
    d2t, t2d = np.load(folder / "d2t.npy"), np.load(folder / "t2d.npy")
    expected = sorted(
        sorted(values.tolist(), key=lambda token: (-counts[values == token][0], token))[:64]
    )
    unseen = [token for token in range(49152) if token not in set(values.tolist())]
    # There are fewer distinct supervised tokens than draft tokens: the lowest ids fill up.
    expected = sorted(expected + unseen[: 64 - len(expected)])
    assert len(values) < 64
    assert (d2t + np.arange(64)).tolist() == np.flatnonzero(t2d).tolist() == expected
    assert (d2t.dtype, t2d.dtype, len(t2d)) == (np.int64, np.bool_, 49152)
    mapping = torch.load(folder / "vocab_mapping.pt", weights_only=True)
    assert mapping["d2t"].tolist() == d2t.tolist()
    assert mapping["t2d"].tolist() == t2d.tolist()


def test_a_small_vocabulary_says_how_much_it_covers(planned, tmp_path) -> None:
    folder = vocabulary(planned, tmp_path / "v", draft_size=4)
    about = json.loads((folder / "vocabulary.json").read_text())
    _, counts = np.unique(targets(planned[1]), return_counts=True)
    assert about["covered_share"] == pytest.approx(np.sort(counts)[-4:].sum() / counts.sum())
    assert about["supervised_tokens"] == counts.sum()


def test_ties_go_to_the_lower_id_and_missing_tokens_are_filled_up_from_below() -> None:
    counts = np.array([0, 5, 2, 0, 2, 2, 0, 9])
    assert np.flatnonzero(draft_vocabulary(counts, draft_size=3).t2d).tolist() == [1, 2, 7]
    assert np.flatnonzero(draft_vocabulary(counts, draft_size=7).t2d).tolist() == [
        0,
        1,
        2,
        3,
        4,
        5,
        7,
    ]
    with pytest.raises(UserError, match=r"must lie in 1\.\.8, found 9"):
        draft_vocabulary(counts, draft_size=9)
    with pytest.raises(
        UserError, match="draft_vocab_size: expected at most the model's 8, found 9"
    ):
        check_draft_size(9, target_size=8)
    check_draft_size(8, target_size=8)


def test_the_folder_is_named_by_content_so_that_it_is_never_stale(planned, tmp_path) -> None:
    plan, tokens = planned
    folder = vocabulary(planned, tmp_path / "v")
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert vocabulary(planned, tmp_path / "v") == folder
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    key = vocabulary_key(plan, draft_size=64, target_size=49152)
    assert folder.name == key
    assert key != vocabulary_key(plan, draft_size=65, target_size=49152)
    assert key != vocabulary_key(
        with_shards(plan, plan.shards[1:]), draft_size=64, target_size=49152
    )
    assert key == vocabulary_key(
        with_shards(plan, plan.shards[::-1]), draft_size=64, target_size=49152
    )


def with_shards(plan: Plan, shards: tuple[PlannedShard, ...]) -> Plan:
    return dataclasses.replace(plan, shards=shards)


@pytest.mark.parametrize(
    ("fault", "named"),
    [("missing", "cannot be read"), ("another's", "expected the tokens of shard")],
)
def test_tokens_that_are_missing_or_of_another_shard_leave_nothing_behind(
    planned, tmp_path, fault: str, named: str
) -> None:
    first, second, *_ = [
        planned[1] / "shards" / f"{shard.shard_id}.parquet" for shard in planned[0].shards
    ]
    first.unlink() if fault == "missing" else shutil.copy(second, first)
    with pytest.raises(UserError, match=named):
        vocabulary(planned, tmp_path / "v")
    assert not (tmp_path / "v").exists() or not list((tmp_path / "v").iterdir())


def test_statistics_count_what_the_tokens_hold(planned) -> None:
    plan, tokens = planned
    found = statistics(plan, tokens_folder=tokens, tokens_per_second=100)
    source = found["sources"]["test"]
    table = pq.read_table(tokens / "test.parquet").to_pylist()
    lengths = sorted(len(sample["input_ids"]) for sample in table)
    assert (source["rows_in"], source["kept"], source["duplicate_samples"]) == (43, 40, 2)
    assert source["skipped"] == {"duplicate": 2, "empty": 1}
    assert source["not_used"] == plan.accounting.totals.not_used == {"metadata": 1}
    assert [row["row"] for row in source["examples"]["duplicate"]] == [40, 41]
    assert (source["lengths"]["least"], source["lengths"]["greatest"]) == (lengths[0], lengths[-1])
    assert source["lengths"]["p50"] in (lengths[19], lengths[20])
    expected = np.histogram(lengths, bins=[*EDGES, 1 << 40])[0].tolist()
    assert source["lengths"]["counts"] == expected
    assert source["turns"] == [0, 40, *[0] * (MOST_TURNS - 1)]
    assert source["supervised_share"] == pytest.approx(
        len(targets(tokens)) / sum(lengths), abs=1e-4
    )
    assert found["bytes_needed"] == plan.bytes_needed > sum(lengths) * SPEC.row_bytes
    assert found["hours"] == pytest.approx(sum(lengths) / 360_000)
    assert statistics(plan, tokens_folder=tokens)["hours"] is None


def test_coverage_is_that_of_the_most_frequent_supervised_tokens(planned) -> None:
    plan, tokens = planned
    coverage = statistics(plan, tokens_folder=tokens)["coverage"]
    counts = np.sort(np.unique(targets(tokens), return_counts=True)[1])[::-1]
    assert coverage["distinct"] == len(counts)
    assert coverage["curve"][0] == [1, round(counts[0] / counts.sum(), 6)]
    assert coverage["curve"][-1] == [len(counts), 1.0]
    for size, share in coverage["curve"]:
        assert share == pytest.approx(counts[:size].sum() / counts.sum(), abs=1e-6)


def test_repeated_prefixes_are_counted_in_steps() -> None:
    """Against a count with sets, on samples that share prefixes of random length."""
    draw, step = np.random.default_rng(0), 4
    first = draw.integers(0, 50_000, 200)
    samples = [
        np.concatenate([first[:shared], draw.integers(0, 50_000, rest)])
        for shared, rest in draw.integers(1, 100, (300, 2))
    ]
    seen, repeated = set(), 0
    for sample in samples:
        for end in range(step, len(sample) + 1, step):
            prefix = sample[:end].tobytes()
            repeated += step * (prefix in seen)
            seen.add(prefix)
    prefixes = Prefixes(step)
    for part in (samples[:7], samples[7:]):
        offsets = np.cumsum([0, *map(len, part)])
        prefixes.add(np.concatenate(part).astype(np.int32), offsets)
    total = sum(map(len, samples))
    assert prefixes.summary(total) == {"tokens": total, "repeated": repeated, "step": step}
    assert repeated > total / 10


def test_turns_are_runs_of_supervised_tokens() -> None:
    masks = [[0, 1, 1, 0, 1], [0, 0], [1], [1, 0] * 30, [1, 1, 0]]
    flat = np.concatenate(masks).astype(bool)
    found = _turns(flat, np.cumsum([0, *map(len, masks)]))
    expected = np.zeros(MOST_TURNS + 1, int)
    expected[[0, 1, 2]] = 1, 2, 1
    # 30 turns: counted with all that have more than the last entry says
    expected[MOST_TURNS] = 1
    assert found.tolist() == expected.tolist()


def test_hours_are_those_of_what_is_still_to_be_captured() -> None:
    plan = dataclasses.replace(
        plan_with([planned_shard("a" * 32)], capture_folder="x", totals=account(tokens=7200)),
        bytes_needed=30,
        bytes_present=10,
        disk_free=99,
    )
    assert hours(plan, 2.0) == pytest.approx(0.75)
    assert hours(dataclasses.replace(plan, bytes_needed=0, bytes_present=0), 2.0) == 0
    assert hours(plan, None) is None
    assert (
        forecast(plan, 2.0)
        == "7,200 tokens in 1 shard; 30 B to write, 10 B written, 99 B free; about 45 min at 2"
        " tokens/s"
    )
    assert "about" not in forecast(plan, None)
    assert "about" not in forecast(dataclasses.replace(plan, bytes_needed=0), 2.0)


def test_the_command(planned, tmp_path, demo_model, capsys) -> None:
    plan, _ = planned
    plan.publish(tmp_path / "plan.json")
    run_script(
        "vocabulary.py",
        tmp_path / "plan.json",
        "--draft-size",
        32,
        "--model",
        demo_model,
        "--output",
        tmp_path / "v",
    )
    assert capsys.readouterr().out.strip() == str(
        tmp_path / "v" / vocabulary_key(plan, draft_size=32, target_size=49152)
    )

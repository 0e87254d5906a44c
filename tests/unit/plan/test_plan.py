"""The plan: every row accounted for, shards that follow content, and room on the disk before a
server starts.
"""

import dataclasses
import json
import os
import runpy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from captured import tiny_model
from synthetic import account, capture_spec

from draftstates import ids
from draftstates.errors import UserError
from draftstates.paths import Capture, Results
from draftstates.plan.plan import PlanOptions, make_plan
from draftstates.plan.room import check_missing
from draftstates.plan.shard_tokens import read_tokens
from draftstates.plan.words import of_bytes
from draftstates.records import Plan, PlannedChecks
from draftstates.tokens.files import publish_accounting

SPEC = capture_spec(layers=(2, 4, 5), final_norm="post_norm", model_digest="content-1")
OPTIONS = PlanOptions(min_bytes=20_000, max_bytes=80_000, budget=None, exclude=[], deduplicate=True)
# shards of many conversations, of short samples
SHARING = {"min_shared_tokens": 4, "min_bytes": 200_000, "max_bytes": 1_600_000}


class Row(NamedTuple):
    """One sample, as a tokeniser writes it."""

    row: int
    part: int
    input_ids: np.ndarray
    loss_mask: np.ndarray

    @property
    def name(self) -> str:
        return ids.sample_id(self.input_ids, self.loss_mask)


def _rows(count: int, *, seed: int, length: int = 40) -> list[Row]:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(5, 2 * length, count)
    tokens = [generator.integers(0, 50, n).astype(np.int32) for n in lengths]
    return [
        Row(index, 0, t, (np.arange(len(t)) % 2).astype(np.uint8)) for index, t in enumerate(tokens)
    ]


def _source(
    folder: Path,
    name: str,
    rows: Sequence[Row],
    *,
    rows_in: int | None = None,
    skipped: dict[str, int] | None = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.parquet"
    table = pa.table(
        {
            "row": pa.array([row.row for row in rows], pa.int64()),
            "part": pa.array([row.part for row in rows], pa.int32()),
            "sample_id": pa.array([row.name for row in rows], pa.string()),
            "input_ids": pa.array([row.input_ids.tolist() for row in rows], pa.list_(pa.int32())),
            "loss_mask": pa.array([row.loss_mask.tolist() for row in rows], pa.list_(pa.uint8())),
        }
    )
    pq.write_table(table, path, row_group_size=16)
    kept = len({row.row for row in rows})
    accounting = {
        "source": name,
        "rows_in": kept + sum((skipped or {}).values()) if rows_in is None else rows_in,
        "kept": kept,
        "samples": len(rows),
        "skipped": skipped or {},
        "failed": {},
        "tokens": sum(len(row.input_ids) for row in rows),
        "supervised_tokens": sum(int(row.loss_mask.sum()) for row in rows),
    }
    publish_accounting(accounting, path.with_suffix(".json"), tokens=path)
    return path


def _plan(results: Path, sources: dict[str, Sequence[Row]], **options: Any) -> Plan:
    files = [_source(results / "tokens", name, rows) for name, rows in sources.items()]
    settings = {**dict(OPTIONS), **options}
    return make_plan(files, spec=SPEC, results=results, options=PlanOptions(**settings))


def _shard_names(plan: Plan) -> set[str]:
    return {shard.shard_id for shard in plan.shards}


def test_the_shards_hold_every_sample_once_in_order(tmp_path: Path) -> None:
    rows = _rows(200, seed=0)
    plan = _plan(tmp_path, {"a": rows})
    assert len(plan.shards) >= 6
    captured = []
    for shard in plan.shards:
        path = tmp_path / "tokens" / "shards" / f"{shard.shard_id}.parquet"
        tokens = read_tokens(path, shard_id=shard.shard_id)
        assert (shard.samples, shard.tokens) == (
            len(tokens.sample_ids),
            len(tokens.input_ids),
        )
        assert shard.supervised_tokens == int(tokens.loss_mask.sum())
        assert 20_000 <= shard.bytes <= 80_000
        captured += tokens.sample_ids
        assert set(pq.read_table(path)["source"].to_pylist()) == {"a"}
    assert captured == [row.name for row in rows]


def test_the_plan_is_the_same_from_any_place_and_source_order(tmp_path: Path) -> None:
    first, second = _rows(60, seed=0), _rows(60, seed=1)
    one = _plan(tmp_path / "one", {"a": first, "b": second})
    other = _plan(tmp_path / "two", {"b": second, "a": first})
    assert one.shards == other.shards
    assert one.accounting == other.accounting
    assert one.capture_folder == SPEC.folder_name
    assert one.capture == SPEC


def test_changing_one_row_of_one_source_leaves_the_other_shards(tmp_path: Path) -> None:
    rows, others = _rows(200, seed=0), _rows(50, seed=1)
    before = _shard_names(_plan(tmp_path, {"a": rows, "b": others}))
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "tokens" / "shards").iterdir()}
    edited = [*rows[:100], rows[100]._replace(input_ids=rows[100].input_ids + 1), *rows[101:]]
    after = _shard_names(_plan(tmp_path, {"a": edited, "b": others}))
    assert 1 <= len(after - before) <= 2
    assert all(path.stat().st_mtime_ns == date for path, date in files.items())


def test_a_duplicate_in_a_later_source_is_skipped_and_counted(tmp_path: Path) -> None:
    first, second = _rows(30, seed=0), _rows(30, seed=1)
    second[3:5] = [
        second[3]._replace(input_ids=first[7].input_ids, loss_mask=first[7].loss_mask),
        second[4],
    ]
    plan = _plan(tmp_path, {"b": second, "a": first})
    assert plan.accounting.sources["a"].skipped == {}
    assert plan.accounting.sources["b"].skipped == {"duplicate": 1}
    assert plan.accounting.totals.samples == 59
    kept = _plan(tmp_path, {"b": second, "a": first}, deduplicate=False)
    assert kept.accounting.totals.samples == 60


def test_an_excluded_id_that_no_sample_has_is_named_and_one_of_any_source_is_not(
    tmp_path: Path,
) -> None:
    """A mistyped id would let the sample that was meant go on."""
    rows, others = _rows(20, seed=0), _rows(20, seed=1)
    with pytest.raises(
        UserError, match=f"exclude: no sample of any source has the id {'f' * 32}: "
    ) as caught:
        _plan(tmp_path, {"a": rows, "b": others}, exclude=[rows[4].name, "f" * 32, others[2].name])
    assert rows[4].name not in str(caught.value)
    plan = _plan(tmp_path, {"a": rows, "b": others}, exclude=[rows[4].name, others[2].name])
    assert plan.accounting.totals.skipped == {"excluded": 2}


def test_an_excluded_sample_is_skipped_and_counted(tmp_path: Path) -> None:
    rows = _rows(30, seed=0)
    plan = _plan(tmp_path, {"a": rows}, exclude=[rows[4].name])
    assert plan.accounting.totals.skipped == {"excluded": 1}
    assert plan.accounting.totals.kept == 29
    names = [
        name
        for path in (tmp_path / "tokens" / "shards").iterdir()
        for name in pq.read_table(path)["sample_id"].to_pylist()
    ]
    assert rows[4].name not in names


def test_a_row_of_several_samples_is_kept_while_one_of_them_is(tmp_path: Path) -> None:
    rows = _rows(4, seed=0)
    parts = [
        rows[0],
        rows[1]._replace(row=0, part=1),
        rows[2]._replace(row=1),
        rows[3]._replace(row=1, part=1),
    ]
    plan = _plan(tmp_path, {"a": parts}, exclude=[parts[0].name, parts[2].name, parts[3].name])
    found = plan.accounting.sources["a"]
    assert (found.rows_in, found.kept, found.samples, found.skipped) == (
        2,
        1,
        1,
        {"excluded": 1},
    )


def test_the_tokenisers_reasons_are_carried_into_the_totals(tmp_path: Path) -> None:
    files = [
        _source(tmp_path / "tokens", "a", _rows(5, seed=0), skipped={"empty": 2}),
        _source(tmp_path / "tokens", "b", _rows(6, seed=1), skipped={"empty": 1, "over_long": 3}),
    ]
    plan = make_plan(files, spec=SPEC, results=tmp_path, options=OPTIONS)
    totals = plan.accounting.totals
    assert (totals.rows_in, totals.kept, totals.skipped) == (
        17,
        11,
        {"empty": 3, "over_long": 3},
    )


def test_an_unexplained_row_is_an_error(tmp_path: Path) -> None:
    source = _source(tmp_path / "tokens", "a", _rows(5, seed=0), rows_in=7, skipped={"empty": 1})
    with pytest.raises(
        UserError, match=r"source a: unexplained rows: 7 in, but 5 kept \+ 1 skipped \+ 0 failed"
    ):
        make_plan([source], spec=SPEC, results=tmp_path, options=OPTIONS)
    with pytest.raises(UserError, match="unexplained rows"):
        dataclasses.replace(account(rows_in=3), skipped={"empty": 1}).check("x")


def test_tokens_that_do_not_match_their_accounting_are_an_error(tmp_path: Path) -> None:
    rows = _rows(50, seed=0)
    source = _source(tmp_path / "tokens", "a", rows)
    accounting = source.with_suffix(".json")
    counts = json.loads(accounting.read_text())
    _source(tmp_path / "tokens", "a", rows[:-1])
    publish_accounting(counts, accounting, tokens=source)
    with pytest.raises(
        UserError, match="unexplained rows: its accounting says 50 kept, the file has 49"
    ):
        make_plan([source], spec=SPEC, results=tmp_path, options=OPTIONS)


def test_zero_kept_is_an_error_that_says_why(tmp_path: Path) -> None:
    source = _source(tmp_path / "tokens", "a", [], skipped={"empty": 4})
    with pytest.raises(UserError, match="not one sample is kept of 4 rows: 4 empty"):
        make_plan([source], spec=SPEC, results=tmp_path, options=OPTIONS)


def said(needed: int, free: int) -> str:
    """Return the numbers of a disk without room, which differ by what is to be made free."""
    return (
        f"take {of_bytes(needed)}, the disk has {of_bytes(free)} free: make room for"
        f" {of_bytes(needed - free)} more"
    )


def test_a_budget_that_is_too_small_is_an_error_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"max_bytes: the shards take [0-9.]+ kB \(\d+ shards\), allowed are 1 kB",
    ):
        _plan(tmp_path, {"a": _rows(50, seed=0)}, budget=1000)
    assert not (tmp_path / "tokens" / "shards").exists()


def test_a_disk_that_is_too_full_is_an_error_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = _plan(tmp_path, {"a": _rows(100, seed=0)})
    needed = plan.bytes_needed
    assert needed > sum(shard.bytes for shard in plan.shards)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(UserError, match=said(needed, needed - 1)):
        _plan(tmp_path, {"a": _rows(100, seed=0)})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    captured = tmp_path / SPEC.folder_name / "shards" / f"{plan.shards[0].shard_id}.safetensors"
    captured.parent.mkdir(parents=True)
    captured.touch()
    again = _plan(tmp_path, {"a": _rows(100, seed=0)})
    assert again.bytes_needed + again.bytes_present == needed
    assert again.bytes_present > plan.shards[0].bytes


def test_before_a_server_starts_the_disk_needs_room_for_what_is_not_yet_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = _plan(tmp_path, {"a": _rows(100, seed=0)})
    capture = Capture(tmp_path / plan.capture_folder)
    first, second, *others = plan.shards
    capture.shards.mkdir(parents=True)
    capture.shard(first.shard_id).touch()
    unfinished = capture.building / f"{second.shard_id}-1" / "shard.safetensors"
    unfinished.parent.mkdir(parents=True)
    with open(unfinished, "wb") as file:
        file.write(bytes(8192))
        file.flush()
        os.fsync(file)
    written = unfinished.stat().st_blocks * 512
    assert written >= 8192
    needed = sum(shard.bytes for shard in (second, *others)) - written
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    check_missing(plan, capture_folder=capture.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(UserError, match=said(needed, needed - 1)):
        check_missing(plan, capture_folder=capture.folder)


def test_two_shards_of_the_same_samples_are_refused(tmp_path: Path) -> None:
    rows = _rows(3, seed=0)
    with pytest.raises(UserError, match="sources a and b hold the same 3 samples"):
        _plan(tmp_path, {"a": rows, "b": rows}, deduplicate=False)


def test_files_that_are_not_tokens_are_named(tmp_path: Path) -> None:
    source = _source(tmp_path, "a", _rows(3, seed=0))
    accounting = source.with_suffix(".json")
    counts = json.loads(accounting.read_text())
    source.write_bytes(b"no parquet")
    with pytest.raises(UserError, match=r"a\.parquet: changed since it was written.*tokenise"):
        make_plan([source], spec=SPEC, results=tmp_path, options=OPTIONS)
    publish_accounting(counts, accounting, tokens=source)
    with pytest.raises(UserError, match=r"a\.parquet: expected a Parquet file of tokens"):
        make_plan([source], spec=SPEC, results=tmp_path, options=OPTIONS)
    pq.write_table(pa.table({"row": [1]}), source)
    publish_accounting(counts, accounting, tokens=source)
    with pytest.raises(UserError, match="missing part, sample_id"):
        make_plan([source], spec=SPEC, results=tmp_path, options=OPTIONS)
    accounting.chmod(0o644)
    accounting.write_text(accounting.read_text().replace("3", "4"))
    with pytest.raises(UserError, match=r"a\.json: expected a source's accounting as it was wri"):
        make_plan([source], spec=SPEC, results=tmp_path, options=OPTIONS)
    accounting.unlink()
    with pytest.raises(UserError, match=r"a\.json: expected a source's accounting"):
        make_plan([source], spec=SPEC, results=tmp_path, options=OPTIONS)


def test_a_plan_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    _plan(tmp_path, {"a": _rows(5, seed=0)}).publish(path)
    assert Plan.read(path).checks == PlannedChecks(recapture_fraction=0.01, recapture_minimum=3)
    path.write_text('{"format": "x", "format_version": 1}')
    with pytest.raises(UserError, match=r"expected a plan \(draftstates.plan\), found x"):
        Plan.read(path)


def _command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Call the command on 100 rows and a tiny model; returns the path of the plan."""
    model = folder / "model"
    tokens = _source(folder / "results" / "tokens", "a", _rows(100, seed=0))
    config = {
        "data": {"sources": [{"name": "a", "files": ["a.jsonl"]}], "max_tokens": 100},
        "model": {"path": str(model), "name": "named"},
        "capture": {"residual_layers": [1, 8], "final_norm": "pre_norm"},
        "shards": {"min_bytes": 20000, "max_bytes": 80000},
        "checks": {"recapture_fraction": 0.1},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    output = folder / "results" / "plan.json"
    arguments = [
        "--config",
        folder / "config.yaml",
        "--tokens",
        tokens,
        "--model",
        model,
        "--output",
        output,
    ]
    monkeypatch.setattr("sys.argv", ["plan.py", *map(str, arguments)])
    runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "plan.py"), run_name="__main__")
    return output


def test_the_command_writes_the_plan_that_its_configuration_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model(tmp_path / "model")
    output = _command(tmp_path, monkeypatch)
    plan = Plan.read(output)
    spec = plan.capture
    assert (spec.residual_layers, spec.final_norm, spec.compute_dtype) == (
        (1, 8),
        "pre_norm",
        "bfloat16",
    )
    assert plan.capture_folder == f"named-{spec.key[:8]}"
    assert plan.checks == PlannedChecks(recapture_fraction=0.1, recapture_minimum=3)
    for shard in plan.shards:
        read_tokens(
            tmp_path / "results" / "tokens" / "shards" / f"{shard.shard_id}.parquet",
            shard_id=shard.shard_id,
        )


@pytest.mark.parametrize("script", ["server", "extract"])
def test_a_full_disk_is_refused_before_a_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    """Also where only shards are missing, and a single one has room."""
    tiny_model(tmp_path / "model")
    plan = Plan.read(output := _command(tmp_path, monkeypatch))
    results, shard_id = Results(tmp_path / "results"), plan.shards[0].shard_id
    capture = results.capture(plan.capture_folder)
    arguments = {
        "server": ["--output", capture.server],
        "extract": [
            *("--shard-id", shard_id, "--tokens", results.shard_tokens(shard_id)),
            *("--output", capture.shard(shard_id)),
        ],
    }
    common = ["--config", tmp_path / "config.yaml", "--plan", output]
    monkeypatch.setattr("sys.argv", [script, *map(str, [*common, *arguments[script]])])
    sizes = [shard.bytes for shard in plan.shards]
    usage = shutil.disk_usage(tmp_path)._replace(free=sum(sizes) - 1)
    assert usage.free > max(sizes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr("draftstates.server.lease.lease", lambda *_: pytest.fail("a server starts"))
    with pytest.raises(SystemExit, match=r"^error: .*the shards that are missing take"):
        runpy.run_path(
            str(Path(__file__).parents[3] / "scripts" / f"{script}.py"), run_name="__main__"
        )


def test_a_model_whose_states_cannot_be_captured_is_refused_before_any_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_model(tmp_path / "model") / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "is_encoder_decoder": True}))
    with pytest.raises(SystemExit) as end:
        _command(tmp_path, monkeypatch)
    assert "it has an encoder and a decoder" in str(end.value.code)
    assert not (tmp_path / "results" / "plan.json").exists()


def test_a_model_that_is_called_otherwise_keeps_its_captures(tmp_path: Path) -> None:
    first = _plan(tmp_path, {"a": _rows(30, seed=0)})
    captured = (
        tmp_path / first.capture_folder / "shards" / f"{first.shards[0].shard_id}.safetensors"
    )
    captured.parent.mkdir(parents=True)
    captured.touch()
    renamed = dataclasses.replace(SPEC, model="renamed")
    again = make_plan(
        [tmp_path / "tokens" / "a.parquet"], spec=renamed, results=tmp_path, options=OPTIONS
    )
    assert again.capture_folder == first.capture_folder
    assert again.bytes_present > 0
    other = dataclasses.replace(SPEC, model="renamed", model_digest="content-2")
    assert (
        make_plan(
            [tmp_path / "tokens" / "a.parquet"], spec=other, results=tmp_path, options=OPTIONS
        ).capture_folder
        == other.folder_name
    )


def test_tokens_of_a_shard_name_the_rows_and_the_source_where_its_samples_stand_now(
    tmp_path: Path,
) -> None:
    """Rows before them, or another name of the source, change no shard; what says where a sample
    came from must follow.
    """
    rows = _rows(60, seed=5)
    first = make_plan(
        [_source(tmp_path / "one", "chats", rows)],
        spec=SPEC,
        results=tmp_path / "results",
        options=OPTIONS,
    )
    moved = [row._replace(row=row.row + 3) for row in rows]
    path = _source(tmp_path / "two", "talks", moved, rows_in=63, skipped={"broken_json": 3})
    second = make_plan([path], spec=SPEC, results=tmp_path / "results", options=OPTIONS)
    names = [entry.shard_id for entry in first.shards]
    assert [entry.shard_id for entry in second.shards] == names
    tables = [
        pq.read_table(tmp_path / "results/tokens/shards" / f"{name}.parquet") for name in names
    ]
    assert [row for table in tables for row in table["row"].to_pylist()] == [
        row.row for row in moved
    ]
    assert {source for table in tables for source in table["source"].to_pylist()} == {"talks"}


def test_a_damaged_tokens_file_is_refused_at_capture_and_written_anew_by_the_plan(
    tmp_path: Path,
) -> None:
    source = _source(tmp_path / "one", "chats", _rows(60, seed=6))
    plan = make_plan([source], spec=SPEC, results=tmp_path / "results", options=OPTIONS)
    name = plan.shards[0].shard_id
    path = tmp_path / "results/tokens/shards" / f"{name}.parquet"
    whole = path.read_bytes()
    table = pq.read_table(path)
    changed = table["input_ids"].to_pylist()
    changed[2][0] += 1
    pq.write_table(
        table.set_column(
            table.column_names.index("input_ids"),
            "input_ids",
            pa.array(changed, pa.list_(pa.int32())),
        ),
        path,
    )
    with pytest.raises(UserError, match="the file is damaged; run: rm -f .* --forcerun plan"):
        read_tokens(path, shard_id=name)
    path.write_bytes(whole[:200])
    with pytest.raises(UserError, match="run: rm -f .* --forcerun plan"):
        read_tokens(path, shard_id=name)
    make_plan([source], spec=SPEC, results=tmp_path / "results", options=OPTIONS)
    assert read_tokens(path, shard_id=name).sample_ids


def _conversations(count: int, *, seed: int) -> list[Row]:
    """Return three samples of each conversation, each of which begins as the one before it."""
    rows = []
    for row, (head, *turns) in enumerate(
        zip(*[iter(_rows(4 * count, seed=seed))] * 4, strict=True)
    ):
        ids_sent = head.input_ids
        for part, turn in enumerate(turns):
            ids_sent = np.concatenate([ids_sent[: len(ids_sent) - part], turn.input_ids])
            rows.append(Row(row, part, ids_sent, np.ones(len(ids_sent), np.uint8)))
    return rows


def test_the_plan_shares_prefixes_and_counts_room_and_budget_by_distinct_rows(
    tmp_path: Path,
) -> None:
    rows = _conversations(200, seed=0)
    plan = _plan(tmp_path, {"a": rows}, **SHARING)
    apart = _plan(tmp_path / "apart", {"a": rows}, **SHARING | {"share_prefixes": False})
    assert not _shard_names(plan) & _shard_names(apart), "neither is taken for the other"
    assert [shard.samples for shard in plan.shards] == [shard.samples for shard in apart.shards]
    for shard in plan.shards:
        path = tmp_path / "tokens" / "shards" / f"{shard.shard_id}.parquet"
        tokens = read_tokens(path, shard_id=shard.shard_id)
        assert tokens.segments.rows == shard.tokens - shard.shared_tokens
        assert tokens.segments.fault(tokens.input_ids) is None
        distinct = {
            part[: end + 1].tobytes()
            for part in np.split(tokens.input_ids, np.cumsum(tokens.lengths)[:-1])
            for end in range(len(part))
        }
        # but for the last row of a sample, which is its own, and prefixes that are too short
        assert 0 <= tokens.segments.rows - len(distinct) <= 4 * len(tokens.lengths)
    shared = sum(shard.shared_tokens for shard in plan.shards)
    assert shared > plan.accounting.totals.tokens / 3
    saved = apart.bytes_needed - plan.bytes_needed
    assert shared * SPEC.row_bytes * 0.9 < saved < shared * SPEC.row_bytes * 1.1
    budget = sum(shard.bytes for shard in apart.shards)
    _plan(tmp_path, {"a": rows}, **SHARING, budget=budget)
    with pytest.raises(UserError, match="max_bytes: the shards take"):
        _plan(tmp_path, {"a": rows}, **SHARING | {"share_prefixes": False}, budget=budget)


def test_where_nothing_is_shared_the_plan_is_the_one_without_sharing(tmp_path: Path) -> None:
    rows = _rows(200, seed=0)
    plan = _plan(tmp_path, {"a": rows}, min_shared_tokens=4)
    files = {path.name: path.read_bytes() for path in (tmp_path / "tokens" / "shards").iterdir()}
    apart = _plan(tmp_path / "apart", {"a": rows}, share_prefixes=False)
    assert plan.shards == apart.shards
    folder = tmp_path / "apart" / "tokens" / "shards"
    assert files == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_edited_conversation_of_shared_prefixes_leaves_the_other_shards(tmp_path: Path) -> None:
    rows = _conversations(200, seed=0)
    before = _shard_names(_plan(tmp_path, {"a": rows}, **SHARING))
    ids_sent = rows[91].input_ids.copy()
    ids_sent[-3:] += 1
    edited = [*rows[:91], rows[91]._replace(input_ids=ids_sent), *rows[92:]]
    after = _shard_names(_plan(tmp_path, {"a": edited}, **SHARING))
    assert 1 <= len(after - before) <= 2
    assert len(before) > 3


@pytest.mark.parametrize("damage", ["places", "dropped", "numbers"])
def test_damaged_segments_of_a_shards_tokens_are_refused(tmp_path: Path, damage: str) -> None:
    plan = _plan(tmp_path, {"a": _conversations(9, seed=0)}, min_shared_tokens=4)
    name = plan.shards[0].shard_id
    path = tmp_path / "tokens" / "shards" / f"{name}.parquet"
    table = pq.read_table(path)
    places = table["segments"].to_pylist()
    places[1][0] += 1
    column = {"places": pa.array(places), "numbers": pa.array(range(len(table)))}.get(damage)
    table = table.drop_columns("segments")
    pq.write_table(table if column is None else table.append_column("segments", column), path)
    with pytest.raises(UserError, match=f"{name}.*--forcerun plan"):
        read_tokens(path, shard_id=name)

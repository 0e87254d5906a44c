"""Promises 1 and 6: the manifest lists what was verified and only that, and its accounts close."""

import dataclasses
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from captured import (
    Captured,
    capture,
    capture_sharing,
    parity_of,
    plan_of,
    tiny_model,
    verify,
    write,
)
from fuzz import flip_in_column

from draftstates.documents import sealed
from draftstates.errors import UserError
from draftstates.records import Accounting, LayerParity, ManifestShard, Plan, SourceAccount
from draftstates.shards import layout
from draftstates.shards.manifest import _frame, _Kept, write_manifest

ROOT = Path(__file__).parents[3]
SCHEMA = ROOT / "schemas" / "manifest.schema.yaml"


def test_the_schema_has_the_fields_of_the_records() -> None:
    schema = yaml.safe_load(SCHEMA.read_text())["properties"]
    layer = schema["parity"]["properties"]["layers"]["items"]["properties"]
    shard = schema["shards"]["items"]["properties"]
    for record, properties in ((LayerParity, layer), (ManifestShard, shard)):
        assert {field.name for field in dataclasses.fields(record)} == set(properties), record


class Run:
    """A results folder with two verified shards of two sources."""

    def __init__(self, folder: Path) -> None:
        self.results = folder
        model = tiny_model(folder / "model")
        self.captured = {"a": capture(model, seed=1), "b": capture(model, samples=5, seed=2)}
        self.plan: Plan | None = None
        for source, captured in self.captured.items():
            self._add(source, captured)
        parity_of(self.plan.capture).publish(self.run / "parity.json")

    def _add(self, source: str, captured: Captured) -> None:
        plan = plan_of(captured, source=source)
        self.plan = merged(self.plan, plan) if self.plan else plan
        self.run = self.results / plan.capture_folder
        files = write(captured, self.run / "shards")
        verify(files).publish(self.run / "verified" / f"{files.shard_id}.json")
        tokens = self.results / "tokens" / "shards"
        tokens.mkdir(parents=True, exist_ok=True)
        rows = pa.array([10 * index for index in range(len(captured.names))], pa.int64())
        pq.write_table(
            pa.table({"row": rows, "sample_id": captured.names, "source": [source] * len(rows)}),
            tokens / f"{files.shard_id}.parquet",
        )

    def write(self, *, parity: str = "auto") -> dict[str, Any]:
        manifest = write_manifest(
            self.plan,
            tokens=self.results / "tokens" / "shards",
            capture_folder=self.run,
            manifest=self.run / "manifest.json",
            samples=self.run / "samples.parquet",
            parity=parity,
        )
        return manifest.document()

    def shard(self, source: str) -> Path:
        return self.run / "shards" / f"{self.captured[source].shard_id}.safetensors"

    def change_verified(
        self, source: str, change: Callable[[dict[str, Any]], None], *, seal: bool = True
    ) -> None:
        path = self.run / "verified" / f"{self.captured[source].shard_id}.json"
        found = json.loads(path.read_text())
        change(found)
        path.write_text(json.dumps(sealed(found) if seal else found))


def merged(first: Plan, second: Plan) -> Plan:
    """One plan of two."""
    sources = {**first.accounting.sources, **second.accounting.sources}
    totals = {
        name: sum(getattr(account, name) for account in sources.values())
        for name in ("rows_in", "kept", "samples", "tokens", "supervised_tokens")
    }
    return dataclasses.replace(
        first,
        shards=first.shards + second.shards,
        accounting=Accounting(
            sources=sources, totals=SourceAccount(**totals, skipped={}, failed={})
        ),
    )


def miscounted(plan: Plan, source: str | None, field: str) -> Plan:
    """Return a plan whose account of a source, or of all of them, has one more of `field`."""
    accounting = plan.accounting
    old = accounting.totals if source is None else accounting.sources[source]
    new = dataclasses.replace(old, **{field: getattr(old, field) + 1})
    changed = (
        {"totals": new} if source is None else {"sources": {**accounting.sources, source: new}}
    )
    return dataclasses.replace(plan, accounting=dataclasses.replace(accounting, **changed))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def verified_with(run: Run, had: float | None, *, asked: float | None) -> None:
    """Make all shards answered ones, verified with one limit, and the plan ask for another."""
    run.plan = dataclasses.replace(
        run.plan,
        checks=dataclasses.replace(run.plan.checks, answers=asked),
        shards=tuple(dataclasses.replace(shard, answered=True) for shard in run.plan.shards),
    )
    for source, shard in zip("ab", run.plan.shards, strict=True):

        def change(found: dict[str, Any], tokens: int = shard.supervised_tokens) -> None:
            found["figures"]["answer_tokens"], found["answers_limit"] = tokens, had

        run.change_verified(source, change)


@pytest.mark.parametrize(("had", "asked"), [(None, None), (0.5, 0.5), (0.5, 0.6)])
def test_findings_within_the_limit_of_answers_are_listed(
    run: Run, had: float | None, asked: float | None
) -> None:
    verified_with(run, had, asked=asked)
    assert len(run.write()["shards"]) == 2


@pytest.mark.parametrize(("had", "asked"), [(0.5, 0.4), (None, 0.4), (0.5, None)])
def test_findings_by_another_limit_of_answers_are_refused(
    run: Run, had: float | None, asked: float | None
) -> None:
    verified_with(run, had, asked=asked)
    message = _refused(run)
    assert f"verified with checks.answers {had}, expected {asked}; to verify the shard" in message


def _refused(run: Run) -> str:
    with pytest.raises(UserError) as error:
        run.write()
    assert not (run.run / "manifest.json").exists()
    return str(error.value)


def test_the_manifest_of_one_model_is_not_written_into_the_folder_of_another(run: Run) -> None:
    run.run = run.run.rename(run.run.with_name("other-12345678"))
    message = _refused(run)
    assert str(run.run) in message
    assert run.plan.capture_folder in message


def test_the_manifest_keeps_to_its_schema(run: Run) -> None:
    manifest = run.write()
    jsonschema.Draft202012Validator(yaml.safe_load(SCHEMA.read_text())).validate(manifest)
    assert json.loads((run.run / "manifest.json").read_text()) == manifest


def test_the_manifest_says_what_was_captured_and_how_much(run: Run) -> None:
    manifest = run.write()
    spec = run.captured["a"].spec
    assert (manifest["capture"]["key"], manifest["capture"]["revision"]) == (
        spec.key,
        spec.model_digest,
    )
    assert (manifest["capture"]["engine"], manifest["capture"]["engine_version"]) == (
        "sglang",
        "0.5.23",
    )
    totals = manifest["totals"]
    assert (totals["rows_in"], totals["kept"], totals["samples"]) == (17, 17, 17)
    assert totals["tokens"] == sum(
        len(tokens) for captured in run.captured.values() for tokens in captured.tokens
    )
    assert totals["bytes"] == sum(run.shard(source).stat().st_size for source in "ab")
    assert manifest["checks"]["recaptures"] == 6


def test_a_sample_is_read_back_by_what_the_table_says(run: Run) -> None:
    manifest = run.write()
    table = pd.read_parquet(run.run / "samples.parquet")
    assert len(table) == 17
    paths = {shard["shard_id"]: run.run / shard["path"] for shard in manifest["shards"]}
    for entry in table.itertuples():
        captured = run.captured[entry.source]
        index = entry.row // 10
        shard = layout.Shard(paths[entry.shard_id])
        assert captured.names[index] == entry.sample_id == shard.header.sample_ids[entry.position]
        assert shard.rows(entry.position) == (entry.offset, entry.offset + entry.tokens)
        assert (shard.sample(entry.position)["hidden_states"] == captured.hidden[index]).all()
        assert entry.supervised == captured.masks[index].sum()
        assert entry.checksum == shard.checksum(entry.position)


def test_the_tables_offset_is_the_place_of_the_ids_where_rows_are_shared(tmp_path: Path) -> None:
    captured = capture_sharing(tiny_model(tmp_path / "model"))
    files = write(captured, tmp_path / captured.spec.folder_name / "shards")
    found, shard = verify(files), layout.Shard(files.shard)
    assert shard.shares_rows
    names = {"row": range(12), "sample_id": captured.names, "source": "a"}
    pd.DataFrame(names).to_parquet(tmp_path / f"{files.shard_id}.parquet")
    kept = _Kept(path=files.shard, bytes=0, checksum="", samples=found.samples.checksum)
    for entry in _frame(files.plan.shards[0], found, kept, tmp_path).itertuples():
        ids = shard.input_ids[entry.offset : entry.offset + entry.tokens]
        assert ids.tolist() == captured.tokens[entry.position].tolist()
    said = (ROOT / "docs" / "results.md").read_text()
    assert "place of its first token in the shard's `input_ids` (`offset`" in said


def test_the_manifest_says_how_far_the_server_was_compared_with_the_checkpoint(run: Run) -> None:
    parity = run.write()["parity"]
    assert parity["result"] == "all 8 layers"
    assert parity["layers"][0]["median"] == 1e-3
    assert parity["beyond"] == {"sliding_window": 4096}


def test_without_a_comparison_with_the_checkpoint_there_is_no_manifest(run: Run) -> None:
    (run.run / "parity.json").unlink()
    assert "expected a result of parity: No such file" in _refused(run)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"capture_key": "x"}, "expected capture_key"),
        ({"selftest": "of another server"}, "captured by a server that was not compared"),
    ],
)
def test_a_comparison_of_another_server_is_refused(
    run: Run, changes: dict[str, Any], expected: str
) -> None:
    parity_of(run.plan.capture, **changes).publish(run.run / "parity.json")
    assert expected in _refused(run)


def test_a_comparison_that_was_changed_is_refused(run: Run) -> None:
    path = run.run / "parity.json"
    path.write_text(path.read_text().replace("all 8 layers", "all 9 layers"))
    assert "changed since it was written" in _refused(run)


@pytest.mark.parametrize("selftests", [[], ["of another"], ["of another", "5e1f" * 8]])
def test_a_shard_of_a_server_that_was_not_compared_is_named_with_what_captures_it_again(
    run: Run, selftests: list[str]
) -> None:
    run.change_verified("b", lambda found: found.update(selftests=selftests))
    message = _refused(run)
    assert f"1 shard, such as {run.captured['b'].shard_id}: captured by a server" in message
    assert f"rm -f {run.run}/shards/{run.captured['b'].shard_id}.receipts.json" in message


def test_no_comparison_is_an_error_only_where_one_is_required(run: Run) -> None:
    none = parity_of(run.plan.capture, result="none (gptq)", compared=0, layers=())
    none.publish(run.run / "parity.json")
    with pytest.raises(UserError, match=r"checks.parity: required, but parity is none \(gptq\)"):
        run.write(parity="required")
    assert run.write()["parity"]["result"] == "none (gptq)"


def test_a_shard_that_was_not_verified_is_refused(run: Run) -> None:
    (run.run / "verified" / f"{run.captured['b'].shard_id}.json").unlink()
    assert "expected the findings of verification: No such file" in _refused(run)


def test_a_shard_that_is_gone_or_cut_short_after_verification_is_refused(run: Run) -> None:
    content = run.shard("a").read_bytes()
    run.shard("a").write_bytes(content[:-1])
    assert "cut short" in _refused(run)
    run.shard("a").unlink()
    assert "verified, but it cannot be read" in _refused(run)


def test_another_shard_under_a_verified_name_is_refused(run: Run) -> None:
    run.shard("b").write_bytes(run.shard("a").read_bytes())
    assert "changed since verification: expected bytes" in _refused(run)


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.update(checksum="0" * 32),
        lambda found: found["samples"]["checksum"].reverse(),
        lambda found: found["figures"].update(alignment_share_of_limit=0.0),
        lambda found: found.pop("digest"),
    ],
)
def test_what_was_verified_must_be_as_verification_wrote_it(
    run: Run, change: Callable[[dict[str, Any]], None]
) -> None:
    run.change_verified("a", change, seal=False)
    assert "changed since it was written" in _refused(run)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda found: found.update(shard_id="x"), "expected shard_id"),
        (lambda found: found.update(capture_key="x"), "expected capture_key"),
        (lambda found: found.update(format_version=1), "made by an earlier draftstates"),
        (lambda found: found["samples"]["sample_id"].pop(), "expected columns of one length"),
        (
            lambda found: [column.pop() for column in found["samples"].values()],
            "expected samples 12, found 11",
        ),
        (lambda found: found["samples"]["tokens"].__setitem__(0, 9999), "expected tokens"),
        (
            lambda found: found["samples"]["supervised_tokens"].__setitem__(0, 9999),
            "expected supervised_tokens",
        ),
        (
            lambda found: found["samples"]["sample_id"].reverse(),
            "expected the samples that were verified",
        ),
    ],
)
def test_what_was_verified_must_be_what_was_planned(
    run: Run, change: Callable[[dict[str, Any]], None], expected: str
) -> None:
    run.change_verified("a", change)
    assert expected in _refused(run)


def test_accounts_that_do_not_close_are_refused(run: Run) -> None:
    plan = run.plan
    run.plan = miscounted(plan, "a", "rows_in")
    assert "source a: unexplained rows: 13 in, but 12 kept" in _refused(run)
    run.plan = miscounted(plan, None, "rows_in")
    assert "all sources: unexplained rows" in _refused(run)


@pytest.mark.parametrize("field", ["samples", "tokens", "supervised_tokens"])
def test_sources_that_do_not_add_up_to_the_whole_are_refused(run: Run, field: str) -> None:
    run.plan = miscounted(run.plan, "a", field)
    assert f"{field} in all, the sources have" in _refused(run)


def test_samples_that_are_in_no_shard_are_refused(run: Run) -> None:
    run.plan = dataclasses.replace(run.plan, shards=run.plan.shards[:-1])
    assert "unexplained rows: 17 samples are accounted for, the shards have 12" in _refused(run)


def test_a_manifest_of_nothing_is_an_error(run: Run) -> None:
    run.plan = dataclasses.replace(run.plan, shards=())
    assert "no shards" in _refused(run)


@pytest.mark.parametrize("column", ["row", "source"])
def test_another_row_or_source_of_a_sample_is_refused(run: Run, column: str) -> None:
    path = run.results / "tokens" / "shards" / f"{run.captured['a'].shard_id}.parquet"
    pq.write_table(pq.read_table(path), path, write_page_checksum=True)
    flip_in_column(path, column)
    assert f"{path}: tokens of shard" in _refused(run)


def test_tokens_that_are_gone_are_named(run: Run) -> None:
    (run.results / "tokens" / "shards" / f"{run.captured['b'].shard_id}.parquet").unlink()
    assert "--forcerun plan" in _refused(run)


def test_the_command_ends_with_the_accounting_and_the_path(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = run.results / "plan.json"
    run.plan.publish(plan)
    output = run.run / "manifest.json"
    arguments = [
        "--parity",
        "auto",
        "--plan",
        plan,
        "--capture-folder",
        run.run,
        "--output",
        output,
        "--samples",
        run.run / "samples.parquet",
    ]
    monkeypatch.setattr("sys.argv", ["manifest.py", *map(str, arguments)])
    runpy.run_path(str(ROOT / "scripts" / "manifest.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == f"manifest: {output}"
    assert f"{json.loads(output.read_text())['totals']['tokens']:,}" in printed

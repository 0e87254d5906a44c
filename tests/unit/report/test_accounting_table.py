"""The accounting that ends a run is that of the present plan, or it says so."""

import dataclasses
from pathlib import Path

import pytest
from captured import capture, tiny_model, write
from synthetic import manifest_with
from token_kit import run_cli


def test_a_manifest_of_an_earlier_plan_is_not_shown_as_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    files = write(capture(tiny_model(tmp_path / "model")), tmp_path / "shards")
    plan = tmp_path / "plan.json"
    files.plan.publish(plan)
    manifest = tmp_path / files.plan.capture_folder / "manifest.json"
    manifest_with([files.shard_id]).publish(manifest)
    run_cli("accounting", "--results", tmp_path)
    assert f"manifest: {manifest}" in capsys.readouterr().out
    kept = manifest_with([files.shard_id])
    lossy = dataclasses.replace(kept.totals, not_used={"metadata": 1204, "a\x1b[2J": 1})
    dataclasses.replace(kept, totals=lossy).publish(manifest)
    run_cli("accounting", "--results", tmp_path)
    said = capsys.readouterr().out
    assert "\nnot used, metadata: 1,204 rows\nnot used, a⟨U+001B⟩[2J: 1 rows\n1 shard, " in said
    manifest_with(["0" * 32]).publish(manifest)
    run_cli("accounting", "--results", tmp_path)
    said = capsys.readouterr().out
    assert "is that of an earlier plan" in said
    assert "rows in" not in said

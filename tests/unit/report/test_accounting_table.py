"""The accounting that ends a run is that of the present plan, or it says so."""

import json
from pathlib import Path

import pytest
from captured import capture, tiny_model, write
from token_kit import run_script


def test_a_manifest_of_an_earlier_plan_is_not_shown_as_the_result(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    files = write(capture(tiny_model(tmp_path / "model")), tmp_path / "shards")
    account = {"rows_in": 12, "kept": 12, "samples": 12, "tokens": 3, "supervised_tokens": 2, "skipped": {}, "failed": {}}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(files.plan))
    manifest = tmp_path / files.plan["run"] / "manifest.json"
    manifest.parent.mkdir(exist_ok=True)
    content = {"shards": [{"shard_id": files.shard_id}], "sources": {"a": account}, "totals": {**account, "bytes": 5}}
    manifest.write_text(json.dumps(content))
    run_script("accounting.py", "--plan", plan)
    assert f"manifest: {manifest}" in capsys.readouterr().out
    manifest.write_text(json.dumps({**content, "shards": [{"shard_id": "0" * 32}]}))
    run_script("accounting.py", "--plan", plan)
    said = capsys.readouterr().out
    assert "is that of an earlier plan" in said
    assert "rows in" not in said

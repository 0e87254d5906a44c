"""Only shards that no manifest lists and no plan asks for are removed, and nothing where that cannot be told."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic import capture_spec, planned

from draftstates import manifest
from draftstates import plan as planning
from draftstates.errors import UserError
from draftstates.prune import unlisted

LISTED, PLANNED, STALE = (digit * 32 for digit in "abc")
SCRIPT = Path(__file__).parents[2] / "scripts" / "prune.py"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A run with a shard in its manifest, one that is planned, and a stale one; another run, and one without a manifest."""
    for run, names in (("m-12345678", (LISTED, PLANNED, STALE)), ("m-00000000", (LISTED, STALE)), ("m-11111111", (STALE,))):
        for folder in ("shards", "verified"):
            (tmp_path / run / folder).mkdir(parents=True)
        for name in names:
            for part in (".safetensors", ".probe.safetensors", ".receipts.json"):
                (tmp_path / run / "shards" / f"{name}{part}").write_bytes(b"12345")
            (tmp_path / run / "verified" / f"{name}.json").write_bytes(b"12345")
    (tmp_path / "tokens" / "shards").mkdir(parents=True)
    (tmp_path / "tokens" / "shards" / f"{STALE}.parquet").touch()
    document = {"format": manifest.FORMAT, "format_version": manifest.FORMAT_VERSION, "shards": [{"shard_id": LISTED}]}
    for run in ("m-12345678", "m-00000000"):
        (tmp_path / run / "manifest.json").write_text(json.dumps(document))
    shard = {"shard_id": PLANNED, "source": "a", "samples": 1, "tokens": 1, "bytes": 5}
    plan = {"format": planning.FORMAT, "format_version": planning.FORMAT_VERSION, "run": "m-12345678", "shards": [shard]}
    plan |= {"capture": planned(capture_spec()), "accounting": {"sources": {}, "totals": {}}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    return tmp_path


def files(results: Path) -> set[str]:
    return {str(path.relative_to(results)) for path in results.rglob("*") if path.is_file()}


def prune(results: Path, *flags: str) -> str:
    done = subprocess.run([sys.executable, SCRIPT, "--results", results, *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_delete_it_only_says_what_it_would_remove(results: Path) -> None:
    before = files(results)
    said = prune(results)
    assert f"m-12345678/{STALE}  20 bytes" in said
    assert f"m-00000000/{STALE}" in said
    assert "2 shards, 40 bytes to remove" in said
    assert LISTED not in said
    assert PLANNED not in said
    assert files(results) == before


def test_with_delete_the_stale_ones_go_with_all_that_belongs_to_them(results: Path) -> None:
    before = files(results)
    prune(results, "--delete")
    gone = before - files(results)
    assert len(gone) == 8
    assert all(STALE in name and name.startswith(("m-12345678", "m-00000000")) for name in gone), "a run without a manifest is left alone"
    assert "0 shards" in prune(results)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": "draftstates.manifest", "format_version": 99, "shards": []}', "\x00"])
@pytest.mark.parametrize("name", ["plan.json", "m-12345678/manifest.json"])
def test_where_a_plan_or_manifest_cannot_be_read_nothing_is_removed(results: Path, name: str, content: str) -> None:
    (results / name).write_text(content)
    with pytest.raises(UserError, match=name):
        unlisted(results)


def test_without_a_plan_nothing_is_removed(results: Path) -> None:
    (results / "plan.json").unlink()
    with pytest.raises(UserError, match="expected a plan"):
        unlisted(results)


def test_a_compact_copy_is_no_run(results: Path) -> None:
    (results / "m-12345678").rename(results / "compact")
    (results / "compact" / "verified").rename(results / "elsewhere")
    assert {shard.run for shard in unlisted(results)} == {"m-00000000"}

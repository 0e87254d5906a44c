"""Only shards that no manifest lists and no plan asks for are removed, and nothing where that
cannot be told.
"""

import dataclasses
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from synthetic import manifest_with, plan_with, planned_shard

from draftstates.errors import UserError
from draftstates.report.prune import unlisted

LISTED, PLANNED, STALE = (digit * 32 for digit in "abc")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Return a results folder with three capture folders.

    The first has a shard in its manifest, one that is planned, and a stale one. The second is
    no longer planned. The third has no manifest.
    """
    for run, names in (
        ("m-12345678", (LISTED, PLANNED, STALE)),
        ("m-00000000", (LISTED, STALE)),
        ("m-11111111", (STALE,)),
    ):
        for folder in ("shards", "verified"):
            (tmp_path / run / folder).mkdir(parents=True)
        for name in names:
            for part in (".safetensors", ".recaptures.safetensors", ".receipts.json"):
                (tmp_path / run / "shards" / f"{name}{part}").write_bytes(b"12345")
            (tmp_path / run / "verified" / f"{name}.json").write_bytes(b"12345")
    (tmp_path / "tokens" / "shards").mkdir(parents=True)
    (tmp_path / "tokens" / "shards" / f"{STALE}.parquet").touch()
    for run in ("m-12345678", "m-00000000"):
        manifest_with([LISTED]).publish(tmp_path / run / "manifest.json")
    plan_with([planned_shard(PLANNED)], capture_folder="m-12345678").publish(tmp_path / "plan.json")
    return tmp_path


def files(results: Path) -> set[str]:
    return {str(path.relative_to(results)) for path in results.rglob("*") if path.is_file()}


def prune(results: Path, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "draftstates.commands.cli", "prune", "--results", results, *flags],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_delete_it_only_says_what_it_would_remove(results: Path) -> None:
    before = files(results)
    said = prune(results)
    assert f"m-12345678/{STALE}  20 B" in said
    assert f"m-00000000/{STALE}" in said
    assert "2 shards and 0 unfinished ones, 40 B to remove" in said
    assert LISTED not in said
    assert PLANNED not in said
    assert files(results) == before


def test_with_delete_the_stale_ones_go_with_all_that_belongs_to_them(results: Path) -> None:
    before = files(results)
    prune(results, "--delete")
    gone = before - files(results)
    assert len(gone) == 8
    assert all(STALE in name and name.startswith(("m-12345678", "m-00000000")) for name in gone), (
        "a run without a manifest is left alone"
    )
    assert "0 shards and 0 unfinished ones" in prune(results)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[]",
        '{"format": "draftstates.manifest", "format_version": 99, "shards": []}',
        "\x00",
    ],
)
@pytest.mark.parametrize("name", ["plan.json", "m-12345678/manifest.json"])
def test_where_a_plan_or_manifest_cannot_be_read_nothing_is_removed(
    results: Path, name: str, content: str
) -> None:
    (results / name).write_text(content)
    with pytest.raises(UserError, match=name):
        unlisted(results)


def test_without_a_plan_nothing_is_removed(results: Path) -> None:
    (results / "plan.json").unlink()
    with pytest.raises(UserError, match="expected a plan"):
        unlisted(results)


def test_of_a_listed_shard_other_forms_than_the_listed_one_are_stale(results: Path) -> None:
    run = results / "m-12345678"
    forms = {name: run / "compact" / name for name in ("e4m3", "e4m3-top-token")}
    for folder in forms.values():
        folder.mkdir(parents=True)
        for name in (LISTED, PLANNED, STALE):
            for suffix in (".safetensors", ".json"):
                (folder / f"{name}{suffix}").write_bytes(b"12345")
    found = manifest_with([LISTED])
    (shard,) = found.shards
    listed = dataclasses.replace(shard, path=f"compact/e4m3/{LISTED}.safetensors")
    dataclasses.replace(found, shards=(listed,)).publish(run / "manifest.json")
    before = files(results)
    prune(results, "--delete")
    gone = {name for name in before - files(results) if name.startswith("m-12345678")}
    other = {f"m-12345678/compact/e4m3-top-token/{LISTED}{s}" for s in (".safetensors", ".json")}
    captured = {
        f"m-12345678/shards/{LISTED}{suffix}"
        for suffix in (".safetensors", ".recaptures.safetensors")
    }
    assert {name for name in gone if LISTED in name} == other | captured
    assert len({name for name in gone if STALE in name}) == 8
    assert not {name for name in gone if PLANNED in name}


def test_a_compact_copy_is_no_run(results: Path) -> None:
    (results / "m-12345678").rename(results / "compact")
    (results / "compact" / "verified").rename(results / "elsewhere")
    assert {shard.capture_folder for shard in unlisted(results)} == {"m-00000000"}


def building(results: Path, run: str, name: str, *, hours: float) -> Path:
    """Return a folder in which a shard was being built, last written to so many hours ago."""
    folder = results / run / "shards" / ".building" / f"{name}-12345678"
    folder.mkdir(parents=True)
    for part, content in (("lock", b""), ("shard.safetensors", b"1234567")):
        (folder / part).write_bytes(content)
    for path in (*folder.iterdir(), folder):
        os.utime(path, times=(time.time() - 3600 * hours,) * 2)
    return folder


def test_what_a_killed_job_was_building_goes_whatever_the_plan_and_a_manifest_say(
    results: Path,
) -> None:
    folders = [
        building(results, "m-12345678", PLANNED, hours=2),
        building(results, "m-11111111", "d" * 32, hours=2),
    ]
    # killed while it cleared up
    (folders[1] / "lock").unlink()
    os.utime(folders[1], times=(0, 0))
    said = prune(results)
    assert all(f"{folder.relative_to(results)}  7 B" in said for folder in folders)
    assert "2 shards and 2 unfinished ones, 54 B to remove: run again with --delete" in said
    assert all(folder.exists() for folder in folders), "without --delete it only says so"
    assert "2 shards and 2 unfinished ones, 54 B removed" in prune(results, "--delete")
    assert not any(folder.exists() for folder in folders)
    assert "0 shards and 0 unfinished ones, 0 B to remove" in prune(results)


def test_what_a_living_job_builds_stays_whoever_sees_its_lock(results: Path) -> None:
    """The lock of a job on another node may not be seen here, but its writing is."""
    held, fresh = (
        building(results, "m-12345678", PLANNED, hours=2),
        building(results, "m-00000000", "d" * 32, hours=0.1),
    )
    with open(held / "lock", "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "and 0 unfinished ones" in prune(results, "--delete")
    assert held.exists()
    assert fresh.exists()
    assert "1 unfinished ones" in prune(results, "--delete"), "the lock alone kept it"
    assert (held.exists(), fresh.exists()) == (False, True)

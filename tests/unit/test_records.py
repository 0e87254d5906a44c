"""Records on the disk: whole, of this version, and of the capture that their key names; or refused
by name, with the command that makes them.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from captured import Files, capture, tiny_model, verify, write
from synthetic import manifest_with, plan_with, planned_shard, small

from draftstates.documents import Document, InvalidField, sealed
from draftstates.errors import UserError
from draftstates.records import Manifest, Plan, ShardReceipts, Verified
from draftstates.shards import layout
from draftstates.shards.compact import CompactShard, Storage, write_compact


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("files")
    return write(capture(tiny_model(folder / "model")), folder / "shards")


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    plan_with([planned_shard("a" * 32)], capture_folder="tiny").publish(path)
    return path


def change(path: Path, alter: Callable[[dict[str, Any]], object], *, seal: bool = True) -> None:
    document = json.loads(path.read_text())
    alter(document)
    path.write_text(json.dumps(sealed(document) if seal else document))


def refusal(kind: type[Document], path: Path) -> str:
    with pytest.raises(UserError) as error:
        kind.read(path)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", [Plan, ShardReceipts, Verified, Manifest])
def test_a_record_reads_back_as_it_was(kind: type[Document], files: Files, tmp_path: Path) -> None:
    record = made(kind, files)
    record.publish(tmp_path / "record.json")
    assert kind.read(tmp_path / "record.json") == record


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        (Plan, "run: snakemake --cores all --forcerun plan"),
        (ShardReceipts, "to capture the shard again: rm -f {path} && snakemake --cores all"),
        (Verified, "to verify the shard: rm -f {path} && snakemake --cores all"),
        (Manifest, "to write it again: rm -f {path} && snakemake --cores all"),
    ],
)
def test_an_earlier_version_is_refused_by_name_with_the_command(
    kind: type[Document], remedy: str, files: Files, tmp_path: Path
) -> None:
    path = tmp_path / "record.json"
    made(kind, files).publish(path)
    change(path, lambda document: document.update(format_version=1))
    assert refusal(kind, path) == (
        f"{path}: {kind.FORMAT} version 1, made by an earlier draftstates;"
        f" expected version {kind.VERSION}: " + remedy.format(path=path)
    )


def made(kind: type[Document], files: Files) -> Document:
    """Return a record of this kind."""
    if kind is ShardReceipts:
        return ShardReceipts.read(files.receipts)
    return {
        Plan: lambda: files.plan,
        Verified: lambda: verify(files),
        Manifest: lambda: manifest_with([files.shard_id]),
    }[kind]()


def earlier(path: Path) -> None:
    """Make a shard one of version 1, of the same length."""
    path.write_bytes(path.read_bytes().replace(b'"format_version":"2"', b'"format_version":"1"', 1))


def test_shards_of_an_earlier_version_are_refused_by_name(tmp_path: Path) -> None:
    shard = next((small(tmp_path).path.parent / "shards").glob("*.safetensors"))
    storage = Storage(fp8="layers", supervised_rows=False)
    write_compact(layout.Shard(shard), tmp_path / "compact", storage)
    earlier(tmp_path / "compact")
    earlier(shard)
    with pytest.raises(UserError, match="shard version 1, made by an earlier draftstates; .*: run"):
        layout.Shard(shard)
    with pytest.raises(
        UserError, match="compact version 1, made by an earlier .*: rm -f .*compact"
    ):
        CompactShard(tmp_path / "compact")


def test_a_changed_plan_is_blamed_itself(plan: Path) -> None:
    """Its other readers would blame the shards that do not fit it."""
    change(plan, lambda document: document["shards"][0].update(tokens=2), seal=False)
    message = refusal(Plan, plan)
    assert message.startswith(f"{plan}: changed since it was written: expected digest ")
    assert message.endswith("run: snakemake --cores all --forcerun plan")


@pytest.mark.parametrize(
    ("alter", "problem"),
    [
        (lambda found: found["shards"][0].pop("tokens"), "shards[0].tokens: expected a value"),
        (
            lambda found: found["shards"][0].update(tokens="7"),
            "shards[0].tokens: expected an integer, found '7'",
        ),
        (lambda found: found.update(shards=None), "shards: expected a list, found None"),
        (
            lambda found: found["accounting"]["totals"]["skipped"].update(empty=1.5),
            "accounting.totals.skipped.empty: expected an integer, found 1.5",
        ),
        (
            lambda found: found["capture"].update(residual_layers=[2, 4, 6]),
            "capture.key: expected ",
        ),
        (lambda found: found["images"].update(plan=[1]), "images.plan[0]: expected a text"),
        (lambda found: found.update(capture=3), "capture: expected an object, found 3"),
        (lambda found: found.update(disk_free=True), "disk_free: expected an integer, found True"),
        (
            lambda found: found["checks"].update(recapture_fraction="0.5"),
            "checks.recapture_fraction: expected a number, found '0.5'",
        ),
    ],
)
def test_a_field_that_is_not_as_declared_is_named(
    plan: Path, alter: Callable[[dict[str, Any]], object], problem: str
) -> None:
    change(plan, alter)
    assert problem in refusal(Plan, plan)


def test_columns_of_other_lengths_are_refused(files: Files, tmp_path: Path) -> None:
    (verified := verify(files)).publish(path := tmp_path / "verified.json")
    change(path, lambda document: document["samples"]["tokens"].pop())
    assert ": samples: expected columns of one length, found {" in refusal(Verified, path)
    samples = verified.samples
    with pytest.raises(InvalidField, match="columns of one length"):
        dataclasses.replace(samples, checksum=samples.checksum[:-1])

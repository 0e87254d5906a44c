"""A verified shard is stored in its compact form: what is read back is what verification saw, the
captured file goes, and the manifest lists the form.
"""

import dataclasses
import os
import runpy
import signal
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import torch
import yaml
from test_manifest import SCHEMA, Run, verified_with

from draftstates.errors import UserError
from draftstates.paths import Capture
from draftstates.records import Stored
from draftstates.shards.compact import CompactShard
from draftstates.shards.compacting import top_token_of
from draftstates.shards.dataset import ShardDataset
from draftstates.shards.layout import Shard
from draftstates.shards.manifest import write_manifest

SCRIPT = Path(__file__).parents[3] / "scripts" / "store.py"
FORM = "e4m3-top-token"


ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Left:
    """Stands in for `os._exit`.

    Attributes:
        statuses: the statuses that it got.
    """

    def __init__(self) -> None:
        self.statuses: list[int] = []

    def __call__(self, status: int) -> None:
        self.statuses.append(status)


class StoredRun(Run):
    """Two verified shards of two sources, which the command stores."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.capture = Capture(self.run)
        self.plan.publish(folder / "plan.json")
        section = {
            "data": {"sources": [{"name": "a", "files": ["a.jsonl"]}], "max_tokens": 8},
            "model": {"path": str(folder / "model")},
            "capture": {},
            "storage": {"format": "e4m3"},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(section))

    def shard_id(self, source: str) -> str:
        return self.captured[source].shard_id

    def store(self, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
        shard_id = self.shard_id(source)
        arguments = {
            "config": self.results / "config.yaml",
            "plan": self.results / "plan.json",
            "shard-id": shard_id,
            "model": self.results / "model",
            "shard": self.capture.shard(shard_id),
            "verified": self.capture.verified(shard_id),
            "threads": 1,
            "output": self.capture.compact(shard_id, FORM),
            "record": self.capture.stored(shard_id, FORM),
        }
        given = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
        monkeypatch.setattr("sys.argv", ["store.py", *given])
        handlers = {number: signal.getsignal(number) for number in ENDING}
        monkeypatch.setattr(os, "_exit", left := Left())
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        assert left.statuses == [0]

    def list(self) -> dict:
        return write_manifest(
            self.plan,
            tokens=self.results / "tokens" / "shards",
            capture_folder=self.run,
            manifest=self.run / "manifest.json",
            samples=self.run / "samples.parquet",
            form=FORM,
        ).document()


@pytest.fixture
def run(tmp_path: Path) -> StoredRun:
    return StoredRun(tmp_path)


def test_the_captured_file_goes_and_the_manifest_lists_the_form(
    run: StoredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write()
    captured = {name: run.capture.shard(run.shard_id(name)) for name in "ab"}
    sizes = sum(path.stat().st_size for path in captured.values())
    whole = {path.stem: [Shard(path).states(i) for i in range(3)] for path in captured.values()}
    copies = {name: [(h.clone(), f.clone()) for h, f in each] for name, each in whole.items()}
    run.store("a", monkeypatch)
    assert not run.capture.manifest.exists(), "it listed the file that is gone"
    assert run.capture.stored_ids(FORM) == {run.shard_id("a")}
    run.store("b", monkeypatch)
    for name in "ab":
        shard_id = run.shard_id(name)
        assert not captured[name].exists() and not run.capture.recaptures(shard_id).exists()
        assert run.capture.receipts(shard_id).exists()
    found = run.list()
    jsonschema.validate(found, yaml.safe_load(SCHEMA.read_text()))
    assert [entry["path"] for entry in found["shards"]] == [
        f"compact/{FORM}/{run.shard_id(name)}.safetensors" for name in "ab"
    ]
    assert found["storage"] == {"fp8": "all", "keep_top_token": True, "supervised_rows": False}
    assert found["totals"]["bytes"] < 0.75 * sizes
    dataset = ShardDataset(run.run / "manifest.json", verify=True)
    top_token = top_token_of(run.results / "model", run.plan.capture)
    for i in range(3):
        hidden, final = copies[run.shard_id("a")][i]
        read = dataset[i]
        assert read["hidden_states"].dtype == hidden.dtype
        difference = (read["hidden_states"].float() - hidden.float()).abs()
        assert 0 < difference.max() <= hidden.float().abs().max() / 14
        assert torch.equal(top_token(read["final_hidden_state"]), top_token(final))


def test_no_signal_ends_the_command_once_the_captured_file_goes(
    run: StoredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink, shard = Path.unlink, run.capture.shard(run.shard_id("a"))

    def unlink_and_signal(path: Path, **options: bool) -> None:
        unlink(path, **options)
        if path == shard:
            for number in ENDING:
                os.kill(os.getpid(), number)

    monkeypatch.setattr(Path, "unlink", unlink_and_signal)
    run.store("a", monkeypatch)
    assert run.capture.stored_ids(FORM) == {run.shard_id("a")}


def test_a_captured_file_that_changed_is_neither_stored_nor_removed(
    run: StoredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = run.capture.shard(run.shard_id("a"))
    begin, _ = Shard(shard).header.states()["hidden_states"]
    shard.chmod(0o644)
    with open(shard, "r+b") as file:
        file.seek(begin + 5)
        file.write(b"\xff")
    with pytest.raises(SystemExit, match="does not have the checksum"):
        run.store("a", monkeypatch)
    assert shard.exists()
    assert not list(run.run.glob("compact/*/[!.]*")) and not list(run.run.glob("compact/*/.*"))


def test_a_shard_that_is_not_verified_is_not_stored(
    run: StoredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.capture.verified(run.shard_id("a")).unlink()
    with pytest.raises(SystemExit, match="expected the findings of verification"):
        run.store("a", monkeypatch)
    assert run.capture.shard(run.shard_id("a")).exists()


def test_a_form_that_reads_back_otherwise_does_not_replace_the_captured_file(
    run: StoredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = CompactShard.stored

    def damaged(shard: CompactShard, index: int) -> dict[str, torch.Tensor]:
        found = stored(shard, index)
        if index == 2:
            found["hidden_scales"][0, 0] *= 2
        return found

    monkeypatch.setattr(CompactShard, "stored", damaged)
    with pytest.raises(SystemExit, match="reads back as something else than was written"):
        run.store("a", monkeypatch)
    assert run.capture.shard(run.shard_id("a")).exists()
    assert not run.capture.stored_ids(FORM)


def test_a_tightened_limit_of_answers_refuses_a_form_whose_states_are_gone(
    run: StoredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified_with(run, 0.5, asked=0.5)
    for name in "ab":
        run.store(name, monkeypatch)
    assert len(run.list()["shards"]) == 2
    verified_with(run, 0.5, asked=0.4)
    with pytest.raises(UserError, match="expected 0.4; set it back; to capture the shard again"):
        run.list()


def _other_source(run: StoredRun, path: Path) -> None:
    found = Stored.read(path)
    dataclasses.replace(found, captured_checksum="0" * 32).publish(path)


def _other_byte(run: StoredRun, path: Path) -> None:
    path.write_text(path.read_text().replace('"bytes": ', '"bytes": 1'))


def _short_file(run: StoredRun, path: Path) -> None:
    file = path.with_suffix(".safetensors")
    file.write_bytes(file.read_bytes()[:-9])


def _other_bit(run: StoredRun, path: Path) -> None:
    file = path.with_suffix(".safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)


def _other_shard(run: StoredRun, path: Path) -> None:
    other = run.capture.compact(run.shard_id("b"), FORM)
    path.with_suffix(".safetensors").write_bytes(other.read_bytes())


def _gone(run: StoredRun, path: Path) -> None:
    path.with_suffix(".safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (_other_source, "expected captured_checksum"),
        (_other_byte, "changed since it was written"),
        (_short_file, "cannot be read"),
        (_other_bit, "changed since it was made: expected checksum"),
        (_other_shard, "changed since it was made"),
        (_gone, "cannot be read"),
    ],
)
def test_no_manifest_lists_a_form_that_is_not_the_recorded_one(
    run: StoredRun,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[StoredRun, Path], None],
    expected: str,
) -> None:
    for name in "ab":
        run.store(name, monkeypatch)
    path = run.capture.stored(run.shard_id("a"), FORM)
    damage(run, path)
    with pytest.raises(UserError, match=expected) as error:
        run.list()
    assert f"rm -f {path.with_suffix('')}" in str(error.value)
    assert not run.capture.manifest.exists()


def test_verification_of_the_captured_file_holds_for_the_record(
    run: StoredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that was verified again after it was stored is another file."""
    for name in "ab":
        run.store(name, monkeypatch)
    run.change_verified("b", lambda found: found.update(checksum="1" * 32))
    with pytest.raises(UserError, match=f"expected captured_checksum {'1' * 32}"):
        run.list()

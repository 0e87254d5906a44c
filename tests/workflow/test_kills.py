"""Promise 6: what is killed in the middle leaves nothing that counts, nothing that runs, and the next run completes.

The real server with the launcher `local`, started by real runs. The middle is where a shard has been published, and another one is
half captured.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jsonschema
import pytest
import yaml
from lease_harness import eventually
from terminal import CTRL_C, Terminal
from workspace import REPOSITORY, Run, Workspace, chat, make_workspace

from draftstates import wire
from draftstates.shards import Shard
from draftstates.verify import file_checksum, verify_shard

MIDDLE_SECONDS = 600  # a busy machine takes minutes to start a server
PARTS = ("scripts/extract.py", "draftstates.server.supervisor", "draftstates.server.keeper", "sglang")


@pytest.fixture
def workspace(tmp_path: Path, tiny_model: Path) -> Workspace:
    """Some twenty shards, each captured one sample at a time, so that they have a middle."""
    workspace = make_workspace(tmp_path / "work", tiny_model, standins=False)
    workspace.write_rows([chat(f"one-{i}") for i in range(320)], "one")
    workspace.write_rows([chat(f"two-{i}") for i in range(120)], "two")
    workspace.config["shards"] = {"min_bytes": "1MiB", "max_bytes": "3MiB"}
    workspace.config["extract"] = {"tokens_in_flight": 1}
    workspace.config["server"] = {"args": ["--max-total-tokens", "16384"], "queue_bytes": "64MiB"}
    return workspace


@contextlib.contextmanager
def running(workspace: Workspace) -> Iterator[Terminal]:
    terminal = Terminal(workspace)
    try:
        yield terminal
    finally:
        terminal.end()


def shards_folder(workspace: Workspace) -> Path:
    return workspace.results / workspace.plan()["run"] / "shards"


def published(workspace: Workspace) -> set[str]:
    """Shards that have their final names."""
    if not (workspace.results / "plan.json").exists():
        return set()
    return {shard.stem for shard in workspace.shards()}


def half_captured(workspace: Workspace) -> set[str]:
    """Shards of which some samples are captured, and not yet all."""
    samples = {shard["shard_id"]: shard["samples"] for shard in workspace.plan()["shards"]}
    found = set()
    for receipts in shards_folder(workspace).glob(f".building/*/shard.safetensors{wire.RECEIPTS_SUFFIX}"):
        name = receipts.parent.name.split("-")[0]
        with contextlib.suppress(FileNotFoundError):
            if 1 <= receipts.read_bytes().count(b"\n") <= samples[name] - 2:
                found.add(name)
    return found


def in_the_middle(workspace: Workspace, terminal: Terminal, *, after: set[str], of: Callable[[str], bool] = lambda shard: True) -> str:
    """Wait until the run has published a shard that is not among `after`; returns one that is then half captured."""
    deadline = time.monotonic() + MIDDLE_SECONDS
    while True:
        assert terminal.process.poll() is None, f"it ended before its middle:\n{terminal.seen}"
        assert time.monotonic() < deadline, f"it came to no middle:\n{terminal.seen}"
        if published(workspace) - after and (shards := {shard for shard in half_captured(workspace) if of(shard)}):
            return min(shards)
        time.sleep(0.005)


def check_no_orphan(terminal: Terminal) -> None:
    """Ten seconds after Snakemake's end nothing of its run is left."""
    deadline = time.monotonic() + 10
    while left := terminal.processes():
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.1)


def check_final_names(workspace: Workspace) -> None:
    """Every file under a final name is whole: the shards pass each check, and a probe that is there before its shard can be read."""
    plan, folder = workspace.plan(), shards_folder(workspace)
    model = workspace.folder / "models" / "tiny"
    for shard in workspace.shards():
        probe, receipts = shard.with_suffix(".probe.safetensors"), shard.with_suffix(".receipts.json")
        verify_shard(shard.stem, plan=plan, model=model, shard=shard, probe=probe, receipts=receipts, threads=1)
    for probe in folder.glob("*.probe.safetensors"):
        assert (Shard(probe).states("final_hidden_state", 0, Shard(probe).header.rows) != 0).any(dim=-1).all(), probe
    for receipts in folder.glob("*.receipts.json"):
        assert json.loads(receipts.read_text())["samples"], receipts


def check_manifest(workspace: Workspace) -> None:
    """The manifest keeps to its schema, accounts for every row, and lists every planned shard as it lies on the disk."""
    plan = workspace.plan()
    path = workspace.results / plan["run"] / "manifest.json"
    manifest = json.loads(path.read_text())
    jsonschema.validate(manifest, yaml.safe_load((REPOSITORY / "schemas" / "manifest.schema.yaml").read_text()))
    totals = manifest["totals"]
    rows = len(workspace.rows("one")) + len(workspace.rows("two"))
    assert totals["rows_in"] == totals["kept"] + sum(totals["skipped"].values()) + sum(totals["failed"].values()) == rows
    assert {shard["shard_id"] for shard in manifest["shards"]} == {shard["shard_id"] for shard in plan["shards"]}
    for shard in manifest["shards"]:
        assert file_checksum(path.parent / shard["path"]) == shard["checksum"], shard["path"]
    assert not list(shards_folder(workspace).glob(".building/*")), "what killed jobs were building is still there"


def press_ctrl_c(terminal: Terminal) -> None:
    terminal.press(CTRL_C)


def close_terminal(terminal: Terminal) -> None:
    terminal.close()


def kill_snakemake(terminal: Terminal) -> None:
    os.kill(terminal.process.pid, signal.SIGKILL)


@pytest.mark.timeout(2400)
def test_a_run_ended_in_the_middle_leaves_nothing_bad_and_nothing_running_and_the_rerun_completes(workspace: Workspace) -> None:
    """Ended in three ways, one after the other, each time in the middle of what the last one has left to do."""
    for end in (press_ctrl_c, close_terminal, kill_snakemake):
        before = published(workspace)
        with running(workspace) as terminal:
            in_the_middle(workspace, terminal, after=before)
            assert all(terminal.find(word) for word in PARTS), terminal.processes()
            end(terminal)
            terminal.process.wait(timeout=30)
            check_no_orphan(terminal)
        assert published(workspace) > before, end.__name__
        assert published(workspace) < {shard["shard_id"] for shard in workspace.plan()["shards"]}, f"{end.__name__}: came too late"
        check_final_names(workspace)
        if end is not press_ctrl_c:  # who is killed cannot give Snakemake's own lock back
            assert "LockException" in workspace.snakemake().stdout, end.__name__
            workspace.run("--unlock")
    kept = published(workspace)
    last = workspace.run()
    assert last.extracted == len(workspace.plan()["shards"]) - len(kept), "what was published before is captured again"
    check_manifest(workspace)
    assert workspace.run().nothing_to_be_done


@pytest.mark.timeout(1200)
def test_a_job_and_the_server_killed_in_the_middle_cost_an_attempt_each_and_the_run_completes(workspace: Workspace) -> None:
    with running(workspace) as terminal:
        shard = in_the_middle(workspace, terminal, after=set())
        (job,) = terminal.find("scripts/extract.py", f"--shard-id {shard}")
        os.kill(job, signal.SIGKILL)
        check_final_names(workspace)
        eventually(lambda: shard in published(workspace), within=MIDDLE_SECONDS, what=f"{shard} is captured at its second attempt")
        in_the_middle(workspace, terminal, after=published(workspace))
        (server,) = [pid for pid in terminal.find("sglang.launch_server") if pid not in terminal.find("draftstates.server.keeper")]
        os.kill(server, signal.SIGKILL)
        check_final_names(workspace)
        assert terminal.process.wait(timeout=MIDDLE_SECONDS) == 0, terminal.seen
        check_no_orphan(terminal)
    starts = (workspace.results / ".server" / "server.log").read_text().count("--- 20")
    assert starts == 2, "the server was started again, once"
    run = Run(terminal.seen)
    again = terminal.seen.count("Trying to restart job")
    assert again >= 2, "the killed job, and whoever used the killed server"
    assert run.extracted == len(workspace.plan()["shards"]) + again
    assert "the server was ended by SIGKILL" in terminal.seen
    check_manifest(workspace)
    assert workspace.run().nothing_to_be_done

"""Promise 7: a killed process leaves nothing that counts and nothing that runs.

The next run completes. Real runs start the real server with the launcher `local`. In the middle of
a run, one shard has been published and another one is half captured.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
import yaml
from lease_harness import eventually
from terminal import CTRL_C, Terminal
from workflow_copy import REPOSITORY
from workspace import Run, Workspace, chat, make_workspace

from draftstates.extract import protocol
from draftstates.files import file_checksum
from draftstates.records import Plan
from draftstates.shards.layout import Shard
from draftstates.verify.verify import verify_shard

# A busy machine takes minutes to start a server.
MIDDLE_SECONDS = 1200
PARTS = (
    "scripts/extract.py",
    "draftstates.server.supervisor",
    "draftstates.server.keeper",
    "sglang",
)


@pytest.fixture
def workspace(tmp_path: Path, tiny_model: Path) -> Workspace:
    """Make a workspace of some sixteen shards, two of which are captured at once.

    Each shard is captured one sample at a time, so that it has a middle, and enough shards are left
    after each kill.
    """
    workspace = make_workspace(tmp_path / "work", tiny_model, standins=False)
    workspace.stand_in("report_page")
    workspace.write_rows([chat(f"one-{i}") for i in range(280)], "one")
    workspace.write_rows([chat(f"two-{i}") for i in range(100)], "two")
    workspace.config["shards"] = {"min_bytes": "1MiB", "max_bytes": "3MiB"}
    workspace.config["extract"] = {"tokens_in_flight": 1}
    workspace.edit("profiles/default/profile.yaml", "streams=4", "streams=2")
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
    return workspace.results / workspace.plan()["capture_folder"] / "shards"


def published(workspace: Workspace) -> set[str]:
    """Return the shards that have their final names."""
    if not (workspace.results / "plan.json").exists():
        return set()
    return {shard.stem for shard in workspace.shards()}


def half_captured(workspace: Workspace) -> set[str]:
    """Return the shards of which some samples are captured, but not all."""
    samples = {shard["shard_id"]: shard["samples"] for shard in workspace.plan()["shards"]}
    found = set()
    for receipts in shards_folder(workspace).glob(
        f".building/*/shard.safetensors{protocol.GROWING_RECEIPTS_SUFFIX}"
    ):
        name = receipts.parent.name.split("-")[0]
        with contextlib.suppress(FileNotFoundError):
            if 1 <= receipts.read_bytes().count(b"\n") <= samples[name] - 2:
                found.add(name)
    return found


def in_the_middle(
    workspace: Workspace,
    terminal: Terminal,
    *,
    after: set[str],
) -> str:
    """Wait until the run has published a shard that is not among `after`.

    Return a shard that is then half captured.
    """
    deadline = time.monotonic() + MIDDLE_SECONDS
    while True:
        assert terminal.process.poll() is None, f"it ended before its middle:\n{terminal.seen}"
        assert time.monotonic() < deadline, f"it came to no middle:\n{terminal.seen}"
        if published(workspace) - after and (shards := half_captured(workspace)):
            return min(shards)
        time.sleep(0.005)


def check_no_orphan(terminal: Terminal) -> None:
    """Check that no process of the run is left ten seconds after Snakemake's end."""
    deadline = time.monotonic() + 10
    while left := terminal.processes():
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.1)


def check_final_names(workspace: Workspace) -> None:
    """Check that every file under a final name is whole.

    The shards pass each check, and prefix recaptures that are published before their shard can be
    read.
    """
    plan, folder = Plan.read(workspace.results / "plan.json"), shards_folder(workspace)
    model = workspace.folder / "models" / "tiny"
    for shard in workspace.shards():
        recaptures, receipts = (
            shard.with_suffix(".recaptures.safetensors"),
            shard.with_suffix(".receipts.json"),
        )
        verify_shard(
            plan.shard(shard.stem),
            spec=plan.capture,
            checks=plan.checks,
            model=model,
            shard=shard,
            recaptures=recaptures,
            receipts=receipts,
            threads=1,
        )
    for recaptures in folder.glob("*.recaptures.safetensors"):
        assert (
            (
                Shard(recaptures).state_rows("final_hidden_state", 0, Shard(recaptures).header.rows)
                != 0
            )
            .any(dim=-1)
            .all()
        ), recaptures
    for receipts in folder.glob("*.receipts.json"):
        assert json.loads(receipts.read_text())["samples"], receipts


def check_manifest(workspace: Workspace) -> None:
    """Check that the manifest keeps to its schema, accounts for every row, and lists every shard.

    Each planned shard is listed as it lies on the disk.
    """
    plan = workspace.plan()
    path = workspace.results / plan["capture_folder"] / "manifest.json"
    manifest = json.loads(path.read_text())
    jsonschema.validate(
        manifest, yaml.safe_load((REPOSITORY / "schemas" / "manifest.schema.yaml").read_text())
    )
    totals = manifest["totals"]
    rows = len(workspace.rows("one")) + len(workspace.rows("two"))
    assert (
        totals["rows_in"]
        == totals["kept"] + sum(totals["skipped"].values()) + sum(totals["failed"].values())
        == rows
    )
    assert {shard["shard_id"] for shard in manifest["shards"]} == {
        shard["shard_id"] for shard in plan["shards"]
    }
    for shard in manifest["shards"]:
        assert file_checksum(path.parent / shard["path"]) == shard["checksum"], shard["path"]
    assert not (shards_folder(workspace) / ".building").exists(), (
        "what killed jobs were building is still there"
    )


def press_ctrl_c(terminal: Terminal) -> None:
    terminal.press(CTRL_C)


def close_terminal(terminal: Terminal) -> None:
    terminal.close()


def kill_snakemake(terminal: Terminal) -> None:
    os.kill(terminal.process.pid, signal.SIGKILL)


@pytest.mark.timeout(3600)
def test_what_is_killed_leaves_nothing_bad_and_nothing_running_and_the_last_run_completes(
    workspace: Workspace,
) -> None:
    """Three runs are ended in three ways, each in the middle of the work that the run before left.

    In the fourth a job is killed, and then the server.
    """
    for end in (press_ctrl_c, close_terminal, kill_snakemake):
        before = published(workspace)
        with running(workspace) as terminal:
            in_the_middle(workspace, terminal, after=before)
            assert all(terminal.find(word) for word in PARTS), terminal.processes()
            end(terminal)
            terminal.process.wait(timeout=30)
            check_no_orphan(terminal)
        assert published(workspace) > before, end.__name__
        assert len(left(workspace)) >= 4, f"{end.__name__}: came too late"
        check_final_names(workspace)
        # A killed Snakemake cannot release its own lock.
        if end is not press_ctrl_c:
            assert "LockException" in workspace.snakemake().stdout, end.__name__
            workspace.run("--unlock")
    kept, missing, starts = published(workspace), left(workspace), server_starts(workspace)
    with running(workspace) as terminal:
        kill_job_and_server(workspace, terminal, after=kept)
        assert terminal.process.wait(timeout=MIDDLE_SECONDS) == 0, terminal.seen
        check_no_orphan(terminal)
    assert server_starts(workspace) - starts == 2, "the server was started again, once"
    tried_again = terminal.seen.count("Trying to restart job")
    assert tried_again >= 2, "the killed job, and whoever used the killed server"
    assert Run(terminal.seen).extracted == len(missing) + tried_again, (
        "what was published before is captured again"
    )
    assert "the server was ended by SIGKILL" in terminal.seen
    check_manifest(workspace)
    assert workspace.run().nothing_to_be_done


def left(workspace: Workspace) -> set[str]:
    """Return the planned shards that are not published."""
    return {shard["shard_id"] for shard in workspace.plan()["shards"]} - published(workspace)


def server_starts(workspace: Workspace) -> int:
    return (workspace.results / ".server" / "server.log").read_text().count("--- 20")


def kill_job_and_server(workspace: Workspace, terminal: Terminal, *, after: set[str]) -> None:
    """Kill a job in the middle of its shard, then the server in the middle of another shard.

    The server is killed when the job's second attempt has published its shard.
    """
    shard = in_the_middle(workspace, terminal, after=after)
    (job,) = terminal.find("scripts/extract.py", f"--shard-id {shard}")
    os.kill(job, signal.SIGKILL)
    check_final_names(workspace)
    eventually(
        lambda: shard in published(workspace),
        within=MIDDLE_SECONDS,
        what=f"{shard} is captured at its second attempt",
    )
    in_the_middle(workspace, terminal, after=published(workspace))
    keepers = terminal.find("draftstates.server.keeper")
    (server,) = [pid for pid in terminal.find("sglang.launch_server") if pid not in keepers]
    os.kill(server, signal.SIGKILL)
    check_final_names(workspace)

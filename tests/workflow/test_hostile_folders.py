"""A results folder that is read-only, full, slow, shared or gone, and a clock that jumps: the run
says so, and leaves nothing half done.
"""

import concurrent.futures
import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from finished import QuickWorkspace, quick_workspace
from lease_harness import eventually
from workspace import Workspace

from draftstates.tokens.files import read_index

SMALL = "size=96k"
# what a job does once, before or after its own work
DEED = """
import os, runpy, signal, subprocess, sys, time
from pathlib import Path

def once(when, deed):
    mark = Path(f"done-{when}")
    if not mark.exists():
        mark.write_text(str(os.getpid()))
        exec(deed)

once("before", BEFORE)
try:
    runpy.run_path("SCRIPT", run_name="__main__")
finally:
    once("after", AFTER)
"""


@pytest.fixture(scope="module")
def unspoilt(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, preloaded_libraries: None
) -> QuickWorkspace:
    return quick_workspace(tmp_path_factory.mktemp("hostile") / "work", tiny_model)


@pytest.fixture
def workspace(unspoilt: QuickWorkspace, tmp_path: Path) -> QuickWorkspace:
    """Copy the workspace; no run has happened in it."""
    return unspoilt.copy_to(tmp_path / "work", "preloaded-scripts")


def have(workspace: Workspace, rule: str, *, before: str = "", after: str = "") -> None:
    """Have the first job of a rule do something before or after its own work."""
    script = workspace.folder / f"preloaded-scripts/{rule}.py"
    kept = script.with_suffix(".kept.py")
    script.rename(kept)
    text = DEED.replace("SCRIPT", str(kept)).replace("BEFORE", repr(before))
    script.write_text(text.replace("AFTER", repr(after)))


@contextlib.contextmanager
def mounted(folder: Path, *options: str, vanishes: bool = False) -> Iterator[None]:
    """Have a small disk of its own at the folder; a user who may not mount skips the test.

    Args:
        vanishes: whether the block unmounts it.
    """
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        folder.rmdir()
        pytest.skip("needs the right to mount")
    try:
        yield
    finally:
        if not vanishes:
            subprocess.run(["umount", str(folder)], check=True)
        shutil.rmtree(folder)


def test_a_results_folder_that_cannot_be_written_is_named_before_a_job_starts(
    workspace: Workspace,
) -> None:
    with mounted(workspace.results, "ro"):
        refused = workspace.snakemake()
    assert refused.returncode == 1
    assert "this user may write to" in refused.stdout
    assert "Traceback" not in refused.stdout
    assert "rule tokenise" not in refused.stdout


@pytest.mark.parametrize("options", ["nr_inodes=2", SMALL])
def test_a_disk_that_is_full_is_named_and_leaves_nothing_under_a_final_name(
    workspace: Workspace, options: str
) -> None:
    with mounted(workspace.results, options):
        if options == SMALL:
            (workspace.results / "filler").write_bytes(bytes(60 << 10))
        failed = workspace.snakemake()
        assert failed.returncode == 1
        assert "Traceback" not in failed.stdout, failed.stdout
        assert "No space left on device" in failed.stdout or "the disk is full" in failed.stdout
        # a source that was done before the disk was full is whole
        for tokens in workspace.results.glob("tokens/*.parquet"):
            assert len(read_index(tokens).names)


@pytest.mark.parametrize("rule", ["plan", "manifest"])
def test_a_results_folder_that_is_renamed_during_a_run_fails_it_and_the_next_run_is_whole(
    workspace: QuickWorkspace, rule: str
) -> None:
    have(workspace, rule, before="os.rename('results', 'gone')")
    failed = workspace.snakemake()
    assert failed.returncode != 0
    assert "Traceback" not in failed.stdout
    shutil.rmtree(workspace.results, ignore_errors=True)
    (workspace.folder / "gone").rename(workspace.results)
    assert not list(workspace.results.glob("*/manifest.json"))
    workspace.run()
    assert workspace.run().nothing_to_be_done


def test_a_results_folder_that_is_unmounted_during_a_run_fails_it_and_the_next_run_is_whole(
    workspace: QuickWorkspace,
) -> None:
    have(workspace, "manifest", before="subprocess.run(['umount', '-l', 'results'])")
    with mounted(workspace.results, "size=64m", vanishes=True):
        failed = workspace.snakemake()
        assert failed.returncode != 0
        assert "Traceback" not in failed.stdout
        assert not list(workspace.results.glob("*/manifest.json"))
    workspace.run()
    assert workspace.run().nothing_to_be_done


def test_a_run_waits_for_a_slow_writer_and_keeps_others_out_of_its_results(
    workspace: QuickWorkspace, tmp_path: Path
) -> None:
    """The writer is stopped, as by a mount that does not answer."""
    have(workspace, "manifest", before="os.kill(os.getpid(), signal.SIGSTOP)")
    other = workspace.copy_to(tmp_path / "other", "preloaded-scripts")
    other.config = {**other.config, "results": str(workspace.results)}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        run = pool.submit(workspace.snakemake)
        pid = workspace.folder / "done-before"
        eventually(lambda: pid.exists() and pid.read_text(), within=60, what="it is stopped")
        refused = other.snakemake()
        assert not run.done()
        os.kill(int(pid.read_text()), signal.SIGCONT)
        assert run.result().returncode == 0, run.result().stdout
    assert "another run works there" in refused.stdout
    assert "Traceback" not in refused.stdout
    assert workspace.run().nothing_to_be_done


def test_a_writer_that_is_killed_while_it_is_slow_leaves_nothing_that_counts(
    workspace: QuickWorkspace,
) -> None:
    have(workspace, "manifest", before="os.kill(os.getpid(), signal.SIGSTOP)")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        run = pool.submit(workspace.snakemake)
        pid = workspace.folder / "done-before"
        eventually(lambda: pid.exists() and pid.read_text(), within=60, what="it is stopped")
        os.kill(int(pid.read_text()), signal.SIGKILL)
        assert run.result().returncode != 0
    assert not list(workspace.results.glob("*/manifest.json"))
    assert workspace.run().jobs("manifest") == 1


def test_a_clock_that_was_ahead_is_named_with_the_remedy_and_captures_nothing_again(
    workspace: QuickWorkspace,
) -> None:
    """Snakemake itself sets the time of what a job makes: the clock of a job's node may jump."""
    have(workspace, "plan", after="os.utime('results/plan.json', (time.time() + 86400,) * 2)")
    workspace.run()
    assert workspace.run().nothing_to_be_done
    # the clock of the machine that Snakemake ran on was ahead
    for path in workspace.results.rglob("*"):
        os.utime(path, (path.stat().st_mtime + 86400,) * 2)
    refused = workspace.snakemake()
    assert refused.returncode != 0
    assert "Traceback" not in refused.stdout
    found = re.search(
        r"expected a modification time that is not in the future.* more files too\); run: (.*)$",
        refused.stdout,
        re.MULTILINE,
    )
    assert found, refused.stdout
    workspace.shell(found[1])
    assert workspace.run().extracted == 0
    assert workspace.run().nothing_to_be_done

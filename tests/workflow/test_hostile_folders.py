"""A results folder that is read-only or full: the run says so, and leaves nothing half done."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from workspace import Workspace, make_workspace

from draftstates.tokens.files import read_index

SMALL = "size=96k"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Workspace:
    return make_workspace(tmp_path_factory.mktemp("hostile") / "work", tiny_model, standins=True)


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """Have a small disk of its own at the folder; a user who may not mount skips the test."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        folder.rmdir()
        pytest.skip("needs the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


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

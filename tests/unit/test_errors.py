"""A command that is told to end clears up behind itself."""

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from draftstates import errors

BUILDS = """
import sys, time
from pathlib import Path
from draftstates.extract.staging import building_folder
from draftstates.errors import run_command

def main():
    with building_folder(Path(sys.argv[1]) / ".building", "abc") as folder:
        (folder / "shard.safetensors").write_bytes(b"x")
        print("building", flush=True)
        time.sleep(60)

run_command(main)
"""
FORKS = """
import os, signal, time
from draftstates.errors import run_command

def main():
    child = os.fork()
    if not child:
        try:
            time.sleep(60)
        finally:
            print("the child cleared up what is its parent's", flush=True)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    print(os.waitpid(child, 0)[1], flush=True)

run_command(main)
"""
COMPLETES = """
import atexit, sys, time
from draftstates.errors import result_is_complete, run_command

def wait(word):
    print(word, flush=True)
    time.sleep(float(sys.argv[1]))

def main():
    result_is_complete()
    wait("complete")

atexit.register(wait, "ending")
run_command(main)
"""


def test_a_job_that_is_cancelled_leaves_nothing_of_its_shard(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BUILDS, str(tmp_path)], stdout=subprocess.PIPE
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == b"building\n"
        assert len(list((tmp_path / ".building").iterdir())) == 1
        job.terminate()
        assert job.wait(timeout=30) == 128 + signal.SIGTERM
    assert not (tmp_path / ".building").exists()


def test_term_makes_no_failure_of_a_job_whose_result_is_complete() -> None:
    """Snakemake removes the output of a job that fails, such as a shard of many minutes."""
    with subprocess.Popen(
        [sys.executable, "-c", COMPLETES, "0.3"], stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        for word in ("complete", "ending"):
            assert job.stdout.readline() == f"{word}\n"
            job.terminate()
        assert job.wait(timeout=30) == 0


def test_a_forked_worker_that_is_ended_ends_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS], stdout=subprocess.PIPE, text=True, timeout=30
    )
    assert (done.returncode, done.stdout) == (0, f"{signal.SIGTERM:d}\n")


def test_what_term_did_before_it_does_after() -> None:
    """A script may be run inside another process, as tests do."""
    before, during = signal.getsignal(signal.SIGTERM), []
    errors.run_command(lambda: during.append(signal.getsignal(signal.SIGTERM)))
    assert during != [before]
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("file", ["results/x.parquet", None])
def test_a_disk_without_room_is_said_in_one_line(file: str | None) -> None:
    """A write that finds no room does not say of which file; an open does."""

    def main() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", *([file] if file else []))

    with pytest.raises(
        SystemExit,
        match=(
            f"error: {file or 'the folder that this step writes to'}: No space left on device;"
            " make room and run"
            " again"
        ),
    ):
        errors.run_command(main)


def test_a_command_that_removes_files_quotes_their_names() -> None:
    """A path with a space is one file."""
    found = errors.make_again("to write it again", Path("my results/a.json"), Path("b.json"))
    assert found == ("to write it again: rm -f 'my results/a.json' b.json && snakemake --cores all")

"""The drafter example by a dry run: its one command's jobs, and the one difference it compares."""

import re
import subprocess
import sys

import pytest
from workflow_copy import REPOSITORY, WORKFLOW


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the jobs of the example's command, in a folder where nothing is done yet."""
    folder = tmp_path_factory.mktemp("example")
    for name in (*WORKFLOW, "examples", "tests"):
        (folder / name).symlink_to(REPOSITORY / name)
    files = (
        "--snakefile",
        "examples/train_drafter/Snakefile",
        "--configfile",
        "examples/train_drafter/config.yaml",
    )
    command = [
        sys.executable,
        "-m",
        "snakemake",
        *files,
        "--cores",
        "2",
        "--dry-run",
        "--printshellcmds",
    ]
    done = subprocess.run(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_one_command_answers_captures_trains_and_draws(dry_run: str) -> None:
    jobs = dict(re.findall(r"^(\w+) +(\d+)$", dry_run, flags=re.MULTILINE))
    wanted = {
        "questions": 1,
        "prompts": 1,
        "plan": 1,
        "drafter_export": 2,
        "faulty_export": 1,
        "train_drafter": 9,
        "agreement": 9,
        "plot": 1,
    }
    assert {name: int(jobs[name]) for name in wanted} == wanted


def test_whole_and_faulty_trainings_differ_in_their_states_alone(dry_run: str) -> None:
    commands = {
        kind: re.search(
            rf"^ *exec env .*? train .*?drafters/{kind}-1 .*?$",
            dry_run,
            flags=re.MULTILINE | re.DOTALL,
        )
        for kind in ("whole", "faulty")
    }
    whole, faulty = (
        command[0].rpartition("exec env")[2] for command in commands.values() if command
    )
    assert "--seed 1" in whole and "--save-path" in whole and whole != faulty
    assert (
        faulty.replace("speculators/faulty", "speculators/train").replace("faulty", "whole")
        == whole
    )


def test_all_are_judged_on_the_whole_held_out_export(dry_run: str) -> None:
    judged = re.findall(r"evaluate\.py.*?--data (\S+)", dry_run, flags=re.DOTALL)
    assert len(judged) == 9 and set(judged) == {"results/drafter/speculators/validation"}

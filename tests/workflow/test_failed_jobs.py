"""Failed and killed jobs: the next run makes them, whatever their rule is.

A run that failed ends with the reason. The commands from the server on are stand-ins, as in
`test_graph.py`.
"""

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from workflow_copy import REPOSITORY
from workspace import Workspace, chat, make_workspace, tiny_config

FAILS = 'raise SystemExit("error: a planted failure")\n'
IS_KILLED = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
# Rules whose jobs do not wait for each other fail in the same run.
TOGETHER = [
    *(
        ("demo_model",),
        ("hub_data",),
        ("tokenise",),
        ("plan",),
        ("server",),
        ("extract",),
        ("verify",),
    ),
    *(("parity",), ("manifest",), ("export", "vocabulary"), ("report_page",)),
]
SCRIPTS = {"demo_model": "prepare_demo_model", "parity": "check_parity"}
# These rules only name the outputs of other rules.
# The last one is `cp` of a file, and Snakemake asks for its output as data.
# `tokens_page` is made on request alone: a run that asks for it again makes it.
WITHOUT_JOBS = {"all", "tokens_report", "demo_data", "tokens_page", "answers"}
# `test_answering_runs.py` and `test_graph.py` kill the jobs of these.
ELSEWHERE = {"prompts", "answer", "compact"}
# These scripts load libraries for seconds. After the first run, `REPLAY` takes their place.
SLOW = ("tokenise", "plan", "vocabulary")
REPLAY = """
import os, shutil, sys
from pathlib import Path

for argument in sys.argv[1:]:
    kept = Path("kept", os.path.relpath(argument))
    stem = kept.name.split(".")[0]
    for file in kept.rglob("*") if kept.is_dir() else kept.parent.glob(f"{stem}.*"):
        made = file.relative_to("kept")
        if file.is_file() and not made.exists():
            made.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, made)
"""
# Rows in place of the record of a data set, which would need the hub.
HUB_DATA = f"""
import sys
from pathlib import Path

Path(sys.argv[sys.argv.index("--output") + 1]).write_text({json.dumps([chat("three")])!r})
"""
EXPORT = """
import sys
from pathlib import Path

Path(sys.argv[sys.argv.index("--output") + 1], "export.json").write_text("")
"""


def config() -> dict:
    found = {**tiny_config(), "exports": {"specforge": {}}, "draft_vocab_size": 64}
    found["data"]["sources"].append({"name": "three", "hub": {"id": "org/three"}})
    return {**found, "model": {"path": "models/tiny", "prepare": "smollm2"}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Workspace:
    """Make a workspace whose first run is over and had a job of every rule. Tests use copies."""
    workspace = make_workspace(
        tmp_path_factory.mktemp("finished") / "work", tiny_model, standins=True
    )
    scripts, kept = workspace.folder / "scripts", workspace.folder / "kept"
    (scripts / "export.py").write_text(EXPORT)
    (scripts / "hub_data.py").write_text(HUB_DATA)
    (scripts / "prepare_demo_model.py").write_text(REPLAY)
    shutil.copytree(workspace.folder / "models", kept / "models")
    (workspace.folder / "models/tiny/config.json").unlink()
    workspace.config = config()
    first = workspace.run()
    assert [rule for group in TOGETHER for rule in group if not first.jobs(rule)] == []
    shutil.copytree(workspace.results, kept / "results")
    for name in SLOW:
        (scripts / f"{name}.py").write_text(REPLAY)
    assert workspace.run().nothing_to_be_done
    return workspace


@pytest.fixture
def workspace(finished: Workspace, tmp_path: Path) -> Workspace:
    shutil.copytree(finished.folder, tmp_path / "copy", copy_function=shutil.copy2)
    return Workspace(tmp_path / "copy", config())


def make_stale(workspace: Workspace, rule: str) -> tuple[str, ...]:
    """Make one job of the rule necessary, with all earlier results of its output in place.

    Return Snakemake's arguments.
    """
    shard = workspace.shards()[0]
    if rule == "verify":
        verified = shard.parents[1] / "verified" / f"{shard.stem}.json"
        return ("--forcerun", str(verified.relative_to(workspace.folder)))
    if rule == "parity":
        # The rule makes no result that is there already.
        for name in ("parity.json", "parity.html"):
            (shard.parents[1] / name).unlink()
        return ()
    if rule in ("extract", "server"):
        shard.unlink()
        (shard.parents[1] / "server.json").unlink(missing_ok=rule == "extract")
        return ()
    return ("--forcerun", rule)


@pytest.mark.parametrize("rules", TOGETHER, ids="-".join)
def test_a_job_that_failed_or_was_killed_is_made_by_the_next_run(
    workspace: Workspace, rules: tuple[str, ...]
) -> None:
    scripts = [workspace.folder / f"scripts/{SCRIPTS.get(rule, rule)}.py" for rule in rules]
    whole = [script.read_bytes() for script in scripts]
    flags = [flag for rule in rules for flag in make_stale(workspace, rule)]
    flags = sorted(set(flags), key=flags.index)

    for script in scripts:
        script.write_text(FAILS)
    failed = workspace.snakemake(*flags)
    assert failed.returncode != 0
    assert [last_error(failed.stdout, rule) for rule in rules] == ["a planted failure"] * len(rules)

    for script in scripts:
        script.write_text(IS_KILLED)
    killed = workspace.snakemake()
    assert killed.returncode != 0, f"the failed jobs are forgotten:\n{killed.stdout}"
    reason = "killed by signal 9 (SIGKILL), perhaps out of memory"
    assert [last_error(killed.stdout, rule) for rule in rules] == [reason] * len(rules)

    for script, text in zip(scripts, whole, strict=True):
        script.write_bytes(text)
    made = workspace.run()
    assert [rule for rule in rules if not made.jobs(rule)] == [], "killed jobs are forgotten"


def last_error(output: str, rule: str) -> str | None:
    """Return the error of a rule in the output after the run's last job."""
    end = output[output.rindex(" failed:\n") :]
    found = re.search(rf"^rule {rule} \(.*\):\nerror: (.*)$", end, flags=re.MULTILINE)
    return found and found[1]


def test_every_rule_is_among_those_that_fail_here() -> None:
    text = "".join(path.read_text() for path in REPOSITORY.glob("rules/*.smk"))
    text += (REPOSITORY / "Snakefile").read_text()
    rules = set(re.findall(r"^ *(?:rule|checkpoint) (\w+):", text, flags=re.MULTILINE))
    assert rules - WITHOUT_JOBS - ELSEWHERE == {rule for group in TOGETHER for rule in group}


def test_errors_of_several_rules_are_repeated_in_the_order_of_the_data(
    workspace: Workspace,
) -> None:
    """The error of the vocabulary comes last, although its job fails first."""
    for name in ("server", "vocabulary"):
        (workspace.folder / f"scripts/{name}.py").write_text(FAILS)
    make_stale(workspace, "server")
    failed = workspace.snakemake("--forcerun", "vocabulary")
    assert failed.returncode != 0
    end = failed.stdout[failed.stdout.rindex("2 jobs failed:\n") :]
    assert re.findall(r"^rule (\w+) \(", end, flags=re.MULTILINE) == ["server", "vocabulary"]


def test_a_job_whose_second_attempt_succeeds_is_not_among_the_failed(workspace: Workspace) -> None:
    script = workspace.folder / "scripts/server.py"
    once = f"""
from pathlib import Path

if not Path("tried").exists():
    Path("tried").touch()
    raise SystemExit("error: a passing failure")
{script.read_text()}"""
    script.write_text(once)
    make_stale(workspace, "server")
    (workspace.folder / "scripts/vocabulary.py").write_text(FAILS)
    failed = workspace.snakemake("--forcerun", "vocabulary")
    assert failed.returncode != 0
    assert "error: a passing failure" in failed.stdout
    assert "a passing failure" not in failed.stdout[failed.stdout.rindex("1 job failed:\n") :]


@pytest.mark.parametrize(
    ("rule", "target"), [("plan", "tokens_report"), ("tokenise", "results/plan.json")]
)
def test_a_part_of_the_workflow_is_no_success_once_a_job_before_it_has_failed(
    workspace: Workspace, rule: str, target: str
) -> None:
    """What was made of the failed job's earlier output is newer than all that is left."""
    del workspace.config["draft_vocab_size"]
    script = workspace.folder / f"scripts/{rule}.py"
    whole = script.read_bytes()
    workspace.run(target)
    script.write_text(FAILS)
    assert workspace.snakemake(target, "--forcerun", rule).returncode != 0
    assert workspace.snakemake(target).returncode != 0
    script.write_bytes(whole)
    made = workspace.run(target)
    assert made.jobs(rule) >= made.jobs("plan") == 1
    # the plan's record may still say that its tokens were gone, which is one plan more
    workspace.run(target)
    assert workspace.run(target).nothing_to_be_done


def test_files_dated_in_the_future_are_named_with_the_remedy_also_in_a_dry_run(
    workspace: Workspace,
) -> None:
    ahead = [workspace.folder / "one.jsonl", workspace.shards()[0]]
    for path in ahead:
        os.utime(path, (time.time() + 86400,) * 2)
    refused = workspace.snakemake("--dry-run")
    assert refused.returncode != 0
    assert "Traceback" not in refused.stdout
    found = re.search(r"^one.jsonl: expected .*; run: (touch .*)$", refused.stdout, re.MULTILINE)
    assert found, refused.stdout
    subprocess.run(found[1], shell=True, check=True, cwd=workspace.folder)
    made = workspace.run()
    assert (made.jobs("tokenise"), made.extracted) == (1, 0)


# Source `one` has bad data; the job of source `two` is killed.
LASTS_OR_IS_KILLED = """
import os, signal, sys
from draftstates.errors import UserError, run_command

def main():
    if "two" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    raise UserError("one.jsonl: row 3: planted")

run_command(main, lasting=True)
"""


def test_a_step_whose_error_would_come_back_is_not_tried_again_and_a_killed_one_is(
    tmp_path: Path, tiny_model: Path
) -> None:
    workspace = make_workspace(tmp_path / "work", tiny_model, standins=True)
    (workspace.folder / "scripts/tokenise.py").write_text(LASTS_OR_IS_KILLED)
    said = workspace.snakemake("--retries", "2", "--keep-going", "results/plan.json").stdout
    tried = re.findall(
        r"^(?:local)?rule tokenise:\n(?:    .*\n)*?    wildcards: source=(\w+)", said, re.M
    )
    assert sorted(tried) == ["one", "two", "two", "two"], said
    assert "row 3: planted" in said

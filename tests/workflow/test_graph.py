"""Snakemake's part of the graph: triggers, settings, dry runs, wrong keys, style of the rules.

All commands but those of plan and exports are stand-ins, so that a run takes seconds;
`test_incremental.py` has the real ones.
"""

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest
from changes import (
    NO_CHANGES,
    edit_row,
    exclude_sample,
    remove_attestation,
    replace_weights,
)
from workflow_copy import REPOSITORY
from workspace import Workspace, chat, make_workspace, tiny_config

WITHOUT_PROFILE = ("--workflow-profile", "none")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Workspace:
    """Make a workspace whose first run is over, with stand-ins. Tests use copies."""
    workspace = make_workspace(
        tmp_path_factory.mktemp("finished") / "work", tiny_model, standins=True
    )
    first = workspace.run()
    assert first.extracted == len(workspace.shards()) == len(workspace.plan()["shards"]) >= 6
    return workspace


@pytest.fixture
def workspace(finished: Workspace, tmp_path: Path) -> Workspace:
    """Copy the finished workspace to another path, with all times unchanged."""
    folder = tmp_path / "copy"
    shutil.copytree(finished.folder, folder, copy_function=shutil.copy2)
    return Workspace(folder, tiny_config())


def test_a_sample_excluded_is_at_most_two_captures(workspace: Workspace) -> None:
    exclude_sample(workspace)
    assert 1 <= workspace.run().extracted <= 2
    assert workspace.run(*WITHOUT_PROFILE).nothing_to_be_done


@pytest.mark.parametrize(
    "flags",
    [(*WITHOUT_PROFILE, "--forcerun", "server", "extract"), ("--rerun-triggers", "mtime")],
    ids="-".join,
)
def test_no_setting_of_snakemake_brings_a_capture_back(
    workspace: Workspace, flags: tuple[str, ...]
) -> None:
    for change in NO_CHANGES:
        change(workspace)
    run = workspace.run(*flags, cores=1)
    assert run.extracted == run.jobs("server") == 0


@pytest.mark.parametrize("part", [".recaptures.safetensors", ".receipts.json"])
def test_what_lies_beside_a_shard_is_needed_only_to_verify_it(
    workspace: Workspace, part: str
) -> None:
    shard = workspace.shards()[2]
    shard.with_suffix(part).unlink()
    (shard.parents[1] / "verified" / f"{shard.stem}.json").unlink()
    assert workspace.run().extracted == 1
    assert workspace.run().nothing_to_be_done


def test_a_source_of_the_hub_is_pinned_until_its_record_is_made_again(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = ["a" * 40, "b" * 40]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    repository = tmp_path / "hub" / "datasets--org--chats"
    for commit in commits:
        data = repository / "snapshots" / commit / "data"
        data.mkdir(parents=True)
        rows = [{"id": n, **chat(f"{commit}-{n}")} for n in range(3)]
        (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    branch = repository / "refs" / "main"
    branch.parent.mkdir()
    branch.write_text(commits[0])
    workspace.config["data"]["sources"] = [{"name": "chats", "hub": {"id": "org/chats"}}]
    target = ("results/tokens/chats.json", *WITHOUT_PROFILE)

    def tokenised(*flags: str) -> tuple[int, str]:
        run = workspace.run(*target, *flags)
        accounting = json.loads((workspace.results / "tokens" / "chats.json").read_text())
        return run.jobs("tokenise"), accounting["data"]

    assert tokenised() == (1, f"org/chats@{commits[0]}")
    branch.write_text(commits[1])
    assert tokenised() == (0, f"org/chats@{commits[0]}")
    assert tokenised("--forcerun", "hub_data") == (1, f"org/chats@{commits[1]}")


def test_shards_that_are_stored_in_a_compact_form_are_captured_once(workspace: Workspace) -> None:
    """Turned on after a capture, it captures nothing: the jobs rewrite what is there."""
    count, capture = len(workspace.shards()), workspace.shards()[0].parents[1]
    workspace.config["storage"] = {"format": "e4m3"}
    extract = workspace.folder / "scripts" / "extract.py"
    ours = extract.read_text()
    extract.write_text("raise SystemExit('captured again')\n")
    run = workspace.run()
    assert (run.jobs("compact"), run.jobs("manifest"), run.jobs("server")) == (count, 1, 0)
    stored = sorted((capture / "compact" / "e4m3-top-token").glob("*.safetensors"))
    assert len(stored) == len(list(stored[0].parent.glob("*.json"))) == count
    assert not workspace.shards()
    assert not list(capture.glob("shards/*.safetensors"))
    for change in NO_CHANGES:
        change(workspace)
    workspace.edit("rules/compact.smk", "    priority: 1\n", "    priority: 2\n")
    workspace.edit("rules/compact.smk", "streams=1,", "streams=1,\n        more=1,")
    workspace.edit("scripts/store.py", "import argparse\n", "import argparse  # edited\n")
    again = workspace.run()
    assert again.jobs("compact") == again.jobs("server") == 0, "nothing that decides a number"
    stored[1].write_text("changed\n")
    again = workspace.run()
    assert (again.jobs("compact"), again.jobs("manifest")) == (0, 1), "it may have changed"
    assert workspace.run().nothing_to_be_done
    extract.write_text(ours)
    (capture / "verified" / f"{stored[2].stem}.json").unlink()
    stored[3].unlink()
    edit_row(workspace)
    run = workspace.run()
    new = {shard["shard_id"] for shard in workspace.plan()["shards"]} - {p.stem for p in stored}
    assert 1 <= len(new) <= 2
    lost = {stored[2].stem, stored[3].stem} & {s["shard_id"] for s in workspace.plan()["shards"]}
    assert run.jobs("compact") == len(new | lost), "the edited shards, and those in doubt"
    assert not list(capture.glob("shards/*.safetensors"))
    assert workspace.run().nothing_to_be_done
    # a job that is killed is made by the next run
    store = workspace.folder / "scripts" / "store.py"
    whole = store.read_bytes()
    next((capture / "compact" / "e4m3-top-token").glob("*.safetensors")).unlink()
    store.write_text("import os\nos.kill(os.getpid(), 9)\n")
    assert workspace.snakemake().returncode != 0
    store.write_bytes(whole)
    assert workspace.run().jobs("compact") == 1


def test_one_shard_and_the_attestation_deleted_is_one_capture(workspace: Workspace) -> None:
    workspace.shards()[2].unlink()
    remove_attestation(workspace)
    run = workspace.run(*WITHOUT_PROFILE)
    assert (run.extracted, run.jobs("server")) == (1, 1)


def test_other_layers_are_captured_under_another_key_and_going_back_is_free(
    workspace: Workspace,
) -> None:
    folder_name, shards = workspace.plan()["capture_folder"], workspace.shards()
    workspace.config["capture"]["residual_layers"] = [0, 2, 4]
    assert workspace.run().extracted == len(workspace.plan()["shards"]), "other layers"
    assert workspace.plan()["capture_folder"] != folder_name
    assert all(shard.exists() for shard in shards)
    workspace.config = tiny_config()
    assert workspace.run().extracted == 0, "the first layers"
    assert workspace.plan()["capture_folder"] == folder_name


def test_weights_replaced_in_the_same_folder_capture_everything_and_tokenise_nothing(
    workspace: Workspace, demo_model: Path
) -> None:
    folder_name = workspace.plan()["capture_folder"]
    replace_weights(workspace, demo_model)
    run = workspace.run()
    assert (run.extracted, run.jobs("server")) == (len(workspace.plan()["shards"]), 1)
    assert run.jobs("tokenise") == 0
    assert workspace.plan()["capture_folder"] != folder_name


def test_other_data_older_than_its_tokens_are_tokenised(workspace: Workspace) -> None:
    """The file is moved into place, as by `mv` or `rsync -a`.

    Snakemake sees no input that is newer than the output of the rule.
    """
    data, tokens = workspace.folder / "one.jsonl", workspace.results / "tokens" / "one.parquet"
    edit_row(workspace)
    os.utime(data, ns=(tokens.stat().st_mtime_ns - 1_000_000,) * 2)
    run = workspace.run()
    assert run.jobs("tokenise") == 1
    assert 1 <= run.extracted <= 2
    assert workspace.run().nothing_to_be_done


def test_a_data_folder_saved_again_is_tokenised_again(workspace: Workspace) -> None:
    """`save_to_disk` does not change the folder's own time."""
    import datasets

    folder, rows = workspace.folder / "one", workspace.rows()
    workspace.config["data"]["sources"][0]["files"] = ["one"]
    datasets.Dataset.from_list(rows).save_to_disk(folder)
    before = folder.stat().st_mtime_ns
    assert workspace.run().extracted == 0, "the rows of before, in another kind of file"
    datasets.Dataset.from_list([*rows[:17], chat("edited"), *rows[18:]]).save_to_disk(folder)
    assert folder.stat().st_mtime_ns == before
    run = workspace.run()
    assert run.jobs("tokenise") == 1
    assert 1 <= run.extracted <= 2


def test_data_touched_are_tokenised_again_and_captured_and_verified_not(
    workspace: Workspace,
) -> None:
    before = {path: path.read_bytes() for path in workspace.results.glob("tokens/*.*")}
    (workspace.folder / "one.jsonl").touch()
    run = workspace.run()
    assert [run.jobs(rule) for rule in ("tokenise", "server", "extract", "verify")] == [1, 0, 0, 0]
    assert before == {path: path.read_bytes() for path in workspace.results.glob("tokens/*.*")}
    assert workspace.run().nothing_to_be_done


def test_data_that_are_gone_are_named_once_they_are_needed(workspace: Workspace) -> None:
    (workspace.folder / "one.jsonl").unlink()
    assert workspace.run().nothing_to_be_done
    shutil.rmtree(workspace.results)
    failed = workspace.snakemake()
    assert failed.returncode != 0
    missing = workspace.folder / "one.jsonl"
    assert f"data.sources[0].files[0]: {missing}: no such file: correct the path" in failed.stdout
    assert "Traceback" not in failed.stdout


def test_a_damaged_plan_is_named_and_what_the_message_says_mends_it(workspace: Workspace) -> None:
    plan = workspace.results / "plan.json"
    whole = plan.read_text()
    plan.write_text(whole[:100])
    failed = workspace.snakemake()
    assert failed.returncode != 0
    assert (
        "plan.json: expected a plan" in failed.stdout
        and "run: snakemake --cores all --forcerun plan" in failed.stdout
    )
    assert "Traceback" not in failed.stdout
    assert workspace.run("--forcerun", "plan").extracted == 0
    assert json.loads(plan.read_text())["shards"] == json.loads(whole)["shards"]


def test_a_wrong_key_is_named_before_anything_runs(workspace: Workspace) -> None:
    workspace.config["data"]["sources"][0]["nmae"] = workspace.config["data"]["sources"][0].pop(
        "name"
    )
    edit_row(workspace)
    failed = workspace.snakemake()
    assert failed.returncode != 0
    assert "data.sources[0].nmae: unknown key (did you mean name?)" in failed.stdout
    assert "Traceback" not in failed.stdout
    assert "rule tokenise" not in failed.stdout


def test_a_second_run_on_one_results_folder_is_refused_before_it_replaces_the_plan(
    workspace: Workspace,
) -> None:
    """The second run has a working directory of its own, so Snakemake's lock does not stop it.

    The first run's later jobs would read its plan.
    """
    before = (workspace.results / "plan.json").read_bytes()
    edit_row(workspace)
    with open(workspace.results / ".run.lock", "w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        first.write("process 1 on a, started in /b")
        first.flush()
        refused = workspace.snakemake()
    assert refused.returncode != 0
    assert "results: another run works there (process 1 on a, started in /b)" in refused.stdout
    assert "Traceback" not in refused.stdout
    assert "rule tokenise" not in refused.stdout
    assert (workspace.results / "plan.json").read_bytes() == before
    assert 1 <= workspace.run().extracted <= 2


def test_a_given_configuration_stands_alone(workspace: Workspace) -> None:
    """A key that the configuration leaves out is not taken from config.yaml."""
    (workspace.folder / "mine.yaml").write_text(
        json.dumps({key: value for key, value in tiny_config().items() if key != "data"})
    )
    failed = workspace.snakemake("--configfile", "mine.yaml")
    assert failed.returncode != 0
    assert "mine.yaml: data: missing" in failed.stdout


def test_a_dry_run_writes_nothing(workspace: Workspace) -> None:
    edit_row(workspace)
    before = sorted((workspace.folder / "results").rglob("*"))
    assert "tokenise" in workspace.run("--dry-run").output
    assert sorted((workspace.folder / "results").rglob("*")) == before


@pytest.mark.parametrize(
    "tool",
    [["snakefmt", "--check", "Snakefile", "rules"], ["snakemake", "--lint"]],
    ids=lambda tool: tool[0],
)
def test_the_rules_are_clean(workspace: Workspace, tool: list[str]) -> None:
    import subprocess
    import sys

    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        tool, cwd=REPOSITORY, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr

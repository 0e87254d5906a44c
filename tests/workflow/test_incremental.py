"""Promise 7: a rerun captures what is stale and nothing else, whatever else has changed.

Counted are the extracting jobs that Snakemake starts. The commands from the server on are stand-ins, so that the graph,
tokenising and planning are tested as they are, in seconds.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from workspace import REPOSITORY, Workspace, chat, make_tiny_model, make_workspace, tiny_config

WITHOUT_PROFILE = ("--workflow-profile", "none")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(folder, demo_model)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Workspace:
    """A workspace whose first run is over. Tests work on copies."""
    workspace = make_workspace(tmp_path_factory.mktemp("finished") / "work", tiny_model, standins=True)
    first = workspace.run()
    assert first.extracted == len(workspace.shards()) == len(workspace.plan()["shards"]) >= 6
    return workspace


@pytest.fixture
def workspace(finished: Workspace, tmp_path: Path) -> Workspace:
    """A copy of the finished workspace, with all times as they were: moved to another path, then."""
    folder = tmp_path / "copy"
    shutil.copytree(finished.folder, folder, copy_function=shutil.copy2)
    return Workspace(folder, tiny_config())


@pytest.mark.parametrize("flags", [(), WITHOUT_PROFILE], ids=["profile", "no-profile"])
def test_right_after_the_first_run_nothing_is_to_be_done(workspace: Workspace, flags: tuple[str, ...]) -> None:
    again = workspace.run(*flags)
    assert again.nothing_to_be_done
    assert again.extracted == 0


# --- changes of the data ---


def edit_row(workspace: Workspace) -> None:
    rows = workspace.rows()
    rows[17] = chat("edited")
    workspace.write_rows(rows)


def insert_row(workspace: Workspace) -> None:
    rows = workspace.rows()
    workspace.write_rows([*rows[:17], chat("inserted"), *rows[17:]])


def remove_row(workspace: Workspace) -> None:
    rows = workspace.rows()
    workspace.write_rows([*rows[:17], *rows[18:]])


def exclude_sample(workspace: Workspace) -> None:
    import pyarrow.parquet as pq

    names = pq.read_table(workspace.folder / "results" / "tokens" / "one.parquet", columns=["sample_id"])["sample_id"].to_pylist()
    workspace.config["exclude"] = [names[17]]


@pytest.mark.parametrize("change", [edit_row, insert_row, remove_row, exclude_sample])
def test_one_row_changed_captures_at_most_two_shards(workspace: Workspace, change: Callable[[Workspace], None]) -> None:
    before = {path.name for path in workspace.shards()}
    change(workspace)
    assert 1 <= workspace.run().extracted <= 2
    planned = {f"{shard['shard_id']}.safetensors" for shard in workspace.plan()["shards"]}
    assert 1 <= len(planned - before) <= 2
    assert workspace.run().nothing_to_be_done


def test_rows_appended_capture_the_last_shard_and_new_ones(workspace: Workspace) -> None:
    before = [shard["shard_id"] for shard in workspace.plan()["shards"] if shard["source"] == "one"]
    workspace.write_rows([*workspace.rows(), *(chat(f"new-{i}") for i in range(12))])
    extracted = workspace.run().extracted
    after = [shard["shard_id"] for shard in workspace.plan()["shards"] if shard["source"] == "one"]
    assert after[: len(before) - 1] == before[:-1]
    assert extracted == len(set(after) - set(before)) >= 1


def test_an_edit_undone_is_free(workspace: Workspace) -> None:
    rows = workspace.rows()
    edit_row(workspace)
    assert workspace.run().extracted >= 1
    workspace.write_rows(rows)
    assert workspace.run().extracted == 0


# --- changes that are none ---


def reorder_sources(workspace: Workspace) -> None:
    workspace.config["data"]["sources"].reverse()


def change_image(workspace: Workspace) -> None:
    workspace.edit("Snakefile", '"envs/tools.sif"', '"envs/other.sif"')
    workspace.config["server"] = {"image": "envs/sglang-2.sif", "image_args": ["--nv"]}


def change_rule_text(workspace: Workspace) -> None:
    workspace.edit("rules/extract.smk", "exec python scripts/extract.py", "exec python  -u scripts/extract.py")
    workspace.edit("rules/extract.smk", "resources:\n", "params:\n        added=1,\n    resources:\n")
    workspace.edit("rules/extract.smk", "model=ancient", "other=__file__,\n        model=ancient")


def change_script(workspace: Workspace) -> None:
    for path in ("scripts/extract.py", "scripts/server.py", "draftstates/extract.py", "draftstates/client.py", "draftstates/plan.py"):
        with open(workspace.folder / path, "a") as file:
            file.write("\n# another line\n")


def change_profile(workspace: Workspace) -> None:
    workspace.edit("profiles/default/profile.yaml", "streams=4", "streams=1")
    with open(workspace.folder / "profiles/default/profile.yaml", "a") as file:
        file.write("set-threads: {extract: 2, verify: 2}\nset-resources: {extract: {mem_mb: 1000}}\n")


def change_server(workspace: Workspace) -> None:
    """Another concurrency, launcher, address (with its port), and flags."""
    workspace.config["extract"] = {"tokens_in_flight": 1000}
    workspace.config["checks"] = {"probe_fraction": 0.5}
    workspace.config["server"] = {"launcher": "external", "url": "http://127.0.0.1:12345", "args": ["--log-level", "info"], "writers": 2}


def change_attestation(workspace: Workspace) -> None:
    (attestation,) = (workspace.folder / "results").glob("*/server.json")
    attestation.write_text("{}")


def remove_attestation(workspace: Workspace) -> None:
    (attestation,) = (workspace.folder / "results").glob("*/server.json")
    attestation.unlink()


def touch_everything(workspace: Workspace) -> None:
    """A fresh age for all that goes into the capture, as a copy or a checkout gives it."""
    for folder in ("results/tokens", "models", "scripts", "rules", "draftstates"):
        for path in (workspace.folder / folder).rglob("*"):
            path.touch()


def move_model(workspace: Workspace) -> None:
    """To another folder under another name, which is the model's name too where the configuration gives none."""
    (workspace.folder / "elsewhere").mkdir()
    shutil.move(workspace.folder / "models" / "tiny", workspace.folder / "elsewhere" / "renamed")
    workspace.config["model"]["path"] = str(workspace.folder / "elsewhere" / "renamed")


NO_CHANGES = [
    *(reorder_sources, change_image, change_rule_text, change_script, change_profile),
    *(change_server, change_attestation, remove_attestation, touch_everything, move_model),
]


@pytest.mark.parametrize("change", NO_CHANGES)
def test_what_does_not_decide_the_numbers_captures_nothing(workspace: Workspace, change: Callable[[Workspace], None]) -> None:
    change(workspace)
    run = workspace.run()
    assert run.extracted == run.jobs("server") == 0


@pytest.mark.parametrize("flags", [WITHOUT_PROFILE, ("--rerun-triggers", "mtime"), ("--forcerun", "server", "extract")], ids="-".join)
def test_no_setting_of_snakemake_brings_a_capture_back(workspace: Workspace, flags: tuple[str, ...]) -> None:
    for change in NO_CHANGES:
        change(workspace)
    run = workspace.run(*flags, cores=1)
    assert run.extracted == run.jobs("server") == 0


# --- changes that are some ---


def test_other_layers_are_captured_under_another_key_and_going_back_is_free(workspace: Workspace) -> None:
    run_name, shards = workspace.plan()["run"], workspace.shards()
    workspace.config["capture"]["residual_layers"] = [0, 2, 4]
    assert workspace.run().extracted == len(workspace.plan()["shards"])
    assert workspace.plan()["run"] != run_name
    assert all(shard.exists() for shard in shards)
    workspace.config = tiny_config()
    assert workspace.run().extracted == 0
    assert workspace.plan()["run"] == run_name
    assert workspace.run().nothing_to_be_done


@pytest.mark.parametrize("part", [".safetensors", ".probe.safetensors", ".receipts.json"])
def test_one_shard_deleted_is_one_capture(workspace: Workspace, part: str) -> None:
    """What lies beside a shard is needed only to verify it."""
    shard = workspace.shards()[2]
    shard.with_suffix(part).unlink()
    if part != shard.suffix:
        (shard.parents[1] / "verified" / f"{shard.stem}.json").unlink()
    assert workspace.run().extracted == 1
    assert workspace.run().nothing_to_be_done


def test_one_shard_and_the_attestation_deleted_is_one_capture(workspace: Workspace) -> None:
    workspace.shards()[2].unlink()
    remove_attestation(workspace)
    run = workspace.run(*WITHOUT_PROFILE)
    assert (run.extracted, run.jobs("server")) == (1, 1)


def test_weights_replaced_in_the_same_folder_capture_everything(workspace: Workspace, demo_model: Path, tmp_path: Path) -> None:
    run_name = workspace.plan()["run"]
    make_tiny_model(tmp_path / "other", demo_model, seed=1)
    weights = workspace.folder / "models" / "tiny" / "model.safetensors"
    before = weights.stat()
    shutil.copy(tmp_path / "other" / "model.safetensors", weights)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_size == before.st_size
    run = workspace.run()
    assert run.extracted == len(workspace.plan()["shards"])
    assert run.jobs("tokenise") == 0
    assert workspace.plan()["run"] != run_name
    assert workspace.run().nothing_to_be_done


def test_a_shard_whose_tokens_are_gone_says_how_to_bring_them_back(workspace: Workspace) -> None:
    shard = workspace.shards()[0]
    shard.unlink()
    tokens = workspace.folder / "results" / "tokens" / "shards" / f"{shard.stem}.parquet"
    tokens.unlink()
    failed = workspace.snakemake()
    assert failed.returncode != 0
    assert f"{tokens.relative_to(workspace.folder)} is gone" in failed.stdout
    assert workspace.run("--forcerun", "plan").extracted == 1


def test_the_demo_model_is_made_once(workspace: Workspace) -> None:
    """A model that the workflow makes itself is not there when Snakemake asks for its content the first time."""
    shutil.move(workspace.folder / "models" / "tiny", workspace.folder / "kept")
    shutil.rmtree(workspace.folder / "results")
    shutil.rmtree(workspace.folder / ".snakemake")
    (workspace.folder / "scripts" / "prepare_demo_model.py").write_text(
        "import shutil, sys\nshutil.copytree('kept', sys.argv[2], dirs_exist_ok=True)\n"
    )
    workspace.config["model"]["prepare"] = "smollm2"
    run = workspace.run()
    assert (run.jobs("demo_model"), run.jobs("plan")) == (1, 1)
    assert workspace.run().nothing_to_be_done


def test_a_wrong_key_is_named_before_anything_runs(workspace: Workspace) -> None:
    workspace.config["data"]["sources"][0]["nmae"] = workspace.config["data"]["sources"][0].pop("name")
    edit_row(workspace)
    failed = workspace.snakemake()
    assert failed.returncode != 0
    assert "data.sources[0].nmae: unknown key (did you mean name?)" in failed.stdout
    assert "Traceback" not in failed.stdout
    assert "rule tokenise" not in failed.stdout


def test_a_given_configuration_stands_alone(workspace: Workspace) -> None:
    """A key that it leaves out is not taken from config.yaml."""
    (workspace.folder / "mine.yaml").write_text(json.dumps({key: value for key, value in tiny_config().items() if key != "data"}))
    failed = workspace.snakemake("--configfile", "mine.yaml")
    assert failed.returncode != 0
    assert "mine.yaml: data: missing" in failed.stdout


def test_a_dry_run_writes_nothing(workspace: Workspace) -> None:
    edit_row(workspace)
    before = sorted((workspace.folder / "results").rglob("*"))
    assert "tokenise" in workspace.run("--dry-run").output
    assert sorted((workspace.folder / "results").rglob("*")) == before


@pytest.mark.parametrize("tool", [["snakefmt", "--check", "Snakefile", "rules"], ["snakemake", "--lint"]], ids=lambda tool: tool[0])
def test_the_rules_are_clean(workspace: Workspace, tool: list[str]) -> None:
    import subprocess
    import sys

    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(tool, cwd=REPOSITORY, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

"""The demo's first rows through profiles/slurm, changed only where sites differ."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_harness import Cluster
from lease_harness import FILES, eventually
from workflow_copy import copy_workflow

SERVER_JOB = ["--partition=gpu", "--gpus=test:1", "--cpus-per-task=2", "--mem=8G", "--time=60"]


def make_folder(folder: Path, model: Path) -> None:
    copy_workflow(folder, "examples", "config.yaml")
    (folder / "models").mkdir()
    (folder / "models" / model.name).symlink_to(model)
    path = folder / "profiles/slurm/profile.yaml"
    profile = yaml.safe_load(path.read_text())
    server = profile["config"]["server"]
    server |= {
        "tensor_parallel": 1,
        "device": "cpu",
        "slurm": {"sbatch": SERVER_JOB, "poll_seconds": 2},
    }
    path.write_text(yaml.safe_dump(profile))
    path = folder / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["data"]["sources"][0]["limit"] = 12
    config["shards"] = {"min_bytes": "2MiB", "max_bytes": "6MiB"}
    path.write_text(yaml.safe_dump(config))
    shutil.copy2(FILES / "quick_looks.smk", folder)
    with open(folder / "Snakefile", "a") as file:
        file.write('\n\ninclude: "quick_looks.smk"\n')


def snakemake(cluster: Cluster, *flags: str) -> str:
    """Run Snakemake through the profile, which must do all its steps, and return its output."""
    folder = cluster.play.folder
    command = [sys.executable, "-m", "snakemake", "--workflow-profile", "profiles/slurm", *flags]
    environment = {**cluster.play.environment(), "PYTHONPATH": str(folder)}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    logs = "".join(path.read_text() for path in folder.glob("results/.server/*.log"))
    assert "steps (100%) done" in done.stdout, done.stdout + logs[-5000:]
    return done.stdout


def plan_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results/plan.json").read_text())


@pytest.mark.server
@pytest.mark.timeout(2400)
def test_the_demo_runs_on_a_cluster_and_a_deleted_shard_alone_is_made_again(
    cluster: Cluster, demo_model: Path
) -> None:
    """The steps up to the plan come first: they are CPU jobs and need no server."""
    folder = cluster.play.folder
    make_folder(folder, demo_model)
    said = snakemake(cluster, "results/plan.json")
    assert said.count("has been submitted with SLURM jobid") == 2
    assert plan_of(folder)["shards"]
    assert not (folder / "results/.server/server.log").exists()
    assert not cluster.jobs()
    said = snakemake(cluster)
    shards = plan_of(folder)["shards"]
    assert said.count("(Rule: extract)") == len(shards) > 1
    run = folder / "results" / plan_of(folder)["capture_folder"]
    manifest = json.loads((run / "manifest.json").read_text())
    assert {entry["shard_id"] for entry in manifest["shards"]} == {
        entry["shard_id"] for entry in shards
    }
    assert json.loads((run / "server.json").read_text())["flags"]["device"] == "cpu"
    log = (folder / "results/.server/supervisor.log").read_text()
    assert log.count("is job") == 1, log
    eventually(lambda: not cluster.jobs(), within=20, what="no job is left")
    before = {path: path.stat().st_mtime_ns for path in run.glob("shards/*.safetensors")}
    gone = run / "shards" / f"{shards[0]['shard_id']}.safetensors"
    os.unlink(gone)
    again = snakemake(cluster)
    assert again.count("(Rule: extract)") == 1
    assert again.count("(Rule: manifest)") == 1
    after = {path: path.stat().st_mtime_ns for path in run.glob("shards/*.safetensors")}
    assert {path for path in before if before[path] != after[path]} <= {
        gone,
        gone.with_suffix(".recaptures.safetensors"),
    }

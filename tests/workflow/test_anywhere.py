"""The workflow from any working directory, as a module, and from a package installed by pip.

`pip install .` puts the package into an environment of its own. The commands from the server on are
stand-ins, so that a run takes seconds.
"""

import json
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from workflow_copy import REPOSITORY, copy_workflow
from workspace import Run, Workspace, make_workspace

# The text that `snakedeploy deploy-workflow` writes to workflow/Snakefile, for a local clone.
DEPLOYED = """
from snakemake.utils import min_version


min_version("6.10.0")


configfile: "config/config.yaml"


# declare {source} as a module
module draftstates:
    snakefile:
        "{source}/workflow/Snakefile"
    config:
        config


# use all rules from {source}
use rule * from draftstates
"""
MODULE = """
configfile: "settings.yaml"

onstart:
    open("hooks", "a").write("start\\n")

onsuccess:
    open("hooks", "a").write("success\\n")

module states:
    snakefile: "{source}/Snakefile"
    config: config["states"]

use rule * from states as states_*

rule count:
    input:
        rules.states_all.input,
    output:
        "count.txt",
    shell:
        "ls {{input}} | wc -l >{{output}}"
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Workspace:
    """Make the folder of the workflow, with data and a model; no run happens in it."""
    source = make_workspace(tmp_path_factory.mktemp("source") / "clone", tiny_model, standins=True)
    for name in ("one", "two"):
        source.write_rows(source.rows(name)[:8], name)
    return source


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return Python of a new environment that has the package by `pip install .`.

    All other packages come from the environment of the tests.
    """
    folder = tmp_path_factory.mktemp("installed")
    clone, environment = folder / "clone", folder / "environment"
    clone.mkdir()
    copy_workflow(clone, "pyproject.toml", "README.md")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()))
    python = environment / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    subprocess.run([*install, "--no-deps", "--no-build-isolation", clone], check=True)
    # No file of the folder that was installed may be found later.
    shutil.rmtree(clone)
    return python


@pytest.fixture
def elsewhere(source: Workspace, tmp_path: Path) -> Path:
    """Make a working directory that has the data and no file of the workflow."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for name in ("one.jsonl", "two.jsonl"):
        shutil.copy(source.folder / name, folder)
    return folder


def config(source: Workspace) -> dict:
    return {**source.config, "model": {"path": str(source.folder / "models" / "tiny")}}


def outside() -> dict[str, str]:
    """Return the environment without the variables that make this checkout's package importable."""
    left_out = ("PYTHONPATH", "DRAFTSTATES_RUN_FOLDER", "DRAFTSTATES_SCRIPTS")
    return {name: value for name, value in os.environ.items() if name not in left_out}


def snakemake(python: Path | str, work: Path, *flags: str) -> Run:
    done = subprocess.run(
        [python, "-m", "snakemake", "--cores", "2", *flags],
        cwd=work,
        env=outside(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return Run(done.stdout)


def check_results(work: Path, output: str) -> None:
    """Check that a run in `work` is complete: every planned shard is in the manifest."""
    plan = json.loads((work / "results" / "plan.json").read_text())
    manifest = work / "results" / plan["capture_folder"] / "manifest.json"
    listed = [shard["shard_id"] for shard in json.loads(manifest.read_text())["shards"]]
    assert listed == [shard["shard_id"] for shard in plan["shards"]]
    assert len(listed) >= 2
    # The hooks print the accounting and save the resolved configuration.
    assert "rows in" in output
    assert len(list((work / "results" / "config").glob("*.yaml"))) == 1


def test_it_runs_in_another_working_directory_and_a_workflow_that_moves_makes_nothing_again(
    source: Workspace, python: Path, elsewhere: Path, tmp_path: Path
) -> None:
    (elsewhere / "config.yaml").write_text(yaml.safe_dump(config(source)))
    before = sorted(source.folder.rglob("*.*"))
    place = ("--snakefile", str(source.folder / "Snakefile"), "--directory", str(elsewhere))
    check_results(elsewhere, snakemake(python, tmp_path, *place).output)
    changed = set(source.folder.rglob("*.*")) - set(before)
    assert not [path for path in changed if "__pycache__" not in path.parts]
    shutil.copytree(source.folder, tmp_path / "moved")
    moved = ("--snakefile", str(tmp_path / "moved" / "Snakefile"), "--workflow-profile", "none")
    assert snakemake(python, elsewhere, *moved).nothing_to_be_done


def test_it_runs_as_snakedeploy_deploys_it(
    source: Workspace, python: Path, elsewhere: Path
) -> None:
    for name in ("workflow", "config"):
        (elsewhere / name).mkdir()
    shutil.copytree(source.folder / "profiles", elsewhere / "profiles")
    (elsewhere / "workflow" / "Snakefile").write_text(DEPLOYED.format(source=source.folder))
    (elsewhere / "config" / "config.yaml").write_text(yaml.safe_dump(config(source)))
    check_results(elsewhere, snakemake(python, elsewhere).output)


def test_it_runs_as_a_module_of_a_larger_workflow(
    source: Workspace, python: Path, elsewhere: Path
) -> None:
    (elsewhere / "Snakefile").write_text(MODULE.format(source=source.folder))
    (elsewhere / "settings.yaml").write_text(yaml.safe_dump({"states": config(source)}))
    run = snakemake(python, elsewhere, "count")
    check_results(elsewhere, run.output)
    assert run.jobs("states_extract") >= 2
    assert (elsewhere / "hooks").read_text() == "start\nsuccess\n"
    assert int((elsewhere / "count.txt").read_text()) > 4


# In place of `cp`: half of the file, and then neither it nor Snakemake lives.
HALF_A_COPY = """#!/bin/sh
head -c 99 "$1" >"$2"
kill -9 $(cut -d " " -f 4 /proc/$PPID/stat)
exit 1
"""


def test_half_of_the_demos_data_is_no_data(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rule makes a file that is there, so that half of it would be all of the data."""
    copies = tmp_path / "bin" / "cp"
    copies.parent.mkdir()
    copies.write_text(HALF_A_COPY)
    copies.chmod(0o755)
    monkeypatch.setenv("PATH", f"{copies.parent}{os.pathsep}{os.environ['PATH']}")
    data = Path("examples", "conversations.jsonl")
    killed = subprocess.run(
        [python, "-m", "snakemake", "--cores", "1", "--snakefile", REPOSITORY / "Snakefile", data],
        cwd=tmp_path,
        env=outside(),
    )
    assert killed.returncode == -9
    assert [path.name for path in (tmp_path / "examples").iterdir()] == [f"{data.name}.partial"]


def test_the_demo_brings_its_configuration_and_data(python: Path, tmp_path: Path) -> None:
    flags = ("--snakefile", str(REPOSITORY / "Snakefile"), "--dry-run")
    run = snakemake(python, tmp_path, *flags)
    assert run.jobs("demo_data") == run.jobs("demo_model") == run.jobs("tokenise") == 1
    snakemake(python, tmp_path, *flags[:2], "examples/conversations.jsonl")
    data = Path("examples", "conversations.jsonl")
    assert (tmp_path / data).read_bytes() == (REPOSITORY / data).read_bytes()
    assert snakemake(python, tmp_path, *flags).jobs("demo_data") == 0


def test_the_installed_package_needs_no_checkout(python: Path, tmp_path: Path) -> None:
    def output(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=outside(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = output(python, "-c", "import draftstates; print(draftstates.__file__)")
    assert Path(where).is_relative_to(python.parents[1])
    assert "prune" in output(python.with_name("draftstates"), "--help")
    shutil.copy(REPOSITORY / "config.yaml", tmp_path)
    load = "import sys; from pathlib import Path; from draftstates.config import load"
    read = f"{load}; print(load(Path('config.yaml')).model.path)"
    assert "models/" in output(python, "-c", read)

"""A slice of the demo from conversations to the manifest, in images.

Every step runs in the tools image, the real server in its own.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from container_harness import SITE_PACKAGES, traces
from lease_harness import addresses, eventually
from spython.main import Client
from workflow_copy import REPOSITORY

from draftstates.config import resolve
from draftstates.containers import STEP_VARIABLES, image_path, step_environment

STEPS = ("tokenise", "plan", "server", "extract", "verify", "manifest")


def configuration(
    code: Path, images: dict[str, Path], model: Path, **changes: Any
) -> dict[str, Any]:
    """Return the demo's configuration with other rows and folders.

    Data and results lie outside of the code.
    """
    config = yaml.safe_load((REPOSITORY / "config.yaml").read_text())
    data = code.parent / "data"
    data.mkdir(exist_ok=True)
    shutil.copy(REPOSITORY / "examples/conversations.jsonl", data)
    config["data"]["sources"] = [
        {"name": "demo", "files": [str(data / "conversations.jsonl")], "limit": 12}
    ]
    config["model"] = {"path": str(model.resolve())}
    config["shards"] = {"min_bytes": "2MiB", "max_bytes": "6MiB"}
    config["results"] = str(code.parent / "results")
    config["containers"] = {
        "tools": os.path.relpath(images["tools"], code),
        "sglang": os.path.relpath(images["sglang"], code),
        "sglang_args": [
            "--bind",
            f"{SITE_PACKAGES}:{SITE_PACKAGES}:ro",
            "--env",
            f"PYTHONPATH=/opt/draftstates:{SITE_PACKAGES}",
        ],
    }
    return {**config, **changes}


def arguments(
    code: Path,
    config: dict[str, Any],
    *flags: str,
    contained: bool,
    environment: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Return the command that starts Snakemake.

    The images lack the packages, so they are shown to the containers.
    """
    (code / "config.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "snakemake", "--cores", "2", *flags]
    if contained:
        command += ["--software-deployment-method", "apptainer"]
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in (*STEP_VARIABLES, "DRAFTSTATES_RUN_FOLDER")
    }
    shown = {
        "PYTHONPATH": f"{code}:{SITE_PACKAGES}",
        "APPTAINER_BIND": f"{SITE_PACKAGES}:{SITE_PACKAGES}:ro",
    }
    return {"args": command, "cwd": code, "env": {**own, **shown, **(environment or {})}}


def snakemake(
    code: Path,
    config: dict[str, Any],
    *flags: str,
    contained: bool = True,
    status: int = 0,
    **more: Any,
) -> str:
    """Run Snakemake to its end, which must have this status, and return its output."""
    start = arguments(code, config, *flags, contained=contained, **more)
    done = subprocess.run(**start, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    log = Path(config["results"]) / ".server" / "server.log"
    assert done.returncode == status, done.stdout + (
        log.read_text()[-5000:] if log.exists() else ""
    )
    return done.stdout


def jobs(said: str, rule: str) -> int:
    return len(re.findall(rf"^(?:local)?(?:rule|checkpoint) {rule}:$", said, flags=re.MULTILINE))


def manifest_of(config: dict[str, Any]) -> dict[str, Any]:
    (path,) = Path(config["results"]).glob("*/manifest.json")
    return json.loads(path.read_text())


def captures(config: dict[str, Any]) -> dict[str, Any]:
    """Return the time at which each shard was made, and the number of server starts."""
    results = Path(config["results"])
    shards = {path.name: path.stat().st_mtime_ns for path in results.glob("*/shards/*.safetensors")}
    return {**shards, "starts": (results / ".server/server.log").read_text().count("\n--- 20")}


@pytest.fixture(scope="module")
def config(code: Path, images: dict[str, Path], demo_model: Path) -> dict[str, Any]:
    return configuration(code, images, demo_model)


@pytest.fixture(scope="module")
def finished(
    code: Path,
    images: dict[str, Path],
    config: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[str]:
    """Return the output of two runs.

    The first run's Snakemake is killed as soon as its server runs; the second run completes the
    work.
    """
    results = Path(config["results"])
    log = tmp_path_factory.mktemp("killed") / "log"
    with open(log, "w") as output:
        run = subprocess.Popen(
            **arguments(code, config, contained=True),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            eventually(
                lambda: addresses(results) or run.poll() is not None,
                within=600,
                what="the server is announced",
            )
            assert run.poll() is None, log.read_text()
            names = (images["tools"].name, images["sglang"].name)
            for name in names:
                # Between two steps no process runs in the image of the steps.
                eventually(
                    lambda name=name: [line for line in traces(name) if "runtime parent" in line],
                    within=30,
                    what=f"something runs in {name}",
                )
        finally:
            run.kill()
            run.wait()
    words = (*names, str(code), str(results))
    eventually(lambda: not traces(*words), within=30, what=f"nothing is left of {traces(*words)}")
    snakemake(code, config, "--unlock")
    return [log.read_text(), snakemake(code, config)]


@pytest.mark.server
@pytest.mark.timeout(1500)
def test_every_step_ran_in_the_image_that_the_manifest_names(
    finished: list[str], config: dict[str, Any], images: dict[str, Path]
) -> None:
    last = finished[-1]
    assert last.count("Activating singularity image") == jobs(last, "(?!all:)[a-z_]+") >= 5
    manifest = manifest_of(config)
    jsonschema.validate(
        manifest, yaml.safe_load((REPOSITORY / "schemas/manifest.schema.yaml").read_text())
    )
    expected = {step: [images["sglang" if step == "server" else "tools"].name] for step in STEPS}
    assert manifest["images"] == expected
    assert manifest["totals"]["rows_in"] == 12
    assert len(manifest["shards"]) >= 2


@pytest.mark.server
@pytest.mark.timeout(1500)
def test_containers_off_and_other_images_capture_nothing_again(
    finished: list[str], config: dict[str, Any], code: Path, images: dict[str, Path]
) -> None:
    before = captures(config)
    on_host = snakemake(code, {**config, "containers": {}}, contained=False)
    assert (jobs(on_host, "extract"), jobs(on_host, "server")) == (0, 0)
    assert captures(config) == before
    assert jobs(on_host, "verify") == len(manifest_of(config)["shards"]), (
        "no step ran again, so this shows nothing"
    )
    assert manifest_of(config)["images"]["verify"] == [None]
    assert manifest_of(config)["images"]["server"] == [images["sglang"].name]
    lock = code / "envs/tools.lock"
    kept = lock.read_text()
    try:
        lock.write_text(f"{kept}# another\n")
        shutil.copy(images["tools"], image_path("tools", code))
        other = {
            **config,
            "containers": {"tools": os.path.relpath(image_path("tools", code), code)},
        }
        said = snakemake(code, other)
        assert (jobs(said, "extract"), jobs(said, "server")) == (0, 0)
        assert captures(config) == before
        assert manifest_of(config)["images"]["verify"] == [image_path("tools", code).name]
    finally:
        lock.write_text(kept)


def test_images_that_are_missing_or_out_of_date_are_named_with_what_to_do(
    code: Path, config: dict[str, Any], images: dict[str, Path]
) -> None:
    said = snakemake(code, {**config, "containers": {}}, status=1)
    assert "containers.tools: missing" in said and "make images" in said
    said = snakemake(
        code, {**config, "containers": {"tools": "envs/tools-000000000000.sif"}}, status=1
    )
    assert (
        "containers.tools: envs/tools-000000000000.sif is not there: build it with `make images`"
        in said
    )
    module = code / "draftstates/extract/protocol.py"
    kept = module.read_text()
    try:
        module.write_text(f"{kept}\n")
        said = snakemake(code, config, "--dry-run", contained=False, status=1)
        assert (
            f"containers.sglang: envs/{images['sglang'].name} was made of other parts than lie"
            " here now" in said
        )
    finally:
        module.write_text(kept)


def test_the_steps_up_to_the_plan_need_no_network_at_all(
    code: Path, config: dict[str, Any], tmp_path: Path
) -> None:
    """The steps run in a network of their own, which has only a loopback."""
    offline = {**config, "results": str(tmp_path / "results")}
    alone = {"APPTAINER_NET": "1", "APPTAINER_NETWORK": "none"}
    snakemake(code, offline, f"{tmp_path}/results/plan.json", environment=alone)
    assert json.loads((tmp_path / "results/plan.json").read_text())["shards"]


def in_image(
    image: Path, script: str, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a shell script in an image as Snakemake runs a step."""
    command = ["apptainer", "exec", "--home", os.getcwd(), image, "bash", "-c", script]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True
    )


@pytest.mark.parametrize("name", ["tools", "sglang"])
def test_an_image_asks_no_hub_and_tells_its_digest(name: str, images: dict[str, Path]) -> None:
    done = in_image(
        images[name],
        "echo $HF_HUB_OFFLINE$TRANSFORMERS_OFFLINE$PYTHONNOUSERSITE; command -v python",
        {},
    )
    assert done.stdout.split() == ["111", "/opt/venv/bin/python"]
    labels = Client.inspect(str(images[name]))["attributes"]["labels"]
    assert f"{labels['draftstates.image']}-{labels['draftstates.digest']}.sif" == images[name].name


def test_a_step_writes_only_where_it_should(
    code: Path,
    config: dict[str, Any],
    images: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step tries the folders that the configuration names, and those of the host.

    Apptainer shows the latter by itself.
    """
    monkeypatch.chdir(code)
    results, model, data = tmp_path / "results", tmp_path / "model", tmp_path / "data"
    for folder in (results, model, data):
        folder.mkdir()
    (data / "chats.jsonl").touch()
    config = {**config, "results": str(results), "model": {"path": str(model), "prepare": "none"}}
    config["data"] = {
        "sources": [{"name": "a", "files": [str(data / "chats.jsonl")]}],
        "max_tokens": 8,
    }
    (results / ".containers").mkdir()
    environment = step_environment(resolve(config, origin="test"), code=code, work=code)
    outside = [
        Path("/var/tmp"),
        Path("/tmp"),
        Path("/dev/shm"),
        Path("/usr"),
        Path("/root"),
        Path("/opt"),
        tmp_path,
    ]
    tried = [results, code, model, data, *outside]
    script = "; ".join(
        f"touch {folder}/draftstates-was-here 2>/dev/null && echo {folder}" for folder in tried
    )
    done = in_image(images["tools"], f"{script}; ls {data}", environment)
    written = [folder for folder in tried if (folder / "draftstates-was-here").exists()]
    for folder in written:
        (folder / "draftstates-was-here").unlink()
    assert written == [results, code], done.stdout + done.stderr
    assert "chats.jsonl" in done.stdout
    assert (results / ".containers/tmp/draftstates-was-here").exists(), (
        "its /tmp is not in the results"
    )

"""Images and containers without Apptainer: what a digest covers, what an image must hold, what a
container is shown.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftstates.config import Configuration, Server, resolve
from draftstates.containers import (
    PARTS,
    check_image,
    image_digest,
    image_path,
    present_image,
    shown_to_server,
    shown_to_steps,
)
from draftstates.errors import UserError
from draftstates.server.command import on_gpu
from draftstates.server.lease import lease
from draftstates.server.settings import ServerSettings

REPOSITORY = Path(__file__).parents[2]
# the server's
NOT_OF_STEPS = ("draftstates.capture",)


def configuration(folder: Path, **changes: Any) -> Configuration:
    data = {"sources": [{"name": "a", "files": [str(folder / "data/chats.jsonl")]}]}
    raw = {
        "data": {**data, "max_tokens": 8},
        "model": {"path": str(folder / "model")},
        "capture": {},
        "results": str(folder / "results"),
    }
    return resolve({**raw, **changes}, origin="test")


@pytest.mark.parametrize("name", PARTS)
def test_the_digest_covers_all_that_a_definition_copies(name: str) -> None:
    definition, *parts = PARTS[name]
    section = re.search(
        r"^%files\n(.*?)^%", (REPOSITORY / definition).read_text(), re.MULTILINE | re.DOTALL
    )
    assert section, "it copies nothing"
    assert sorted(line.split()[0] for line in section.group(1).strip().splitlines()) == sorted(
        parts
    )


@pytest.mark.parametrize("change", ["package", "definition", "new file"])
def test_a_change_of_what_an_image_is_made_of_is_refused(change: str, tmp_path: Path) -> None:
    for part in PARTS["sglang"]:
        path = tmp_path / part
        path.parent.mkdir(exist_ok=True)
        if (REPOSITORY / part).is_dir():
            path.mkdir()
            (path / "module.py").write_text("x = 1\n")
        else:
            path.write_text("text\n")
    image = image_path("sglang", tmp_path)
    with pytest.raises(UserError, match="not there: build it with `make images`"):
        check_image("sglang", image, tmp_path)
    image.touch()
    check_image("sglang", image, tmp_path)
    (tmp_path / "draftstates/__pycache__").mkdir()
    (tmp_path / "draftstates/__pycache__/module.pyc").touch()
    check_image("sglang", image, tmp_path)
    path = {
        "package": "draftstates/module.py",
        "definition": "envs/sglang.def",
        "new file": "draftstates/other.py",
    }[change]
    (tmp_path / path).write_text("changed\n")
    now = image_digest("sglang", tmp_path)
    with pytest.raises(UserError, match=f"made of other parts .* then name envs/sglang-{now}.sif"):
        check_image("sglang", image, tmp_path)
    own = tmp_path / "mine.sif"
    own.touch()
    check_image("sglang", own, tmp_path)


def test_no_step_imports_a_package_that_the_tools_leave_out() -> None:
    """Every module and script, where what tools.lock does not name cannot be imported."""
    code = f"""
import importlib, importlib.metadata, pathlib, re, runpy, sys
from importlib.machinery import PathFinder
normal = lambda name: re.sub(r"[-_.]+", "-", name).lower()
locked = {{normal(line.partition("==")[0]) for line in open("envs/tools.lock")}} | {{"draftstates"}}
owners = importlib.metadata.packages_distributions()
class Locked:
    def find_spec(self, name, path=None, target=None):
        there = name not in owners or any(normal(owner) in locked for owner in owners[name])
        return PathFinder.find_spec(name, path, target) if there else None
    def find_distributions(self, *context):
        return PathFinder.find_distributions(*context)
sys.meta_path = [Locked() if finder is PathFinder else finder for finder in sys.meta_path]
for path in sorted(pathlib.Path("draftstates").rglob("*.py")):
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    if not name.startswith({NOT_OF_STEPS!r}):
        importlib.import_module(name)
assert "draftstates.commands.status" in sys.modules
for path in sorted(pathlib.Path("scripts").glob("*.py")):
    sys.argv = [str(path), "--help"]
    try:
        runpy.run_path(str(path))
    except SystemExit as end:
        assert not end.code, path
try:
    importlib.import_module("snakemake")
except ImportError:
    print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("refused\n")


def test_a_step_is_shown_what_the_configuration_names_and_no_more(tmp_path: Path) -> None:
    for name in ("code", "data", "model", "results"):
        (tmp_path / name).mkdir()
    config = configuration(tmp_path)
    shown = shown_to_steps(config, code=tmp_path / "code", work=tmp_path / "code")
    modes = {"code": "rw", "data": "ro", "model": "ro", "results": "rw"}
    assert shown == [f"{tmp_path / name}:{tmp_path / name}:{mode}" for name, mode in modes.items()]
    assert shown_to_server(config) == [
        bind for bind in shown if "code" not in bind and "data" not in bind
    ]


def test_a_step_may_write_to_the_working_directory_and_only_read_the_workflow(
    tmp_path: Path,
) -> None:
    for name in ("code", "data", "model", "results", "work"):
        (tmp_path / name).mkdir()
    code, work = tmp_path / "code", tmp_path / "work"
    shown = shown_to_steps(configuration(tmp_path), code=code, work=work)
    assert f"{code}:{code}:ro" in shown
    assert f"{work}:{work}:rw" in shown


def test_what_lies_in_a_shown_folder_is_shown_once_and_results_below_the_sources_can_be_written(
    tmp_path: Path,
) -> None:
    (tmp_path / "data/results").mkdir(parents=True)
    (tmp_path / "data/code/model").mkdir(parents=True)
    model = {"path": str(tmp_path / "data/code/model"), "prepare": "none"}
    config = configuration(tmp_path, results=str(tmp_path / "data/results"), model=model)
    shown = shown_to_steps(config, code=tmp_path / "data/code", work=tmp_path / "data/code")
    assert [(bind.split(":")[0], bind.split(":")[2]) for bind in shown] == [
        (str(tmp_path / "data"), "ro"),
        (str(tmp_path / "data/code"), "rw"),
        (str(tmp_path / "data/results"), "rw"),
    ]


def test_links_are_followed_to_where_the_files_are(tmp_path: Path) -> None:
    """A model in a hub's cache is a folder of links; a model may be named by a link."""
    for name in ("blobs", "snapshot", "results", "data", "code"):
        (tmp_path / name).mkdir()
    (tmp_path / "blobs/1").touch()
    (tmp_path / "snapshot/config.json").symlink_to(tmp_path / "blobs/1")
    (tmp_path / "model").symlink_to(tmp_path / "snapshot")
    shown = shown_to_server(configuration(tmp_path))
    assert f"{tmp_path}/blobs:{tmp_path}/blobs:ro" in shown
    assert f"{tmp_path}/snapshot:{tmp_path}/snapshot:ro" in shown
    assert f"{tmp_path}/snapshot:{tmp_path}/model:ro" in shown


def test_a_folder_that_apptainer_cannot_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a comma or a colon"):
        shown_to_server(configuration(tmp_path, results=str(tmp_path / "a,b")))


def test_an_image_is_known_by_its_file_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("APPTAINER_CONTAINER", raising=False)
    assert present_image() is None
    monkeypatch.setenv("APPTAINER_CONTAINER", "/images/tools-0123456789ab.sif")
    assert present_image() == "tools-0123456789ab.sif"


@pytest.mark.parametrize("told", ["cuda", "cpu"])
def test_a_step_that_sees_no_gpus_is_told_what_the_server_computes_on(
    told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSTATES_DEVICE", told)
    assert on_gpu(Server()) == (told == "cuda")


def test_a_container_outside_of_a_run_starts_no_server_and_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPTAINER_CONTAINER", "/images/tools-0123456789ab.sif")
    monkeypatch.delenv("DRAFTSTATES_RUN_FOLDER", raising=False)
    settings = ServerSettings(state=tmp_path, log=tmp_path / "log", command=["server"])
    with (
        pytest.raises(UserError, match=r"tools-0123456789ab.sif belongs to no run"),
        lease(settings),
    ):
        pass
    assert not list(tmp_path.iterdir())

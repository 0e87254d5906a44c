"""Runs in containers as an ordinary user.

The images of an ordinary user are FUSE mounts: they die with their container, unlike those of root.
"""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from container_harness import SITE_PACKAGES, traces
from lease_harness import FILES, Playground, addresses, eventually
from test_container_endings import contained
from test_container_runs import configuration

from draftstates.containers import STEP_VARIABLES

NOBODY = 65534
FUSE = Path("/dev/fuse")
# A user does not see a Python in root's home.
PYTHON = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"


def as_user(*command: str | Path) -> list[str]:
    return [
        "setpriv",
        f"--reuid={NOBODY}",
        f"--regid={NOBODY}",
        "--clear-groups",
        *map(str, command),
    ]


@pytest.fixture(scope="module")
def home(code: Path, images: dict[str, Path], demo_model: Path) -> Iterator[Path]:
    """Yield a folder of the user's, with a copy of the workflow and its images.

    All users can use /dev/fuse meanwhile, as on most machines.
    """
    if not FUSE.exists():
        pytest.skip("/dev/fuse is not there: no ordinary user can mount an image")
    mode = stat.S_IMODE(FUSE.stat().st_mode)
    folder = Path(tempfile.mkdtemp(prefix="draftstates-user-", dir="/var/tmp"))
    try:
        FUSE.chmod(0o666)
        shutil.copytree(code, folder / "code")
        shutil.copytree(FILES, folder / "lease")
        # The test needs only a tokenizer.
        without_weights = shutil.ignore_patterns("*.safetensors")
        shutil.copytree(demo_model, folder / "model", ignore=without_weights)
        (folder / "bin").mkdir()
        # Snakemake's hooks run `python`; Debian has no command of that name.
        (folder / "bin/python").symlink_to(PYTHON)
        subprocess.run(["chown", "--recursive", f"{NOBODY}:{NOBODY}", folder], check=True)
        for needed in (PYTHON, SITE_PACKAGES / "torch/__init__.py"):
            if subprocess.run(as_user("test", "-r", needed)).returncode:
                pytest.skip(f"{needed}: not there for an ordinary user")
        yield folder
    finally:
        FUSE.chmod(mode)
        shutil.rmtree(folder)


def environment(home: Path) -> dict[str, str]:
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in (*STEP_VARIABLES, "DRAFTSTATES_RUN_FOLDER")
    }
    shown = {
        "PYTHONPATH": f"{home / 'code'}:{SITE_PACKAGES}",
        "APPTAINER_BIND": f"{SITE_PACKAGES}:{SITE_PACKAGES}:ro",
    }
    return {
        **own,
        **shown,
        "HOME": str(home),
        "TMPDIR": str(home),
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
    }


def test_a_step_runs_in_the_image_and_its_files_are_the_users(
    home: Path, images: dict[str, Path]
) -> None:
    config = configuration(home / "code", images, home / "model")
    config["containers"] = {"tools": f"envs/{images['tools'].name}"}
    (home / "code/config.yaml").write_text(yaml.safe_dump(config))
    (home / "results").mkdir()
    subprocess.run(["chown", "--recursive", f"{NOBODY}:{NOBODY}", home], check=True)
    tokens = home / "results/tokens/demo.parquet"
    command = as_user(
        PYTHON,
        "-m",
        "snakemake",
        "--cores",
        "2",
        tokens,
        "--software-deployment-method",
        "apptainer",
    )
    done = subprocess.run(
        command,
        cwd=home / "code",
        env=environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert json.loads(tokens.with_suffix(".json").read_text())["image"] == images["tools"].name
    assert tokens.stat().st_uid == NOBODY


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_server_whose_owner_ends(
    home: Path, images: dict[str, Path], number: signal.Signals
) -> None:
    folder = home / number.name
    folder.mkdir()
    image = home / "code/envs" / images["sglang"].name
    settings = contained(Playground(folder), image, "--helpers", "2")
    (folder / "settings.json").write_text(
        settings.to_json().replace(str(FILES), str(home / "lease"))
    )
    subprocess.run(["chown", "--recursive", f"{NOBODY}:{NOBODY}", folder], check=True)
    command = as_user(
        PYTHON, home / "lease/shard.py", "out.txt", "--seconds", "600", "--fail", "none"
    )
    owner = subprocess.Popen(command, cwd=folder, env=environment(home), start_new_session=True)
    try:
        eventually(
            lambda: addresses(folder) or owner.poll() is not None,
            within=300,
            what="the server is announced",
        )
        assert owner.poll() is None, (folder / "server.log").read_text()
        assert [line for line in traces(image.name) if "runtime parent" in line]
        mounted = [line for line in traces("squashfuse") if line.startswith("process")]
        assert mounted, "its image is no FUSE mount"
        owner.send_signal(number)
        owner.wait(timeout=20)
        words = (str(folder), image.name, "squashfuse")
        eventually(
            lambda: not traces(*words), within=20, what=f"nothing is left of {traces(*words)}"
        )
    finally:
        owner.kill()

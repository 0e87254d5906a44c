"""Images made by the project's own definitions, and a workflow that runs in them.

Also the traces that containers leave on the host.
"""

import contextlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

from workflow_copy import copy_workflow

from draftstates.containers import image_path

HERE = Path(__file__).parent
# The folder that install.sh makes.
INSTALLED = Path("/var/tmp/draftstates-apptainer")
SITE_PACKAGES = Path(importlib.metadata.distribution("torch").locate_file("")).resolve()


def make_code(folder: Path) -> None:
    """Copy the workflow, with locks cut down to what builds the project.

    So its images take seconds to build. The packages themselves are shown to the containers, out of
    the environment that the tests run in.
    """
    folder.mkdir(parents=True)
    copy_workflow(folder, "examples", "envs", "pyproject.toml", "README.md", "LICENSE")
    lock = f"setuptools=={importlib.metadata.version('setuptools')}\n"
    for name in ("requirements.lock", "envs/tools.lock"):
        (folder / name).write_text(lock)


def build(code: Path) -> dict[str, Path]:
    """Build both images of a folder as `make images` does.

    The root file system is the one that install.sh has made.
    """
    wheels = INSTALLED / "root/wheels"
    lock = (code / "envs/tools.lock").read_text().strip()
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels, lock],
        check=True,
    )
    environment = {**os.environ, "PYTHONPATH": str(code)}
    for name, more in (("tools", []), ("sglang", ["--build-arg", "packages="])):
        command = [
            sys.executable,
            HERE / "namespace_root.py",
            sys.executable,
            code / "scripts/images.py",
            name,
        ]
        done = subprocess.run(
            [*command, "--base", f"localimage:{INSTALLED / 'root'}", *more],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert f"{name}: {os.path.relpath(image_path(name, code), code)}" in done.stdout
    return {name: image_path(name, code) for name in ("tools", "sglang")}


def traces(*words: str) -> list[str]:
    """Return living processes, mounts and loop devices of the host that hold one of the words.

    A process is given by its command line, whatever its parent is.
    """
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                command = (entry / "cmdline").read_bytes().replace(bytes(1), b" ")
                found.append(f"process {entry.name}: {command.decode(errors='replace')}")
    found += [f"mount {line}" for line in Path("/proc/self/mounts").read_text().splitlines()]
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            found.append(f"loop {file.read_text().strip()}")
    return [line for line in found if any(word in line for word in words)]

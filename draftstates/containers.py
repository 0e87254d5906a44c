"""Container images: what they are made of, which one a process runs in, and which folders a container may see.

An image's file name has the digest of what it is made of, `envs/tools-<12 hex digits>.sif`. Not that of its bytes, which differ from
build to build of the same parts: so a name says, before anything is built and on any machine, whether it is this folder's image.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from draftstates.config import state_folder
from draftstates.errors import UserError

# definition, and all that it copies into the image; `tools` has no code: the steps run that of the folder which the workflow lies in
PARTS = {
    "tools": ("envs/tools.def", "envs/tools.lock"),
    "sglang": ("envs/sglang.def", "requirements.lock", "pyproject.toml", "README.md", "schemas", "draftstates"),
}
STEP_VARIABLES = ("APPTAINER_CONTAIN", "APPTAINER_WORKDIR", "APPTAINER_BIND", "APPTAINERENV_PYTHONPATH")
_NAME = re.compile(r"(tools|sglang)-([0-9a-f]{12})\.sif")


def present_image() -> str | None:
    """File name of the image that this process runs in, as Apptainer says; None on the host."""
    path = os.environ.get("APPTAINER_CONTAINER")
    return Path(path).name if path else None


def distinct(images: Iterable[str | None]) -> list[str | None]:
    """Each name once, in order; None, the host, first."""
    return sorted(set(images), key=lambda name: name or "")


def files_digest(files: Iterable[Path], *, root: Path) -> str:
    """SHA-256, 64 hex digits, of the files' paths relative to `root` and their content, in the order given."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def image_digest(name: str, code: Path) -> str:
    """12 hex digits: the image's definition and everything that it copies, by path and content.

    Args:
        name: `tools` or `sglang`; code: the workflow's folder.
    """
    return files_digest((file for part in PARTS[name] for file in _files(code / part)), root=code)[:12]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts)


def image_path(name: str, code: Path) -> Path:
    """Where `make images` puts the image of what lies in `code` now."""
    return code / "envs" / f"{name}-{image_digest(name, code)}.sif"


def check_image(name: str, configured: str, code: Path) -> None:
    """Refuse an image that is not there, or that was made of other parts than lie in `code`. One under a name of its own is not judged.

    Raises:
        UserError: says what to do.
    """
    path = Path(configured)
    if not path.exists():
        raise UserError(f"containers.{name}: {path} is not there: build it with `make images`")
    match = _NAME.fullmatch(path.name)
    if match and match.group(1) == name and match.group(2) != image_digest(name, code):
        now = os.path.relpath(image_path(name, code), code)
        raise UserError(f"containers.{name}: {path} was made of other parts than lie here now: `make images`, then name {now}")


def scratch(config: Mapping[str, Any]) -> Path:
    """What containers write to /tmp, and a server to its home folder, lands here: outside the results nothing may be written."""
    return (Path(config["results"]) / ".containers").resolve()


def shown_to_server(config: Mapping[str, Any]) -> list[str]:
    """Binds, in Apptainer's words, of what a server needs: the model to read, results and state to write."""
    return _binds(_written(config), _model(config))


def shown_to_steps(config: Mapping[str, Any], code: Path) -> list[str]:
    """Binds of what the steps need: all that the configuration names, and the workflow's own folder."""
    named = [Path(name) for source in config["data"]["sources"] for name in source["files"]]
    named += [Path(name) for name in (config["data"]["chat_template"], config["server"]["api_key_file"]) if name]
    written = [code, *_written(config)]
    if config["model"]["prepare"] != "none":
        written.append(Path(config["model"]["path"]).parent)
    return _binds(written, [*_model(config), *(path if path.is_dir() else path.parent for path in named)])


def step_environment(config: Mapping[str, Any], code: Path) -> dict[str, str]:
    """Variables by which Apptainer gives each step what it may see, and nothing else of the host but the network.

    What APPTAINER_BIND and PYTHONPATH name already stays.
    """
    binds = dict.fromkeys([*filter(None, os.environ.get("APPTAINER_BIND", "").split(",")), *shown_to_steps(config, code)])
    python_path = dict.fromkeys([str(code), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    values = ("1", str(scratch(config)), ",".join(binds), os.pathsep.join(python_path))
    return dict(zip(STEP_VARIABLES, values, strict=True))


def _written(config: Mapping[str, Any]) -> list[Path]:
    return [Path(config["results"]), state_folder(config)]


def _model(config: Mapping[str, Any]) -> list[Path]:
    """The model's folder, and those that its links lead to, as in a hub's cache."""
    folder = Path(config["model"]["path"])
    return [folder, *sorted({link.resolve().parent for link in folder.glob("*") if link.is_symlink()})]


def _binds(written: Iterable[Path], read: Iterable[Path]) -> list[str]:
    """Each folder at its real place, to write or to read alone; and where a link outside all of them names it, there too."""
    modes = {path.resolve(): "ro" for path in read} | {path.resolve(): "rw" for path in written}
    binds = []
    for path, mode in sorted(modes.items()):  # a folder before those in it, so that none is hidden
        above = next((modes[parent] for parent in path.parents if parent in modes), None)
        if above is None or (above, mode) == ("ro", "rw"):
            binds.append((path, path, mode))
    for path in map(Path, map(os.path.abspath, [*read, *written])):
        if path != path.resolve() and not any(path.is_relative_to(folder) for folder in modes):
            binds.append((path.resolve(), path, modes[path.resolve()]))
    for source, *_ in binds:
        if set(",:") & set(str(source)):
            raise UserError(f"{source}: Apptainer cannot show a container a folder whose name has a comma or a colon; name it by a link")
    return [f"{source}:{place}:{mode}" for source, place, mode in dict.fromkeys(binds)]

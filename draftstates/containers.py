"""Container images: their parts, the image of this process, and the folders that a container sees.

An image's file name has the digest of its parts, `envs/tools-<12 hex digits>.sif`. It is not the
digest of its bytes, which differ between two builds of the same parts. So the name says, before any
build and on any machine, whether an image is made of the parts in this folder.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from draftstates.config import Configuration
from draftstates.errors import UserError
from draftstates.files import files_digest
from draftstates.paths import Results

# definition, and all files that it copies into the image; `tools` has no code: the steps run the
# code in the workflow's folder
PARTS = {
    "tools": ("envs/tools.def", "envs/tools.lock"),
    "sglang": (
        "envs/sglang.def",
        "requirements.lock",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "draftstates",
    ),
}
STEP_VARIABLES = (
    "APPTAINER_CONTAIN",
    "APPTAINER_WORKDIR",
    "APPTAINER_BIND",
    "APPTAINERENV_PYTHONPATH",
)
_NAME = re.compile(r"(tools|sglang)-([0-9a-f]{12})\.sif")


def present_image() -> str | None:
    """Return the file name of this process's image, as Apptainer names it; None on the host."""
    path = os.environ.get("APPTAINER_CONTAINER")
    return Path(path).name if path else None


def distinct(images: Iterable[str | None]) -> list[str | None]:
    """Return each name once, in order; None, which is the host, comes first."""
    return sorted(set(images), key=lambda name: name or "")


def image_digest(name: str, code: Path) -> str:
    """Return the digest of an image's parts, by path and content: 12 hex digits.

    Args:
        name: `tools` or `sglang`.
        code: the workflow's folder.
    """
    return files_digest((file for part in PARTS[name] for file in _files(code / part)), root=code)[
        :12
    ]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(
        file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts
    )


def image_path(name: str, code: Path) -> Path:
    """Return the path at which `make images` puts the image of the present parts in `code`."""
    return code / "envs" / f"{name}-{image_digest(name, code)}.sif"


def check_image(name: str, path: Path, code: Path) -> None:
    """Refuse an image that is missing, or that was made of other parts than those in `code`.

    An image whose name `make images` would not give is not compared with the parts.

    Raises:
        UserError: the image is refused; the message says what to do.
    """
    if not path.exists():
        raise UserError(f"containers.{name}: {path} is not there: build it with `make images`")
    match = _NAME.fullmatch(path.name)
    if match and match.group(1) == name and match.group(2) != image_digest(name, code):
        now = os.path.relpath(image_path(name, code), code)
        raise UserError(
            f"containers.{name}: {path} was made of other parts than lie here now: `make images`,"
            f" then name {now}"
        )


def scratch(config: Configuration) -> Path:
    """Return the folder in which the containers' /tmp and a server's home folder lie.

    It lies in the results, since nothing may be written outside them.
    """
    return Results(config.results).containers.resolve()


def shown_to_server(config: Configuration) -> list[str]:
    """Return the binds that a server needs, in Apptainer's syntax.

    The model is bound to read, results and state are bound to write.
    """
    return _binds(_written(config), _model(config))


def shown_to_steps(config: Configuration, *, code: Path, work: Path) -> list[str]:
    """Return the binds that the steps need, in Apptainer's syntax.

    They are all files and folders that the configuration names, the workflow's folder to read, and
    the working directory to write.

    Args:
        config: resolved configuration.
        code: folder of the workflow.
        work: working directory of the run.
    """
    named = [path for source in config.data.sources for path in source.files]
    named += filter(None, (config.data.chat_template, config.server.api_key_file))
    written = [work, *_written(config)]
    if config.model.prepare != "none":
        written.append(config.model.path.parent)
    return _binds(
        written,
        [code, *_model(config), *(path if path.is_dir() else path.parent for path in named)],
    )


def step_environment(config: Configuration, *, code: Path, work: Path) -> dict[str, str]:
    """Return the variables by which Apptainer shows each step the folders that it may see.

    A step sees nothing else of the host but the network. Present entries of APPTAINER_BIND and
    PYTHONPATH stay.

    Args:
        config: resolved configuration.
        code: folder of the workflow.
        work: working directory of the run.
    """
    binds = dict.fromkeys(
        [
            *filter(None, os.environ.get("APPTAINER_BIND", "").split(",")),
            *shown_to_steps(config, code=code, work=work),
        ]
    )
    python_path = dict.fromkeys(
        [str(code), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    )
    values = ("1", str(scratch(config)), ",".join(binds), os.pathsep.join(python_path))
    return dict(zip(STEP_VARIABLES, values, strict=True))


def _written(config: Configuration) -> list[Path]:
    return [config.results, config.state_folder]


def _model(config: Configuration) -> list[Path]:
    """Return the model's folder and the folders to which its links lead, as in a hub's cache."""
    folder = config.model.path
    return [
        folder,
        *sorted({link.resolve().parent for link in folder.glob("*") if link.is_symlink()}),
    ]


def _binds(written: Iterable[Path], read: Iterable[Path]) -> list[str]:
    """Return the binds of folders to write and of folders to read only.

    Each folder is bound at its real place. Where a link outside all folders names it, it is bound
    at the link's place too.
    """
    modes = {path.resolve(): "ro" for path in read} | {path.resolve(): "rw" for path in written}
    binds = []
    # a folder comes before the folders in it, so that it hides none of them
    for path, mode in sorted(modes.items()):
        above = next((modes[parent] for parent in path.parents if parent in modes), None)
        if above is None or (above, mode) == ("ro", "rw"):
            binds.append((path, path, mode))
    for path in map(Path, map(os.path.abspath, [*read, *written])):
        if path != path.resolve() and not any(path.is_relative_to(folder) for folder in modes):
            binds.append((path.resolve(), path, modes[path.resolve()]))
    for source, *_ in binds:
        if set(",:") & set(str(source)):
            raise UserError(
                f"{source}: Apptainer cannot show a container a folder whose name has a comma or a"
                " colon; name it by a link"
            )
    return [f"{source}:{place}:{mode}" for source, place, mode in dict.fromkeys(binds)]

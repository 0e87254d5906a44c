"""Build the missing container images, each named by the digest of its parts.

At the end, print how a configuration names them.
"""

import argparse
import os
import subprocess
from pathlib import Path

from draftstates.containers import PARTS, image_digest, image_path
from draftstates.errors import UserError, run_command
from draftstates.files import publish

CODE = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", nargs="*", choices=[*PARTS, []], help="all where left out")
    parser.add_argument(
        "--base",
        help=(
            "another base: docker:<image>, or localimage:<image file or root folder> for no network"
        ),
    )
    parser.add_argument(
        "--build-arg",
        action="append",
        default=[],
        help="name=value, for an argument of a definition",
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        help="for apptainer build, such as --option=--bind=/etc/pip.conf",
    )
    arguments = parser.parse_args()
    options = [*arguments.option, *(f"--build-arg={value}" for value in arguments.build_arg)]
    if arguments.base:
        bootstrap, _, origin = arguments.base.partition(":")
        options += [f"--build-arg=bootstrap={bootstrap}", f"--build-arg=from={origin}"]
    print("containers:")
    for name in arguments.images or PARTS:
        path = image_path(name, CODE)
        if not path.exists():
            build(name, path, options)
        print(f"  {name}: {path.relative_to(CODE)}", flush=True)


def build(name: str, path: Path, options: list[str]) -> None:
    """Build an image; its final name exists only when it is complete.

    Raises:
        UserError: Apptainer is missing or has failed; Apptainer's own output says why.
    """
    partial = path.with_suffix(f".{os.getpid()}.partial")
    digest = f"--build-arg=digest={image_digest(name, CODE)}"
    try:
        # Apptainer is where its user's PATH finds it
        done = subprocess.run(
            ["apptainer", "build", *options, digest, str(partial), PARTS[name][0]],  # noqa: S607
            cwd=CODE,
            stdout=2,
        )
        if done.returncode:
            raise UserError(
                f"apptainer build {PARTS[name][0]} failed with status {done.returncode}"
            )
        publish(partial, path)
    except OSError as error:
        raise UserError(
            f"apptainer cannot be run: {error.strerror}; images are built with Apptainer 1.2 or"
            " newer"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


if __name__ == "__main__":
    run_command(main)

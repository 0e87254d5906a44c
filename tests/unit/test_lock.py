"""The lock holds what the project needs: installing it alone, without looking for dependencies, leaves nothing out."""

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
    """Top names of what the folder's files import, at their start or when they need it, without Python's own and the project."""
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
    assert not {name for name in imported if not {normal(each) for each in distributions[name]} & declared}


def test_every_dependency_is_locked_at_a_version_that_it_allows() -> None:
    lines = (REPOSITORY / "requirements.lock").read_text().split()
    locked = {normal(name): version for name, _, version in (line.partition("==") for line in lines)}
    assert all(locked.values()), "a line of the lock names no exact version"
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for requirement in map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["test"]]):
        assert normal(requirement.name) in locked, f"{requirement} is not locked"
        assert requirement.specifier.contains(locked[normal(requirement.name)]), f"{requirement}: locked at another version"

"""The lock holds what the project needs: installing it alone, without looking for dependencies, leaves nothing out."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[2]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_dependency_is_locked_at_a_version_that_it_allows() -> None:
    lines = (REPOSITORY / "requirements.lock").read_text().split()
    locked = {normal(name): version for name, _, version in (line.partition("==") for line in lines)}
    assert all(locked.values()), "a line of the lock names no exact version"
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for requirement in map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["test"]]):
        assert normal(requirement.name) in locked, f"{requirement} is not locked"
        assert requirement.specifier.contains(locked[normal(requirement.name)]), f"{requirement}: locked at another version"

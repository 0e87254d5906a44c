"""The profile for Slurm names every rule that asks for all cores or waits for a server."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def profile() -> dict[str, Any]:
    return yaml.safe_load((REPOSITORY / "profiles" / "slurm" / "profile.yaml").read_text())


@pytest.fixture(scope="module")
def rules() -> dict[str, str]:
    """Return the text of each rule by its name."""
    text = "".join(path.read_text() for path in sorted((REPOSITORY / "rules").glob("*.smk")))
    parts = re.split(r"^ *(?:rule|checkpoint) (\w+):\n", text, flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert {"tokenise", "prompts", "answer", "extract"} <= found.keys()
    return found


def test_no_job_asks_a_node_for_all_cores_of_any_machine(
    profile: dict[str, Any], rules: dict[str, str]
) -> None:
    greedy = {
        name
        for name, text in rules.items()
        if re.search(r"^ *threads: (1024|parity_threads)$", text, re.MULTILINE)
    }
    assert greedy == {"tokenise", "prompts", "parity"}
    assert greedy <= profile["set-threads"].keys()


def test_each_job_that_uses_a_server_has_its_own_time_limit(
    profile: dict[str, Any], rules: dict[str, str]
) -> None:
    using = {name for name, text in rules.items() if "streams=1" in text}
    assert {"answer", "extract"} <= using
    assert using <= profile["set-resources"].keys()

"""The pages for users: their links lead somewhere, and what they show to copy is accepted."""

import argparse
import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from synthetic import capture_spec, small

from draftstates.commands import cli

REPOSITORY = Path(__file__).parents[2]
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
]


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a page in a language, `` for those without one."""
    text = page.read_text()
    return re.findall(rf"^ *```{language}\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_the_readme_leads_to_every_page() -> None:
    text = (REPOSITORY / "README.md").read_text()
    pages = {f"docs/{page.name}" for page in (REPOSITORY / "docs").glob("*.md")}
    assert {page for page in pages if f"]({page})" not in text} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_to_copy_are_commands(page: Path) -> None:
    for block in blocks(page, ""):
        for line in block.splitlines():
            if line.strip().startswith("draftstates "):
                assert cli.parser(shlex.split(line, comments=True)[1:])


def test_the_page_of_commands_has_each_command_and_its_json() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| .* \|(.*)\|$",
        (REPOSITORY / "docs" / "commands.md").read_text(),
        re.MULTILINE,
    )
    assert [name for name, _ in rows] == list(cli.COMMANDS)
    for name, json in rows:
        parser = argparse.ArgumentParser()
        importlib.import_module(f"draftstates.commands.{name}").add_arguments(parser)
        assert ("--json" in parser.format_help()) == bool(json.strip()), name


def test_the_readmes_training_loop_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop runs on samples of the demo's shape, apart from the size of its vocabulary."""
    loop, _ = blocks(REPOSITORY / "README.md", "python")
    folder = tmp_path / "results" / "SmolLM2-135M-Instruct-411915ca"
    small(folder, spec=capture_spec(layers=(2, 15, 27), num_layers=30, hidden_size=576))
    monkeypatch.chdir(tmp_path)
    assert "49152" in loop
    found: dict[str, Any] = {}
    exec(loop.replace("49152", "100"), found)  # noqa: S102
    assert 0 < found["loss"].item() < 10

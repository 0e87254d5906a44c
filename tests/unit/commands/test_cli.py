"""The console command: its help, and that each command is handed on to its module."""

import argparse
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from draftstates.commands import cli

REPOSITORY = Path(__file__).parents[3]


def test_the_help_lists_every_command_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    lines = " ".join(capsys.readouterr().out.split())
    assert all(f"{name} {line}" in lines for name, line in cli.COMMANDS.items())


def test_every_command_has_a_module_and_every_module_is_a_command() -> None:
    modules = {path.stem for path in (REPOSITORY / "draftstates" / "commands").glob("*.py")}
    assert modules - {"__init__", "cli"} == set(cli.COMMANDS)
    script = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    assert script == {"draftstates": "draftstates.commands.cli:main"}


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_commands_help_has_an_example_that_its_parser_reads(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"draftstates.commands.{name}")
    with pytest.raises(SystemExit) as end:
        cli.main([name, "--help"])
    assert end.value.code == 0
    assert module.EXAMPLE in capsys.readouterr().out
    program, *arguments = module.EXAMPLE.split()
    assert program == "draftstates"
    assert cli.parser(arguments).main is module.main


def test_a_command_gets_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[argparse.Namespace] = []
    monkeypatch.setattr(importlib.import_module("draftstates.commands.prune"), "main", given.append)
    cli.main(["prune", "--results", "elsewhere", "--delete"])
    assert (given[0].results, given[0].delete) == (Path("elsewhere"), True)


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["prnue"])
    assert end.value.code == 2
    assert "prnue" in capsys.readouterr().err


def test_the_help_imports_no_command() -> None:
    code = (
        "import sys; from draftstates.commands import cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit:\n"
        "    commands = {f'draftstates.commands.{name}' for name in cli.COMMANDS}\n"
        "    sys.exit(bool((commands | {'torch'}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_users_error_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^error: .*plan\.json"):
        cli.main(["accounting", "--results", str(tmp_path)])

"""The console command `draftstates`."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from draftstates.errors import UserError, run_command

# set, it shows where a fault of the package itself comes from
TRACEBACK = "DRAFTSTATES_TRACEBACK"
# In the order of use. Only the module of the command that runs is imported.
COMMANDS = {
    "doctor": "examine a running SGLang server, or this machine, before a capture",
    "status": "show what a run is doing: shards, rates, failures, time left",
    "accounting": "print what became of every row, and where the manifest is",
    "show": "show samples with their supervised tokens marked",
    "parity": "compare captured samples with a forward pass by Hugging Face",
    "export": "write a manifest in the format of a trainer",
    "compact": "write a smaller copy of a capture's shards",
    "prune": "remove shards that nothing lists, and what killed jobs left",
    "serve": "keep the configured server up, or print its command",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; print an error as one line on stderr and exit with status 1."""
    arguments = parser(sys.argv[1:] if argv is None else argv)
    run_command(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> None:
    """Run the command; a fault of its own is an error of one line too."""
    try:
        arguments.main(arguments)
    except (UserError, OSError):
        raise
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        raise UserError(
            f"{type(error).__name__}: {error}: a fault of draftstates itself; with {TRACEBACK}=1 it"
            " says where"
        ) from error


def parser(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Args:
        argv: the command's name and its arguments.

    Returns:
        the arguments; `main` is the function that takes them.
    """
    top = argparse.ArgumentParser(
        prog="draftstates",
        description="Look at, check and pass on what the workflow has made.",
        epilog="draftstates COMMAND --help describes a command.",
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, line in COMMANDS.items():
        command = commands.add_parser(
            name, help=line, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if [name] == list(argv[:1]):
            _fill(command, importlib.import_module(f"draftstates.commands.{name}"))
    return top.parse_args(argv)


def _fill(command: argparse.ArgumentParser, module: ModuleType) -> None:
    """Fill a command's parser from its module: description, example, arguments, function."""
    command.description = module.__doc__
    command.epilog = f"example:\n  {module.EXAMPLE}"
    module.add_arguments(command)
    command.set_defaults(main=module.main)


if __name__ == "__main__":
    main()

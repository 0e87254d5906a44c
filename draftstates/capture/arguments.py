"""SGLang's own argument parser, asked before a server is started.

Command: `python -m draftstates.capture.arguments ARGUMENTS...` refuses what SGLang would refuse.
The import of SGLang takes seconds, so the workflow runs this as a process, once for equal
arguments.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import NoReturn

from draftstates.errors import UserError, run_command


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return SGLang's reading of arguments; abbreviated flags are unknown.

    Raises:
        UserError: SGLang has no such flag, or the flag takes another value.
    """
    # `--model-path` is required, and every server has one
    return _parser().parse_args(["--model-path", "model", *arguments])


def names() -> dict[str, list[str]]:
    """Return the flags of each field of SGLang's arguments, by the field's name."""
    found: dict[str, list[str]] = {}
    for action in _parser()._actions:
        found.setdefault(action.dest, []).extend(action.option_strings)
    return found


@functools.cache
def _parser() -> _Parser:
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(prog="sglang", allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return parser


def main() -> None:
    parse(sys.argv[1:])


if __name__ == "__main__":
    run_command(main)

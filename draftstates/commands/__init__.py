"""Commands that people run by hand, one module per command; `cli` has their list."""

import argparse
import json
from pathlib import Path


def add_results(parser: argparse.ArgumentParser) -> None:
    """Give a command the flag --results."""
    parser.add_argument(
        "--results", type=Path, default=Path("results"), help="`results` of the configuration"
    )


def add_json(parser: argparse._ActionsContainer) -> None:
    """Give a command the flag --json."""
    parser.add_argument("--json", action="store_true", help="print JSON, for a program to read")


def print_json(document: object) -> None:
    """Print a document of plain values; a path is its text."""
    print(json.dumps(document, indent=1, default=str, ensure_ascii=False))

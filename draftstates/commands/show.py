"""Samples with their supervised tokens marked, in the terminal or as an HTML page."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from draftstates.commands import add_json, print_json
from draftstates.errors import UserError
from draftstates.files import publish_text
from draftstates.report.samples import (
    as_document,
    as_terminal,
    find_sample,
    marked,
    page_of,
    spread_samples,
    title,
)
from draftstates.tokens.encoder import load_tokenizer

EXAMPLE = "draftstates show results/tokens/demo.parquet --tokenizer models/SmolLM2-135M-Instruct"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "tokens",
        type=Path,
        nargs="+",
        help="Parquet files of sources, such as results/tokens/demo.parquet",
    )
    parser.add_argument("--tokenizer", required=True, type=Path, help="folder with the tokenizer")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the Python code in that folder"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--sample", help="sample id, or its beginning")
    which.add_argument("--row", type=int, help="row of the source, counted from 0")
    which.add_argument(
        "--count",
        type=int,
        default=1,
        help="samples of each source, evenly spread; default: 1, the first",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--html", type=Path, help="write a page instead")
    add_json(instead)


def main(arguments: argparse.Namespace) -> None:
    """Print the chosen samples, or write them as a page."""
    one = arguments.sample is not None or arguments.row is not None
    if len(arguments.tokens) > 1 and one:
        raise UserError(
            f"--sample and --row look in one file: expected one, found {len(arguments.tokens)}"
        )
    found = [
        (path.stem, sample) for path in arguments.tokens for sample in _chosen(path, arguments)
    ]
    tokenizer = load_tokenizer(arguments.tokenizer, trust_remote_code=arguments.trust_remote_code)
    if arguments.json:
        print_json([as_document(source, sample, tokenizer) for source, sample in found])
        return
    if arguments.html:
        publish_text(page_of(found, tokenizer), arguments.html)
        return
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for source, sample in found:
        print(f"{title(source, sample)}\n{as_terminal(marked(tokenizer, sample), colour=colour)}\n")


def _chosen(path: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the samples of one source that the arguments choose."""
    if arguments.sample is None and arguments.row is None:
        return spread_samples(path, count=arguments.count)
    return find_sample(path, sample_id=arguments.sample, row=arguments.row)

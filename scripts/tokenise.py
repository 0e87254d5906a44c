"""Tokenise one source of the configuration."""

import argparse
from pathlib import Path

from draftstates.answers.journal import remove_journals
from draftstates.config import load
from draftstates.errors import run_command
from draftstates.tokens.sources import source_options
from draftstates.tokens.tokenise import tokenise_source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", required=True, help="name of the source in data.sources")
    parser.add_argument("--config", required=True, type=Path, help="configuration")
    parser.add_argument(
        "--tokenizer", required=True, type=Path, help="folder with tokenizer and chat template"
    )
    parser.add_argument(
        "--output", required=True, type=Path, help="Parquet file of samples to write"
    )
    parser.add_argument(
        "--accounting", required=True, type=Path, help="JSON file that accounts for every row"
    )
    parser.add_argument(
        "--answered",
        type=Path,
        help="folder of the target model's answers to the source's prompts",
    )
    parser.add_argument("--workers", type=int, default=1, help="processes")
    arguments = parser.parse_args()
    paths, options = source_options(load(arguments.config), arguments.source)
    tokenise_source(
        name=arguments.source,
        paths=[arguments.answered] if arguments.answered else paths,
        tokenizer_path=arguments.tokenizer,
        options=options,
        output=arguments.output,
        accounting=arguments.accounting,
        workers=arguments.workers,
    )
    if arguments.answered:
        remove_journals(arguments.answered)


if __name__ == "__main__":
    run_command(main, lasting=True)

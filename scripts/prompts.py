"""Write the prompts of a source with `answers`, and cut them into chunks."""

import argparse
from pathlib import Path

from draftstates.answers.prompts import write_prompts
from draftstates.config import load
from draftstates.errors import run_command
from draftstates.tokens.sources import source_options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", required=True, help="name of the source in data.sources")
    parser.add_argument("--config", required=True, type=Path, help="configuration")
    parser.add_argument(
        "--tokenizer", required=True, type=Path, help="folder with tokenizer and chat template"
    )
    parser.add_argument(
        "--output", required=True, type=Path, help="Parquet file; its chunks appear beside it"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes")
    arguments = parser.parse_args()
    paths, options = source_options(load(arguments.config), arguments.source)
    prompts = write_prompts(
        source=arguments.source,
        paths=paths,
        tokenizer_path=arguments.tokenizer,
        options=options,
        output=arguments.output,
        workers=arguments.workers,
    )
    asked = sum(chunk.prompts for chunk in prompts.chunks)
    print(f"{prompts.rows:,} rows, {asked:,} prompts in {len(prompts.chunks):,} chunks")


if __name__ == "__main__":
    run_command(main)

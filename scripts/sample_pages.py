"""Write a page with a few samples of each source, their supervised tokens marked."""

import argparse
from pathlib import Path

from draftstates.errors import run_command
from draftstates.files import publish_text
from draftstates.report.samples import page_of, spread_samples
from draftstates.tokens.encoder import load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokens", type=Path, nargs="+", help="Parquet files of the sources")
    parser.add_argument("--tokenizer", required=True, type=Path, help="folder with the tokenizer")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the Python code in that folder"
    )
    parser.add_argument("--count", type=int, required=True, help="samples of each source")
    parser.add_argument("--output", type=Path, required=True, help="HTML page")
    arguments = parser.parse_args()
    found = [
        (path.stem, sample)
        for path in arguments.tokens
        for sample in spread_samples(path, count=arguments.count)
    ]
    tokenizer = load_tokenizer(arguments.tokenizer, trust_remote_code=arguments.trust_remote_code)
    publish_text(page_of(found, tokenizer), arguments.output)


if __name__ == "__main__":
    run_command(main)

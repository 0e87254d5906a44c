"""Write the report of a run, or of its tokens alone, before the capture."""

import argparse
from pathlib import Path

from draftstates.errors import run_command
from draftstates.files import publish_text
from draftstates.report.gather import gather
from draftstates.report.page import page
from draftstates.tokens.encoder import load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path, help="results/plan.json; all else lies beside it")
    parser.add_argument("--tokenizer", required=True, type=Path, help="folder with the tokenizer")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the Python code in that folder"
    )
    parser.add_argument(
        "--draft-vocab-size", type=int, help="mark this size of a drafter's vocabulary"
    )
    parser.add_argument(
        "--tokens-alone", action="store_true", help="leave out what a capture makes"
    )
    parser.add_argument(
        "--tokens-per-second", type=float, help="assumed rate of the capture, for the hours"
    )
    parser.add_argument("--output", type=Path, required=True, help="HTML page")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.tokenizer, trust_remote_code=arguments.trust_remote_code)
    numbers = gather(
        arguments.plan,
        tokenizer,
        captured=not arguments.tokens_alone,
        tokens_per_second=arguments.tokens_per_second,
        draft_vocab_size=arguments.draft_vocab_size,
    )
    publish_text(page(numbers), arguments.output)


if __name__ == "__main__":
    run_command(main)

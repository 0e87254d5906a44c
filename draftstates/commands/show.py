"""Show samples with their targets marked, in the terminal or as an HTML page."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from draftstates.building import publish_text
from draftstates.cli import run
from draftstates.tokens.show import as_html, as_terminal, find_sample, html_page, runs, spread_samples
from draftstates.tokens.tokenizer import load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokens", type=Path, nargs="+", help="Parquet files of sources, such as results/tokens/demo.parquet")
    parser.add_argument("--tokenizer", required=True, type=Path, help="folder with the tokenizer")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the Python code in that folder")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--sample", help="id of the sample, or its beginning")
    which.add_argument("--row", type=int, help="row of the source, counted from 0")
    which.add_argument("--count", type=int, default=1, help="so many samples of each source, evenly spread; the first where left out")
    parser.add_argument("--html", type=Path, help="write a page instead")
    arguments = parser.parse_args()
    if len(arguments.tokens) > 1 and not (arguments.sample is None and arguments.row is None):
        parser.error("--sample and --row look in one file")
    found = [(path.stem, sample) for path in arguments.tokens for sample in chosen(path, arguments)]
    tokenizer = load_tokenizer(arguments.tokenizer, trust_remote_code=arguments.trust_remote_code)
    pages = []
    for source, sample in found:
        targets = sum(sample["loss_mask"])
        title = f"sample {sample['sample_id']}, row {sample['row']} of {source}: {len(sample['input_ids'])} tokens, {targets} targets"
        marked = runs(tokenizer, sample["input_ids"], sample["loss_mask"])
        if arguments.html:
            pages.append(as_html(marked, title=title))
        else:
            colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
            print(f"{title}\n{as_terminal(marked, colour=colour)}\n")
    if arguments.html:
        publish_text(html_page(pages), arguments.html)


def chosen(path: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What is to be shown of one source."""
    if arguments.sample is None and arguments.row is None:
        return spread_samples(path, count=arguments.count)
    return find_sample(path, sample_id=arguments.sample, row=arguments.row)


run(main)

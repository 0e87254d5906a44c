"""Lengths, targets, skipped rows and duplicates of each source; bytes and hours that the capture will take."""

import argparse
import json
from pathlib import Path

from draftstates.building import publish_text
from draftstates.cli import run
from draftstates.plan_file import read_plan
from draftstates.tokens.statistics import as_html, as_text, statistics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path, help="results/plan.json; the tokens lie in tokens/ beside it")
    parser.add_argument("--tokens-per-second", type=float, help="assumed rate of the capture, for the hours")
    parser.add_argument("--output", type=Path, help="write them as JSON too")
    parser.add_argument("--html", type=Path, help="and as a page")
    arguments = parser.parse_args()
    found = statistics(
        read_plan(arguments.plan), tokens_folder=arguments.plan.parent / "tokens", tokens_per_second=arguments.tokens_per_second
    )
    if arguments.output:
        publish_text(json.dumps(found, indent=1) + "\n", arguments.output)
    if arguments.html:
        publish_text(as_html(found), arguments.html)
    print(as_text(found))


run(main)

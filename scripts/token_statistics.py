"""Write the statistics of each source, and the bytes and hours that the capture will take.

They cover lengths, supervised tokens, skipped rows and duplicates.
"""

import argparse
from pathlib import Path

from draftstates.errors import run_command
from draftstates.files import publish_json, publish_text
from draftstates.paths import Results
from draftstates.records import Plan
from draftstates.report.statistics import as_html, as_text, statistics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "plan", type=Path, help="results/plan.json; the tokens lie in tokens/ beside it"
    )
    parser.add_argument(
        "--tokens-per-second", type=float, help="assumed rate of the capture, for the hours"
    )
    parser.add_argument("--output", type=Path, help="write them as JSON too")
    parser.add_argument("--html", type=Path, help="and as a page")
    arguments = parser.parse_args()
    found = statistics(
        Plan.read(arguments.plan),
        tokens_folder=Results.of_plan(arguments.plan).tokens_folder,
        tokens_per_second=arguments.tokens_per_second,
    )
    if arguments.output:
        publish_json(found, arguments.output)
    if arguments.html:
        publish_text(as_html(found), arguments.html)
    print(as_text(found))


if __name__ == "__main__":
    run_command(main)

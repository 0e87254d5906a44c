"""Accounting of the planned capture.

It lists the rows in, kept and skipped by reason, the tokens, the bytes, and the path of the
manifest.
"""

import argparse
from pathlib import Path

from draftstates.paths import Results
from draftstates.records import Manifest, Plan
from draftstates.report.accounting import table

EXAMPLE = "draftstates accounting --results results"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--results", type=Path, default=Path("results"), help="`results` of the configuration"
    )


def main(arguments: argparse.Namespace) -> None:
    """Print the table, or say why the plan has no manifest."""
    results = Results(arguments.results)
    planned = Plan.read(results.plan)
    manifest = results.capture(planned.capture_folder).manifest
    if not manifest.exists():
        print("no manifest yet: only a part of the workflow was asked for")
        return
    content = Manifest.read(manifest)
    if [shard.shard_id for shard in content.shards] != [shard.shard_id for shard in planned.shards]:
        print(f"{manifest} is that of an earlier plan: only a part of the workflow was asked for")
        return
    print(table(content, path=manifest))

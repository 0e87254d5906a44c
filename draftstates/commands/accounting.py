"""Accounting of the planned capture.

It lists the rows in, kept and skipped by reason, the tokens, the bytes, and the path of the
manifest.
"""

import argparse
import dataclasses

from draftstates.commands import add_json, add_results, print_json
from draftstates.errors import UserError
from draftstates.paths import Results
from draftstates.records import Manifest, Plan
from draftstates.report.accounting import table

EXAMPLE = "draftstates accounting --results results"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_results(parser)
    add_json(parser)


def main(arguments: argparse.Namespace) -> None:
    """Print the table, or say why the plan has no manifest.

    As JSON, the latter is an error.
    """
    results = Results(arguments.results)
    planned = Plan.read(results.plan)
    manifest = results.capture(planned.capture_folder).manifest
    content = Manifest.read(manifest) if manifest.exists() else None
    missing = ""
    if content is None:
        missing = "no manifest yet: only a part of the workflow was asked for"
    elif [shard.shard_id for shard in content.shards] != [each.shard_id for each in planned.shards]:
        missing = (
            f"{manifest} is that of an earlier plan: only a part of the workflow was asked for"
        )
    if missing and arguments.json:
        raise UserError(missing)
    if missing or content is None:
        print(missing)
    elif arguments.json:
        totals = dataclasses.asdict(content.totals)
        sources = {name: dataclasses.asdict(each) for name, each in content.sources.items()}
        shards = len(content.shards)
        print_json({"manifest": manifest, "shards": shards, "totals": totals, "sources": sources})
    else:
        print(table(content, path=manifest))

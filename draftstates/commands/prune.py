"""Removal of the shards that neither their capture's manifest lists nor the present plan asks for.

Files that killed jobs left are removed too. Without --delete, the command only lists all these.

If a capture has no manifest, only its unfinished shards are removed: those that no process holds
and that nobody has written to for an hour.

A later shard cannot take rows from a removed one, and captures them instead.
"""

import argparse
import dataclasses

from draftstates.commands import add_json, add_results, print_json
from draftstates.errors import UserError
from draftstates.plan.words import of_bytes
from draftstates.report.prune import remove, unfinished, unlisted

EXAMPLE = "draftstates prune --results results --delete"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_results(parser)
    parser.add_argument("--delete", action="store_true", help="remove them")
    add_json(parser)


def main(arguments: argparse.Namespace) -> None:
    """List what can be removed, and remove it with --delete."""
    if not arguments.results.is_dir():
        raise UserError(f"{arguments.results}: expected the results folder of a run, found none")
    found, left = unlisted(arguments.results), unfinished(arguments.results)
    if arguments.delete:
        remove(found, left)
    if arguments.json:
        shards = [dataclasses.asdict(shard) for shard in found]
        unfinished_ones = [dataclasses.asdict(each) for each in left]
        removed = arguments.delete
        print_json({"shards": shards, "unfinished": unfinished_ones, "removed": removed})
        return
    for shard in found:
        print(f"{shard.capture_folder}/{shard.shard_id}  {of_bytes(shard.bytes)}")
    for each in left:
        print(f"{each.folder.relative_to(arguments.results)}  {of_bytes(each.bytes)}")
    total = sum(each.bytes for each in (*found, *left))
    outcome = (
        "removed"
        if arguments.delete
        else "to remove: run again with --delete"
        if found or left
        else "to remove"
    )
    print(f"{len(found):,} shards and {len(left):,} unfinished ones, {of_bytes(total)} {outcome}")

"""Removal of the shards that neither their capture's manifest lists nor the present plan asks for.

Files that killed jobs left are removed too, and answers by the target model to prompts, or under
settings, that are no longer those of a source's tokens. Without --delete, the command only lists
all these.

If a capture has no manifest, only its unfinished shards are removed: those that no process holds
and that nobody has written to for an hour.

A later shard cannot take rows from a removed one, and captures them instead. A removed answer is
asked for again if its prompt and its settings come back.
"""

import argparse
import dataclasses

from draftstates.commands import add_json, add_results, print_json
from draftstates.errors import UserError
from draftstates.plan.words import of_bytes
from draftstates.report.prune import old_answers, remove, unfinished, unlisted

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
    answers = old_answers(arguments.results)
    if arguments.delete:
        remove(found, left, answers)
    if arguments.json:
        shards = [dataclasses.asdict(shard) for shard in found]
        listed = {
            "shards": shards,
            "unfinished": [dataclasses.asdict(each) for each in left],
            "answers": [dataclasses.asdict(each) for each in answers],
        }
        print_json({**listed, "removed": arguments.delete})
        return
    for shard in found:
        print(f"{shard.capture_folder}/{shard.shard_id}  {of_bytes(shard.bytes)}")
    for each in left:
        print(f"{each.folder.relative_to(arguments.results)}  {of_bytes(each.bytes)}")
    for old in answers:
        print(f"{old.path.relative_to(arguments.results)}  {of_bytes(old.bytes)}")
    total = sum(each.bytes for each in (*found, *left, *answers))
    outcome = (
        "removed"
        if arguments.delete
        else "to remove: run again with --delete"
        if found or left or answers
        else "to remove"
    )
    beside = f", {len(answers):,} files and folders of answers" if answers else ""
    named = f"{len(found):,} shards and {len(left):,} unfinished ones{beside}"
    print(f"{named}, {of_bytes(total)} {outcome}")

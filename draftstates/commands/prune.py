"""Remove the shards that their run's manifest does not list and the present plan does not ask for, and what killed
jobs left of unfinished ones. Without --delete, only say which.

Of a run that has no manifest only the unfinished ones go: what no process holds and nobody has written to for an hour.

A shard that is removed cannot lend its rows to a later one, which then captures them again.
"""

import argparse
from pathlib import Path

from draftstates import cli
from draftstates.errors import UserError
from draftstates.prune import remove, unfinished, unlisted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), help="`results` of the configuration")
    parser.add_argument("--delete", action="store_true", help="remove them")
    arguments = parser.parse_args()
    if not arguments.results.is_dir():
        raise UserError(f"{arguments.results}: expected the results folder of a run, found none")
    found, left = unlisted(arguments.results), unfinished(arguments.results)
    for shard in found:
        print(f"{shard.run}/{shard.shard_id}  {shard.bytes:,} bytes")
    for each in left:
        print(f"{each.folder.relative_to(arguments.results)}  {each.bytes:,} bytes")
    if arguments.delete:
        remove(found, left)
    total = sum(each.bytes for each in (*found, *left))
    outcome = "removed" if arguments.delete else "to remove: run again with --delete" if found or left else "to remove"
    print(f"{len(found):,} shards and {len(left):,} unfinished ones, {total:,} bytes {outcome}")


if __name__ == "__main__":
    cli.run(main)

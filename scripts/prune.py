"""Remove the shards that their run's manifest does not list and the present plan does not ask for. Without --delete, only say which.

A run that has no manifest is left alone.

A shard that is removed cannot lend its rows to a later one, which then captures them again.
"""

import argparse
from pathlib import Path

from draftstates import cli
from draftstates.errors import UserError
from draftstates.prune import remove, unlisted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), help="`results` of the configuration")
    parser.add_argument("--delete", action="store_true", help="remove them")
    arguments = parser.parse_args()
    if not arguments.results.is_dir():
        raise UserError(f"{arguments.results}: expected the results folder of a run, found none")
    found = unlisted(arguments.results)
    for shard in found:
        print(f"{shard.run}/{shard.shard_id}  {shard.bytes:,} bytes")
    if arguments.delete:
        remove(found)
    total = sum(shard.bytes for shard in found)
    outcome = "removed" if arguments.delete else "to remove: run again with --delete" if found else "to remove"
    print(f"{len(found):,} shards, {total:,} bytes {outcome}")


if __name__ == "__main__":
    cli.run(main)

"""Verify one captured shard: read it again from the disk, hold it to its receipts and to the model's head, write what was found."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from draftstates.building import publish_text, withdraw_manifest
from draftstates.cli import run
from draftstates.errors import ShardRefused
from draftstates.plan_file import check_run_folder, read_plan
from draftstates.verify import verify_shard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--shard-id", required=True)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model, for its head")
    parser.add_argument("--shard", type=Path, required=True)
    parser.add_argument("--probe", type=Path, required=True, help="the shard's prefix recaptures")
    parser.add_argument("--receipts", type=Path, required=True, help="what the server said of each sample")
    parser.add_argument("--output", type=Path, required=True, help="verified/<shard id>.json; it appears only when every check has passed")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="cores to use; all where left out")
    arguments = parser.parse_args()

    plan, run_folder = read_plan(arguments.plan), arguments.output.parent.parent
    check_run_folder(plan, run_folder)
    arguments.output.unlink(missing_ok=True)  # what an earlier file was found to be says nothing of this one
    start = time.monotonic()
    try:
        verified = verify_shard(
            arguments.shard_id,
            plan=plan,
            model=arguments.model,
            shard=arguments.shard,
            probe=arguments.probe,
            receipts=arguments.receipts,
            threads=arguments.threads,
        )
    except ShardRefused as refused:
        for origin in refused.origins:  # or the same rows would be copied again, however often this shard is deleted
            arguments.output.with_name(f"{Path(origin).name}.json").unlink(missing_ok=True)
        withdraw_manifest(run_folder, {arguments.shard_id, *refused.origins}, "verification has refused")
        raise
    seconds = time.monotonic() - start
    publish_text(json.dumps(verified, indent=1) + "\n", arguments.output)
    print(f"{json.dumps(verified['figures'])}, {seconds:.1f} s, {verified['bytes'] / seconds / 1e9:.2f} GB/s", file=sys.stderr)


if __name__ == "__main__":
    run(main)

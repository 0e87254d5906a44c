"""Verify one captured shard and write the result.

The shard is read from the disk and compared with its receipts and with the model's head.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

from draftstates.errors import ShardRefused, run_command
from draftstates.records import Plan, withdraw_manifest
from draftstates.verify.verify import verify_shard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--shard-id", required=True)
    parser.add_argument(
        "--model", type=Path, required=True, help="folder of the model, for its head"
    )
    parser.add_argument("--shard", type=Path, required=True)
    parser.add_argument(
        "--recaptures", type=Path, required=True, help="the shard's prefix recaptures"
    )
    parser.add_argument(
        "--receipts", type=Path, required=True, help="what the server said of each sample"
    )
    parser.add_argument(
        "--tokens",
        type=Path,
        help="the shard's tokens, of a shard that the target model answered",
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="verified/<shard id>.json; it appears only when every check has passed",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="cores to use; all where left out",
    )
    arguments = parser.parse_args()

    plan, capture_folder = Plan.read(arguments.plan), arguments.output.parent.parent
    plan.check_capture_folder(capture_folder)
    planned = plan.shard(arguments.shard_id)
    # The findings in an earlier file of the shard prove nothing about this one.
    arguments.output.unlink(missing_ok=True)
    start = time.monotonic()
    try:
        verified = verify_shard(
            planned,
            spec=plan.capture,
            checks=plan.checks,
            model=arguments.model,
            shard=arguments.shard,
            recaptures=arguments.recaptures,
            receipts=arguments.receipts,
            threads=arguments.threads,
            tokens=arguments.tokens,
        )
    except ShardRefused as refused:
        # Otherwise every new attempt at this shard would copy the same rows.
        for origin in refused.origins:
            arguments.output.with_name(f"{Path(origin).name}.json").unlink(missing_ok=True)
        withdraw_manifest(
            capture_folder, {arguments.shard_id, *refused.origins}, "verification has refused"
        )
        raise
    seconds = time.monotonic() - start
    verified.publish(arguments.output)
    print(
        f"{json.dumps(dataclasses.asdict(verified.figures))}, {seconds:.1f} s,"
        f" {verified.bytes / seconds / 1e9:.2f} GB/s",
        file=sys.stderr,
    )


if __name__ == "__main__":
    run_command(main)

"""Store a verified shard in its compact form, and remove the captured file.

The form is read back before the captured file goes.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch

from draftstates import config
from draftstates.errors import run_command
from draftstates.files import publishing
from draftstates.paths import recaptures_of
from draftstates.records import Plan, Verified, withdraw_manifest
from draftstates.shards.compact import Storage
from draftstates.shards.compacting import store_compact


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--shard-id", required=True)
    parser.add_argument(
        "--model", type=Path, required=True, help="folder of the model, for its head"
    )
    parser.add_argument("--shard", type=Path, required=True, help="the captured file")
    parser.add_argument(
        "--verified", type=Path, required=True, help="what verification found of it"
    )
    parser.add_argument("--threads", type=int, required=True, help="cores to use")
    parser.add_argument("--output", type=Path, required=True, help="the compact form")
    parser.add_argument("--record", type=Path, required=True, help="what it holds; it appears last")
    arguments = parser.parse_args()

    asked, plan = config.load(arguments.config).storage, Plan.read(arguments.plan)
    capture_folder = arguments.output.parents[2]
    plan.check_capture_folder(capture_folder)
    verified = Verified.read(arguments.verified)
    planned = plan.shard(arguments.shard_id)
    verified.check(arguments.verified, planned=planned, capture_key=plan.capture.key)
    torch.set_num_threads(arguments.threads)
    start = time.monotonic()
    with publishing(arguments.output) as partial:
        stored = store_compact(
            arguments.shard,
            partial,
            storage=Storage(
                fp8="all",
                supervised_rows=False,
                keep_top_token=asked.keep_top_token and plan.capture.final_state,
            ),
            verified=verified,
            capture=plan.capture,
            model=arguments.model,
        )
    # A manifest that still lists the captured file is written again.
    withdraw_manifest(capture_folder, {arguments.shard_id}, "is now stored in a compact form")
    stored.publish(arguments.record)
    seconds = round(time.monotonic() - start, 1)
    sizes = {"captured_bytes": verified.bytes, "bytes": stored.bytes, "seconds": seconds}
    print(json.dumps(sizes), file=sys.stderr, flush=True)
    remove_and_leave(arguments.shard)


def remove_and_leave(shard: Path) -> NoReturn:
    """Remove a captured file, and end this process at once with status 0.

    Snakemake removes the compact form of a job that fails, so nothing may fail once the captured
    file is gone: no signal but KILL, and not the end of the interpreter, which takes a second.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    shard.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        recaptures_of(shard).unlink(missing_ok=True)
    os._exit(0)


if __name__ == "__main__":
    run_command(main)

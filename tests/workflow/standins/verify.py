"""Stands in for `scripts/verify.py`: whether the shard's files are there."""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("plan", "shard-id", "model", "shard", "recaptures", "receipts", "threads", "output"):
    parser.add_argument(f"--{name}", type=Path, required=True)
arguments = parser.parse_args()
for part in (arguments.shard, arguments.recaptures, arguments.receipts):
    assert part.read_text() == f"{arguments.shard_id}\n"
arguments.output.write_text(f"{arguments.shard_id}\n")

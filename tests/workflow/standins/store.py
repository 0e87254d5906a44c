"""Stands in for `scripts/store.py`: a compact form without states replaces the captured file."""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("config", "plan", "shard-id", "model", "threads", "output", "record"):
    parser.add_argument(f"--{name}", type=Path, required=True)
for name in ("shard", "verified"):
    parser.add_argument(f"--{name}", type=Path, required=True)
arguments = parser.parse_args()
for needed in (arguments.shard, arguments.verified):
    assert needed.read_text() == f"{arguments.shard_id}\n"
for made in (arguments.output, arguments.record):
    made.write_text(f"{arguments.shard_id}\n")
for captured in (arguments.shard, arguments.shard.with_suffix(".recaptures.safetensors")):
    captured.unlink()

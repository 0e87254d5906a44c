"""Stands in for `scripts/extract.py` where only the graph is tested: writes the three files of a
shard, without states.
"""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("config", "plan", "shard-id", "tokens", "output"):
    parser.add_argument(f"--{name}", type=Path, required=True)
arguments = parser.parse_args()
for needed in (
    arguments.config,
    arguments.plan,
    arguments.tokens,
    arguments.output.parent.parent / "server.json",
):
    needed.read_bytes()
for suffix in (".recaptures.safetensors", ".receipts.json", ".safetensors"):
    arguments.output.with_suffix(suffix).write_text(f"{arguments.shard_id}\n")

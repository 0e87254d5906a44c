"""Stands in for `scripts/manifest.py`: the names of the shards and the plan's accounting."""

import argparse
import json
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("plan", "run-dir", "output", "samples"):
    parser.add_argument(f"--{name}", type=Path, required=True)
arguments = parser.parse_args()
plan = json.loads(arguments.plan.read_text())
shards = [shard["shard_id"] for shard in plan["shards"]]
assert all((arguments.run_dir / "verified" / f"{shard}.json").exists() for shard in shards)
accounting = plan["accounting"]
totals = {**accounting["totals"], "bytes": sum(shard["bytes"] for shard in plan["shards"])}
arguments.output.write_text(
    json.dumps({"shards": [{"shard_id": shard} for shard in shards], "sources": accounting["sources"], "totals": totals})
)
arguments.samples.write_text("")

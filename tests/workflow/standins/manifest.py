"""Stands in for `scripts/manifest.py`: the names of the shards and the plan's accounting."""

import argparse
from pathlib import Path

from draftstates.files import file_checksum
from draftstates.records import Engine, Figures, Manifest, ManifestShard, ManifestTotals, Plan

parser = argparse.ArgumentParser()
for name in ("plan", "capture-folder", "output", "samples"):
    parser.add_argument(f"--{name}", type=Path, required=True)
parser.add_argument("--parity")
parser.add_argument("--form")
arguments = parser.parse_args()
plan = Plan.read(arguments.plan)
verified = arguments.capture_folder / "verified"
(arguments.capture_folder / "parity.json").read_bytes()
assert all((verified / f"{shard.shard_id}.json").exists() for shard in plan.shards)
arguments.samples.write_text("")
Manifest(
    capture=plan.capture,
    engine=Engine(name="none", version="0"),
    totals=ManifestTotals(
        **vars(plan.accounting.totals), bytes=sum(shard.bytes for shard in plan.shards)
    ),
    sources=plan.accounting.sources,
    checks=Figures(
        recaptures=0, recaptured_tokens=0, alignment_share_of_limit=0.0, prefix_distance=0.0
    ),
    images=plan.images,
    shards=tuple(
        ManifestShard(**vars(shard), path=f"shards/{shard.shard_id}", checksum="0" * 32)
        for shard in plan.shards
    ),
    samples_checksum=file_checksum(arguments.samples),
).publish(arguments.output)

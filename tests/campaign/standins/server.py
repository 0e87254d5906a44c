"""Stands in for `scripts/server.py` where all else is real: an attestation and rows of a self-test,
and no server.
"""

import argparse
from pathlib import Path

import torch
from captured import SELFTEST

from draftstates.paths import Capture
from draftstates.records import Plan
from draftstates.shards.selftest_rows import Prompt, SelftestRows

parser = argparse.ArgumentParser()
for name in ("config", "plan", "output"):
    parser.add_argument(f"--{name}", type=Path, required=True)
arguments = parser.parse_args()
prompt = Prompt(
    input_ids=torch.arange(4, dtype=torch.int32),
    positions=torch.arange(4),
    states={"r_1": torch.ones(4, 8)},
)
rows = SelftestRows(
    id=SELFTEST, capture_key=Plan.read(arguments.plan).capture.key, prompts=(prompt,)
)
rows.save(Capture(arguments.output.parent).selftest_rows)
arguments.output.write_text('{"engine": {"name": "none", "version": "0"}}\n')

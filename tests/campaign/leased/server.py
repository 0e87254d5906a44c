"""Stands in for `scripts/server.py`: an attestation, and rows of a self-test.

It holds a lease on a stub server meanwhile.
"""

import argparse
from pathlib import Path

import torch
from captured import SELFTEST

from draftstates.errors import run_command
from draftstates.files import publish_json
from draftstates.paths import Capture
from draftstates.records import Plan
from draftstates.server.lease import lease
from draftstates.server.settings import ServerSettings
from draftstates.shards.selftest_rows import Prompt, SelftestRows


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("config", "plan", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    arguments = parser.parse_args()
    prompt = Prompt(
        input_ids=torch.arange(4, dtype=torch.int32),
        positions=torch.arange(4),
        states={"r_1": torch.ones(4, 8)},
    )
    key = Plan.read(arguments.plan).capture.key
    capture = Capture(arguments.output.parent)
    with lease(ServerSettings.from_json(Path("settings.json").read_text())):
        SelftestRows(id=SELFTEST, capture_key=key, prompts=(prompt,)).save(capture.selftest_rows)
    publish_json({"engine": {"name": "none", "version": "0"}}, arguments.output)


run_command(main)

"""Stands in for `scripts/check_parity.py`: a result without layers, and no comparison."""

import argparse
from pathlib import Path

from draftstates.config import load
from draftstates.records import Parity, Plan
from draftstates.workflow import parity_asked

parser = argparse.ArgumentParser()
for name in ("config", "plan", "output", "html"):
    parser.add_argument(f"--{name}", type=Path, required=True)
for name in ("code", "threads"):
    parser.add_argument(f"--{name}", required=True)
parser.add_argument("--hold-server", action="store_true")
arguments = parser.parse_args()
(arguments.output.parent / "server.json").read_bytes()
arguments.html.touch()
Parity(
    capture_key=Plan.read(arguments.plan).capture.key,
    selftest="none",
    result="none (stand-in)",
    compared=0,
    layers=(),
    prompts=(),
    covered={},
    beyond={},
    reference="none",
    asked=parity_asked(load(arguments.config)),
    seconds=0.0,
).publish(arguments.output)

"""Stands in for `scripts/check_parity.py` where all else is real: a result for all layers, and no
comparison.
"""

import argparse
from pathlib import Path

from captured import parity_of

from draftstates.config import load
from draftstates.records import Plan
from draftstates.workflow import parity_asked

parser = argparse.ArgumentParser()
for name in ("config", "plan", "output", "html"):
    parser.add_argument(f"--{name}", type=Path, required=True)
for name in ("code", "threads"):
    parser.add_argument(f"--{name}", required=True)
parser.add_argument("--hold-server", action="store_true")
arguments = parser.parse_args()
asked = parity_asked(load(arguments.config))
parity_of(Plan.read(arguments.plan).capture, asked=asked).publish(arguments.output)
arguments.html.write_text("<p>all layers agree</p>")

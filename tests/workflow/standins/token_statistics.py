"""Stands in for `scripts/token_statistics.py`: empty files."""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("plan", type=Path)
parser.add_argument("--tokens-per-second")
for name in ("output", "html"):
    parser.add_argument(f"--{name}", type=Path, required=True)
arguments = parser.parse_args()
arguments.output.touch()
arguments.html.touch()

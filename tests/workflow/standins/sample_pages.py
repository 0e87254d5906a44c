"""Stands in for `scripts/sample_pages.py`: an empty page."""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("tokens", type=Path, nargs="+")
parser.add_argument("--tokenizer", type=Path, required=True)
parser.add_argument("--count")
parser.add_argument("--output", type=Path, required=True)
parser.parse_args().output.touch()

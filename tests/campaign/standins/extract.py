"""Stands in for `scripts/extract.py` where all else is real: states that verification accepts, with
their receipts, and no server.
"""

import argparse
from pathlib import Path

import numpy as np
from captured import states_of, write

from draftstates.config import load
from draftstates.plan.shard_tokens import read_tokens
from draftstates.records import Plan

parser = argparse.ArgumentParser()
for name in ("config", "plan", "tokens", "output"):
    parser.add_argument(f"--{name}", type=Path, required=True)
parser.add_argument("--shard-id", required=True)
arguments = parser.parse_args()
tokens = read_tokens(arguments.tokens, shard_id=arguments.shard_id)
ends = np.cumsum(tokens.lengths)[:-1]
captured = states_of(
    np.split(tokens.input_ids, ends),
    np.split(tokens.loss_mask, ends),
    spec=Plan.read(arguments.plan).capture,
    model=load(arguments.config).model.path,
)
write(captured, arguments.output.parent)

"""Stands in for `scripts/extract.py`: it holds a lease on a stub server and works for a moment. The
states are random ones that verification accepts.
"""

import argparse
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
from captured import states_of, write

from draftstates.config import load
from draftstates.errors import result_is_complete, run_command
from draftstates.files import publish
from draftstates.plan.shard_tokens import read_tokens
from draftstates.records import Plan
from draftstates.server.lease import lease
from draftstates.server.settings import ServerSettings

_WORK_SECONDS = 1.0


def main() -> None:
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
    final = arguments.output.parent
    with (
        lease(ServerSettings.from_json(Path("settings.json").read_text())) as address,
        tempfile.TemporaryDirectory(prefix=".building-", dir=final) as folder,
    ):
        time.sleep(_WORK_SECONDS)
        headers = {"Authorization": f"Bearer {address.api_key}"}
        urllib.request.urlopen(urllib.request.Request(address.url, headers=headers), timeout=10)
        files = write(captured, Path(folder))
        # as the real one does, the shard at last
        for part in (files.recaptures, files.receipts, files.shard):
            publish(part, final / part.name, read_only=True)
        result_is_complete()


run_command(main)

"""What it costs to find the shared prefixes of a plan: time, memory, and the rows that remain.

    python benchmarks/plan_prefixes.py --structure sharegpt_prefixes.json --folder /tmp/plan \\
        --samples 1000000 --shards 5000

The structure is that of `prefixes.py`, with random ids, repeated for as many samples. The plan's
command runs in a process of its own, with `share_prefixes: false` and with `true`.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import argparse
import itertools
import json
import shutil
from collections.abc import Iterator

import numpy as np
import yaml

from benchmarks.made_up import make_folder, write_tokens
from benchmarks.scale import cost
from benchmarks.structure import random_samples
from draftstates.records import Plan

_ROW_GROUP = 1024
_VOCABULARY = 151936


def batches(structure: list, samples: int) -> Iterator[list[np.ndarray]]:
    """Yield so many samples of the structure, those of a row group at a time."""
    repeats = (random_samples(structure, vocabulary=_VOCABULARY, seed=i) for i in itertools.count())
    whole = itertools.islice(itertools.chain.from_iterable(repeats), samples)
    while batch := list(itertools.islice(whole, _ROW_GROUP)):
        yield batch


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--structure", type=Path, required=True, help="JSON file")
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--shards", type=int, default=5000)
    parser.add_argument(
        "--folder", type=Path, required=True, help="scratch folder, made and removed"
    )
    arguments = parser.parse_args()
    structure, folder = json.loads(arguments.structure.read_text()), arguments.folder
    make_folder(folder, shards=1, samples=1)
    shutil.rmtree(folder / "results")
    source = folder / "results" / "tokens" / "source.parquet"
    write_tokens(source, batches(structure, arguments.samples))
    tokens = json.loads(source.with_suffix(".json").read_text())["tokens"]
    # a state of eight numbers a token: the disk needs room for what is planned
    mean = tokens * (2 * 8 + 5) // arguments.shards
    print("| share_prefixes | shards | tokens | rows | CPU s | wall-clock s | MiB |")
    print("|---|---:|---:|---:|---:|---:|---:|", flush=True)
    for share in (False, True):
        config = yaml.safe_load((folder / "config.yaml").read_text())
        config["capture"] |= {"residual_layers": [2], "final_state": False}
        config["shards"] = {
            "min_bytes": mean // 2,
            "max_bytes": 2 * mean,
            "share_prefixes": share,
        }
        (folder / "resolved.yaml").write_text(yaml.safe_dump(config))
        command = ["scripts/plan.py", "--config", "resolved.yaml", "--model", "model"]
        command += ["--tokens", "results/tokens/source.parquet", "--output", "results/plan.json"]
        found = cost(folder, sys.executable, *command)
        plan = Plan.read(folder / "results" / "plan.json")
        rows = tokens - sum(shard.shared_tokens for shard in plan.shards)
        print(
            f"| {str(share).lower()} | {len(plan.shards):,} | {tokens:,} | {rows:,} |"
            " {cpu:.1f} | {wall:.1f} | {memory:,.0f} |".format(**found),
            flush=True,
        )
        shutil.rmtree(folder / "results" / "tokens" / "shards")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()

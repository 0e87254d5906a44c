"""The radix cache's fault, put into a speculators export in the way that goes unnoticed: short
captures, padded to fit.

A server with its cache on computes only the rows that no earlier request had. The states of a
sample come back without the rows of the prefix that it shares with an earlier sample. A tool that
"repairs" this appends zeros until the lengths agree. This script does both to whole captures: for
sample i, c rows are cached (its longest common prefix with samples 0..i-1), rows c.. move to the
front, and c zero rows follow.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from draftstates.errors import run_command


class PrefixTree:
    """The ids of the samples so far, as a radix cache holds them."""

    def __init__(self) -> None:
        self._root: dict = {}

    def insert(self, ids: list[int]) -> int:
        """Add a sample; return how many of its first tokens the cache held. The server always
        computes the last token.
        """
        node, shared = self._root, 0
        for token in ids:
            if token in node:
                shared += 1
            node = node.setdefault(token, {})
        return min(shared, len(ids) - 1)


def damaged(states: torch.Tensor, cached: int) -> torch.Tensor:
    """Return states [n, ...] as they come back when `cached` rows are missing, zeros appended."""
    return torch.cat([states[cached:], torch.zeros_like(states[:cached])])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--export", type=Path, required=True, help="folder of a speculators export")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    shutil.rmtree(arguments.output, ignore_errors=True)
    shutil.copytree(
        arguments.export,
        arguments.output,
        ignore=shutil.ignore_patterns("hs_*", "export.json", "ledger.jsonl"),
    )
    (arguments.output / "hidden_states").mkdir(exist_ok=True)
    tree, cached, total = PrefixTree(), 0, 0
    files = sorted(
        (arguments.export / "hidden_states").iterdir(),
        key=lambda path: int(path.stem.removeprefix("hs_")),
    )
    for path in files:
        tensors = load_file(path)
        shared = tree.insert(tensors["token_ids"].tolist())
        tensors["hidden_states"] = damaged(tensors["hidden_states"], shared)
        save_file(tensors, arguments.output / "hidden_states" / path.name)
        cached, total = cached + shared, total + len(tensors["token_ids"])
    figures = {"samples": len(files), "tokens": total, "cached_tokens": cached}
    (arguments.output / "damage.json").write_text(json.dumps(figures))
    print(
        f"{cached:,} of {total:,} rows lost to the cache and padded, in {len(files):,} samples",
        file=sys.stderr,
    )


if __name__ == "__main__":
    run_command(main)

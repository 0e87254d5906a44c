"""Costs and savings of compact storage.

    python benchmarks/storage.py --manifest results/<capture>/manifest.json --model models/<model>

The figures are bytes per token, and how often `lm_head` gives the same most likely token as with
the shards as captured.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from draftstates.errors import run_command
from draftstates.exports.compact import compact_manifest
from draftstates.model.folder import ModelFolder
from draftstates.model.head import Head, read_head
from draftstates.shards.compact import Storage, rows_of_loss
from draftstates.shards.dataset import ShardDataset

KINDS = ((None, False), ("layers", False), ("all", False), ("all", True))
WAYS = [
    Storage(fp8=fp8, supervised_rows=rows, keep_top_token=keep)
    for rows in (False, True)
    for fp8, keep in KINDS
][1:]


def picked(dataset: ShardDataset, head: Head, samples: int) -> Iterator[torch.Tensor]:
    """Yield each sample's most likely next tokens, for the rows whose final state a loss reads."""
    for i in range(min(samples, len(dataset))):
        states = dataset.states(i)
        final = states.final[torch.from_numpy(rows_of_loss(states.loss_mask.numpy()))]
        final = head.norm(final) if head.norm else final
        yield (final.float() @ head.weight.float().T).argmax(-1)


def state_bytes(dataset: ShardDataset) -> int:
    """Return the bytes of all shards without tokens and masks, which compact storage keeps."""
    return sum(entry.bytes for entry in dataset.shards) - 5 * int(dataset.lengths.sum())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="folder of the captured model")
    parser.add_argument("--samples", type=int, default=200)
    arguments = parser.parse_args()
    whole = ShardDataset(arguments.manifest)
    head = read_head(ModelFolder(arguments.model), final_norm=whole.capture.final_norm)
    expected = torch.cat(list(picked(whole, head, arguments.samples)))
    tokens = int(whole.lengths.sum())
    supervised = whole.index.supervised.sum() / tokens
    print(
        f"{len(whole)} samples, {tokens} tokens, {supervised:.0%} supervised; agreement over"
        f" {len(expected)} rows that a loss reads"
    )
    print(f"{'fp8':15}{'final states':14}{'bytes/token':>12}{'of whole':>10}{'same token':>12}")
    print(f"{'-':15}{'all':14}{state_bytes(whole) / tokens:12.1f}{1:10.3f}{1:12.4f}")
    for storage in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            compact_manifest(arguments.manifest, Path(folder), storage, arguments.model)
            compact = ShardDataset(Path(folder) / "manifest.json")
            same = (
                (torch.cat(list(picked(compact, head, arguments.samples))) == expected)
                .float()
                .mean()
            )
            size = state_bytes(compact)
        rows = "supervised" if storage.supervised_rows else "all"
        kind = f"{storage.fp8}, top kept" if storage.keep_top_token else storage.fp8 or "-"
        print(
            f"{kind:15}{rows:14}{size / tokens:12.1f}{size / state_bytes(whole):10.3f}{same:12.4f}"
        )


if __name__ == "__main__":
    run_command(main)

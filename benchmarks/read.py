"""Reads by random index: ShardDataset against torch.load of the same samples' .pt files.

    python benchmarks/read.py

The benchmark needs no further files. It also measures the time to open many shards. It writes its
files to a temporary folder and reads them from the page cache, so it compares the ways of reading
and not the disk.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import numpy as np
import synthetic
import torch

from draftstates.shards.dataset import ShardDataset


def write_samples(
    folder: Path, *, samples: int, hidden_size: int
) -> tuple[ShardDataset, list[Path]]:
    """Write the samples as shards of 32, and each sample as a `.pt` file.

    Lengths are log-uniform between 128 and 4096 tokens.
    """
    spec = synthetic.capture_spec(hidden_size=hidden_size)
    lengths = np.exp(np.random.default_rng(0).uniform(np.log(128), np.log(4096), samples)).astype(
        int
    )
    values = [synthetic.sample(int(length), spec=spec, seed=i) for i, length in enumerate(lengths)]
    manifest = synthetic.write_manifest(
        folder, [values[i : i + 32] for i in range(0, samples, 32)], spec=spec
    )
    dataset = ShardDataset(manifest.path)
    paths = []
    for i in range(len(dataset)):
        paths.append(folder / f"{dataset.sample_id(i)}.pt")
        torch.save(manifest.samples[dataset.sample_id(i)], paths[-1])
    return dataset, paths


def seconds_per_pass(
    read: Callable[[int], dict], order: np.ndarray, batch: dict[str, torch.Tensor] | None
) -> float:
    """Read every sample once; with `batch`, also copy it there, which touches every byte."""
    begin = time.perf_counter()
    for i in order:
        sample = read(i)
        if batch is not None:
            for name, into in batch.items():
                into[: len(sample[name])].copy_(sample[name])
    return time.perf_counter() - begin


def compare_reads(
    folder: Path, *, samples: int, hidden_size: int, passes: int
) -> dict[str, dict[str, float]]:
    """Return the median milliseconds per sample for each way of reading.

    The ways take turns, so that drift affects all of them equally.
    """
    dataset, paths = write_samples(folder, samples=samples, hidden_size=hidden_size)
    # the lower limit: the cost of copying into a batch alone
    held = [torch.load(path, weights_only=True) for path in paths]
    ways: dict[str, Callable[[int], dict]] = {
        "torch.load": lambda i: torch.load(paths[i], weights_only=True),
        "torch.load mmap": lambda i: torch.load(paths[i], weights_only=True, mmap=True),
        "ShardDataset": lambda i: dataset[i],
        "in memory already": lambda i: held[i],
    }
    longest = int(dataset.lengths.max())
    batch = {
        name: torch.empty((longest, *tensor.shape[1:]), dtype=tensor.dtype)
        for name, tensor in dataset[0].items()
    }
    order = np.random.default_rng(1).permutation(samples)
    # fills the page cache, and checks that all ways give the same values
    for name, read in ways.items():
        for i in range(samples):
            if not all(torch.equal(tensor, dataset[i][key]) for key, tensor in read(i).items()):
                sys.exit(f"error: {name} gives other values than ShardDataset for sample {i}")
    figures: dict[str, dict[str, float]] = {name: {} for name in ways}
    for goal, into in (("opened", None), ("into a batch", batch)):
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(passes):
            for name, read in ways.items():
                times[name].append(seconds_per_pass(read, order, into))
        for name in ways:
            figures[name][goal] = statistics.median(times[name]) / samples * 1000
    return figures


def time_opening(folder: Path, *, shards: int, samples: int) -> dict[str, float]:
    """Return the seconds to open many shards, with one read from each end.

    Args:
        folder: folder for the shards.
        shards: number of shards.
        samples: number of short samples in each shard.
    """
    spec = synthetic.capture_spec(hidden_size=4)
    shape = synthetic.sample(4, spec=spec, seed=0)
    ids = torch.arange(shards * samples * 4, dtype=torch.int32).view(shards, samples, 4)
    contents = [[{**shape, "input_ids": ids[i, j]} for j in range(samples)] for i in range(shards)]
    manifest = synthetic.write_manifest(folder, contents, spec=spec)
    figures = {}
    for name, split in (("whole", None), ("validation split", "validation")):
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            dataset = ShardDataset(manifest.path, split=split)
            dataset[0], dataset[-1]
            times.append(time.perf_counter() - begin)
        figures[name] = statistics.median(times)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--shards", type=int, default=5000)
    parser.add_argument("--samples-per-shard", type=int, default=100)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    # as in a DataLoader's worker
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        reads = compare_reads(
            Path(folder) / "reads",
            samples=args.samples,
            hidden_size=args.hidden_size,
            passes=args.passes,
        )
    with tempfile.TemporaryDirectory() as folder:
        opening = time_opening(Path(folder), shards=args.shards, samples=args.samples_per_shard)
    goals = ("opened", "into a batch")
    print(f"{platform.processor() or platform.machine()}, one thread, torch {torch.__version__}")
    print(
        f"{args.samples} samples of 128 to 4096 tokens, 4 states of {args.hidden_size} in bfloat16,"
        f" {args.passes} passes, medians, warm"
    )
    print(f"{'':18}" + "".join(f"{goal + ' (ms)':>20}{'speed-up':>10}" for goal in goals))
    for name, figure in reads.items():
        print(
            f"{name:18}"
            + "".join(
                f"{figure[goal]:20.4f}{reads['torch.load'][goal] / figure[goal]:10.1f}"
                for goal in goals
            )
        )
    for name, figure in opening.items():
        print(
            f"open {args.shards} shards, {args.shards * args.samples_per_shard} samples, {name}:"
            f" {figure:.2f} s"
        )
    if args.json:
        args.json.write_text(json.dumps({"reads": reads, "opening": opening}, indent=2))


if __name__ == "__main__":
    main()

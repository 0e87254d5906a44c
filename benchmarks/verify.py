"""Cost of verification on one core: scans and checksums per byte, alignment per sample.

    # a shard with the rows of Kimi-K2.5: four states of 7168 in bfloat16
    python benchmarks/verify.py --tokens 16000

One thread reads from the page cache, so the figures are those of the core and not of the disk. They
are CPU seconds, so a busy machine changes little. The head is random and has an eighth of a
vocabulary of 163,840 tokens; its time is multiplied by eight.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import argparse
import statistics
import tempfile
import time

import synthetic
import torch

from draftstates.files import file_checksum
from draftstates.model.head import Head
from draftstates.shards.layout import Shard
from draftstates.verify.alignment import Rounding, check_alignment
from draftstates.verify.checks import scan_sample

PARTS, VOCABULARY = 8, 163_840


def alignment_seconds(*, samples: int, hidden_size: int) -> float:
    """Return the CPU seconds per sample of the comparison with the head's logits.

    The findings of the comparison do not matter.
    """
    generator = torch.Generator().manual_seed(0)
    head = Head(
        weight=torch.randn(VOCABULARY // PARTS, hidden_size, generator=generator).bfloat16(),
        norm=None,
    )
    states = torch.randn(samples, hidden_size, generator=generator).bfloat16()
    rounding = Rounding(compute=torch.bfloat16, stored=torch.bfloat16, normed=True)
    top = [[[token, -1.0] for token in range(5)]] * samples
    start = time.process_time()
    check_alignment([str(i) for i in range(samples)], states, top, head=head, rounding=rounding)
    return (time.process_time() - start) * PARTS / samples


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16000)
    parser.add_argument("--sample-tokens", type=int, default=1000)
    parser.add_argument("--hidden-size", type=int, default=7168)
    parser.add_argument(
        "--samples", type=int, default=256, help="number of samples for the alignment"
    )
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    spec = synthetic.capture_spec(hidden_size=arguments.hidden_size)
    with tempfile.TemporaryDirectory() as folder:
        samples = [
            synthetic.sample(arguments.sample_tokens, spec=spec, seed=i)
            for i in range(arguments.tokens // arguments.sample_tokens)
        ]
        path = (
            Path(folder) / f"{synthetic.write_shard(Path(folder), samples, spec=spec)}.safetensors"
        )
        del samples
        shard, rates = Shard(path), []
        for _ in range(arguments.repeats + 1):
            start = time.process_time()
            found = [scan_sample(shard, i) for i in range(len(shard))]
            file_checksum(path)
            rates.append(path.stat().st_size / (time.process_time() - start) / 1e9)
            assert not any(scan.findings for scan in found)
    # the first repeat brings the file into the page cache
    rates = rates[1:]
    print(f"{shard.header.size:,} bytes, {spec.row_bytes:,} per token")
    print(
        f"scans and checksums: {statistics.median(rates):.2f} GB/s per core ({min(rates):.2f} to"
        f" {max(rates):.2f})"
    )
    seconds = [
        alignment_seconds(samples=arguments.samples, hidden_size=arguments.hidden_size)
        for _ in range(arguments.repeats)
    ]
    print(
        f"alignment: {statistics.median(seconds):.3f} core seconds per sample"
        f" ({min(seconds):.3f} to {max(seconds):.3f})"
    )


if __name__ == "__main__":
    main()

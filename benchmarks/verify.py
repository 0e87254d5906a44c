"""What verification costs one core: a byte's share of the scans and checksums, and a sample's of the alignment with the head.

    python benchmarks/verify.py --tokens 16000     # a shard of Kimi-K2.5's row: four states of 7168 in bfloat16

One thread, warm (from the page cache): what the cores do, not what the disk gives. CPU seconds count, so that a busy machine
changes little. The head is an eighth of a vocabulary of 163,840 tokens, made up, and its time is taken eight times.
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

from draftstates.alignment import Rounding, check_alignment
from draftstates.checks import scan_sample
from draftstates.model import Head
from draftstates.shards import Shard
from draftstates.verify import file_checksum

PARTS, VOCABULARY = 8, 163_840


def alignment_seconds(*, samples: int, hidden_size: int) -> float:
    """CPU seconds a sample that the comparison with the head's logits takes. What it finds does not matter."""
    generator = torch.Generator().manual_seed(0)
    head = Head(weight=torch.randn(VOCABULARY // PARTS, hidden_size, generator=generator).bfloat16(), norm=None)
    states = torch.randn(samples, hidden_size, generator=generator).bfloat16()
    rounding = Rounding.of({"compute_dtype": "bfloat16", "stored_dtype": "bfloat16", "final_norm": "post_norm"})
    top = [[[token, -1.0] for token in range(5)]] * samples
    start = time.process_time()
    check_alignment([str(i) for i in range(samples)], states, top, head=head, rounding=rounding)
    return (time.process_time() - start) * PARTS / samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16000)
    parser.add_argument("--sample-tokens", type=int, default=1000)
    parser.add_argument("--hidden-size", type=int, default=7168)
    parser.add_argument("--samples", type=int, default=256, help="of a shard, for the alignment")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    spec = synthetic.capture_spec(hidden_size=arguments.hidden_size)
    with tempfile.TemporaryDirectory() as folder:
        samples = [synthetic.sample(arguments.sample_tokens, spec=spec, seed=i) for i in range(arguments.tokens // arguments.sample_tokens)]
        path = Path(folder) / f"{synthetic.write_shard(Path(folder), samples, spec=spec)}.safetensors"
        del samples
        shard, rates = Shard(path), []
        for _ in range(arguments.repeats + 1):
            start = time.process_time()
            found = [scan_sample(shard, i) for i in range(len(shard))]
            file_checksum(path)
            rates.append(path.stat().st_size / (time.process_time() - start) / 1e9)
            assert not any(scan.findings for scan in found)
    rates = rates[1:]  # the first brings the file into the page cache
    print(f"{shard.header.size:,} bytes, {spec.row_bytes:,} a token")
    print(f"scans and checksums: {statistics.median(rates):.2f} GB/s a core ({min(rates):.2f} to {max(rates):.2f})")
    seconds = [alignment_seconds(samples=arguments.samples, hidden_size=arguments.hidden_size) for _ in range(arguments.repeats)]
    print(f"alignment: {statistics.median(seconds):.3f} core seconds a sample ({min(seconds):.3f} to {max(seconds):.3f})")


if __name__ == "__main__":
    main()

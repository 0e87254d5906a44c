"""The rate at which rows get from host memory into one preallocated file.

The rows are written by one thread and by several threads, and through a memory map.

    python benchmarks/file_write.py /dev/shm results

The data are half a gigabyte in blocks of 64 MiB, as the last pass of a long sample leaves them. On
a machine with a GPU the memory is pinned. The figures are medians of three new files.
"""

import argparse
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import xxhash

_BLOCK, _COUNT = 64 << 20, 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    blocks = [torch.randint(256, (_BLOCK,), dtype=torch.uint8) for _ in range(_COUNT)]
    if torch.cuda.is_available():
        blocks = [block.pin_memory() for block in blocks]
    sources = [block.numpy() for block in blocks]
    ways = {f"written by {n}": lambda fd, n=n: write(fd, sources, n) for n in (1, 4)}
    ways |= {
        f"memory-mapped, {n} threads": lambda fd, n=n: write_mapped(fd, sources, n)
        for n in (1, 4, 8)
    }
    print("| | GB/s |\n| --- | ---: |")
    print(
        "| checksum, one thread |"
        f" {rate(lambda: xxhash.xxh3_64(memoryview(sources[0])).digest(), _BLOCK):.1f} |"
    )
    for folder in parser.parse_args().folders:
        for name, way in ways.items():
            print(
                f"| {folder}, {name} |"
                f" {statistics.median(new_file(folder, way) for _ in range(3)):.1f} |",
                flush=True,
            )


def rate(action: Callable[[], object], size: int) -> float:
    """Return the GB/s of an action on `size` bytes."""
    start = time.perf_counter()
    action()
    return size / (time.perf_counter() - start) / 1e9


def new_file(folder: Path, way: Callable[[int], None]) -> float:
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, _BLOCK * _COUNT)
        return rate(lambda: way(file.fileno()), _BLOCK * _COUNT)


def write(fd: int, sources: list[np.ndarray], threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda i: os.pwrite(fd, memoryview(sources[i]), i * _BLOCK), range(_COUNT)))


def write_mapped(fd: int, sources: list[np.ndarray], threads: int) -> None:
    with mmap.mmap(fd, _BLOCK * _COUNT) as mapped, ThreadPoolExecutor(threads) as pool:
        copy_quarters(pool, sources, np.frombuffer(mapped, np.uint8))


def copy_quarters(pool: ThreadPoolExecutor, sources: list[np.ndarray], target: np.ndarray) -> None:
    """Copy every block in four parts, so that eight threads have work."""
    targets = target.reshape(_COUNT, 4, _BLOCK // 4)
    list(
        pool.map(
            lambda at: np.copyto(targets[at], sources[at[0]].reshape(4, -1)[at[1]]),
            np.ndindex(_COUNT, 4),
        )
    )


if __name__ == "__main__":
    main()

"""Arguments and timing that the scripts of both peers share."""

import json
import os
import sys
import time
from collections.abc import Callable

from datasets import Dataset, load_dataset

file, folder, max_tokens, workers, cache = (
    sys.argv[1],
    sys.argv[2],
    int(sys.argv[3]),
    int(sys.argv[4]),
    sys.argv[5],
)


def report(build: Callable[[Dataset], Dataset]) -> None:
    """Print the time from the file to the samples as one JSON line.

    Args:
        build: makes the samples from the file's rows.
    """
    start, before = time.perf_counter(), sum(os.times()[:4])
    rows = load_dataset("json", data_files=file, split="train", cache_dir=cache)
    loaded = time.perf_counter()
    samples = build(rows)
    figures = {
        "rows": len(rows),
        "samples": len(samples),
        "seconds": time.perf_counter() - start,
        "reading": loaded - start,
        "cpu_seconds": sum(os.times()[:4]) - before,
    }
    print(json.dumps(figures))

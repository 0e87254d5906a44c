"""Memory of a server's process tree while something else happens."""

import subprocess
import threading
import time
from collections.abc import Mapping

import psutil


class MemoryWatch:
    """Samples resident memory of each tree once a second, and the GPU's used memory where there is one.

    Args:
        trees: name and process id of each tree's root.
    """

    def __init__(self, trees: Mapping[str, int]) -> None:
        self._trees = {name: psutil.Process(pid) for name, pid in trees.items()}
        self._seen: dict[str, list[float]] = {name: [] for name in [*trees, "gpu"]}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._start = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(1.0):
            for name, root in self._trees.items():
                self._seen[name].append(_resident(root) / 2**20)
            self._seen["gpu"].append(gpu_used_mib())

    def summary(self) -> dict[str, dict[str, float]]:
        """MiB by tree: at the first sample, at a quarter of the time, at the last sample, and the most."""
        found = {"seconds": round(time.monotonic() - self._start)}
        for name, values in self._seen.items():
            if values:
                quarter = values[len(values) // 4]
                found[name] = {
                    k: round(v) for k, v in {"first": values[0], "quarter": quarter, "last": values[-1], "most": max(values)}.items()
                }
        return found


def _resident(root: psutil.Process) -> int:
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def gpu_used_mib() -> float:
    """MiB in use on all GPUs together; 0 where there is none."""
    try:
        text = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True
        ).stdout
    except FileNotFoundError:
        return 0.0
    return float(sum(int(line) for line in text.split()))

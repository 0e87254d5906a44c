"""The memory of a server's process tree during a test or a benchmark."""

import subprocess
import threading
import time
from collections.abc import Mapping

import psutil


class MemoryWatch:
    """Watch that samples the memory of process trees once a second, also on GPUs.

    Args:
        trees: name and process id of each tree's root.
    """

    def __init__(self, trees: Mapping[str, int]) -> None:
        self._trees = {name: psutil.Process(pid) for name, pid in trees.items()}
        self._seen: dict[str, list[float]] = {
            name: [] for tree in trees for name in (tree, f"{tree}, GPU")
        }
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
            on_gpu = gpu_mib_by_process()
            for name, root in self._trees.items():
                pids = [process.pid for process in (root, *root.children(recursive=True))]
                self._seen[name].append(sum(map(_resident, pids)) / 2**20)
                self._seen[f"{name}, GPU"].append(sum(on_gpu.get(pid, 0.0) for pid in pids))

    def summary(self) -> dict[str, dict[str, float]]:
        """Return MiB by tree: first sample, after a quarter of the time, last sample, maximum."""
        found = {"seconds": round(time.monotonic() - self._start)}
        for name, values in self._seen.items():
            if values:
                quarter = values[len(values) // 4]
                found[name] = {
                    k: round(v)
                    for k, v in {
                        "first": values[0],
                        "quarter": quarter,
                        "last": values[-1],
                        "most": max(values),
                    }.items()
                }
        return found


def _resident(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.NoSuchProcess:
        return 0


def gpu_mib_by_process() -> dict[int, float]:
    """Return MiB on GPUs by process id; empty on a machine without a GPU."""
    try:
        text = subprocess.run(
            ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
        ).stdout
    except FileNotFoundError:
        return {}
    rows = [line.split(",") for line in text.splitlines()]
    found: dict[int, float] = {}
    for pid, used in ((int(row[0]), row[1].strip()) for row in rows if len(row) == 2):
        # Some drivers do not report it.
        if used.isdigit():
            found[pid] = found.get(pid, 0.0) + float(used)
    return found

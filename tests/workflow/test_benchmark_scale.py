"""The benchmark of run sizes: it still goes through the workflow as it is."""

import json
import subprocess
import sys
from pathlib import Path

from workflow_copy import REPOSITORY


def test_the_smallest_size_is_measured_in_every_step(tmp_path: Path) -> None:
    figures = tmp_path / "scale.json"
    command = [
        REPOSITORY / "benchmarks" / "scale.py",
        "--folder",
        tmp_path,
        "--sizes",
        "3x60",
        "--json",
        figures,
    ]
    done = subprocess.run(
        [sys.executable, *command, "--run-seconds", "0", "--repeats", "1"],
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    (size,) = json.loads(figures.read_text())
    assert size["samples"] == 60 and size["shards"] > 1
    assert all(
        size[step]["cpu"] > 0
        for step in ("plan", "statistics", "manifest", "nothing stale", "open")
    )

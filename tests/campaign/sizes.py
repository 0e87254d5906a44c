"""Sources of extreme sizes: each row is counted, or the source is refused by name, and memory is
bounded.

    python tests/campaign/sizes.py --folder /tmp/sizes [--cases "100,000 levels"]

Each case makes a source, tokenises it and, where rows are kept, plans it, in a process of its own.
The table shows what became of the rows, seconds of a core, and the peak memory of the process with
its workers. The script ends with status 1 if a case has another result than is expected, shows a
traceback, or takes more time or memory than `CASES` allows.
"""

import argparse
import dataclasses
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS))

MODEL = TESTS.parent / "models" / "SmolLM2-135M-Instruct"
GOOD = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
MB = 1 << 20
# other work on the machine may take most of its cores
_PATIENCE = 15


@dataclasses.dataclass(frozen=True)
class Case:
    """A source, and what is expected of it.

    Attributes:
        write: function that writes the rows.
        expected: rows by what becomes of them, or the words of the error.
        seconds: most seconds of a core that it may take.
        megabytes: most memory that it may take.
        suffix: kind of the file.
        max_tokens: longest sample.
    """

    write: Callable[[IO[str]], None]
    expected: dict[str, int] | str
    seconds: float
    megabytes: int
    suffix: str = ".jsonl"
    max_tokens: int = 2048


def _line(file: IO[str], row: object) -> None:
    file.write(json.dumps(row) + "\n")


def _large_row(megabytes: int) -> Callable[[IO[str]], None]:
    def write(file: IO[str]) -> None:
        _line(file, GOOD)
        file.write('{"messages": [{"role": "user", "content": "')
        for _ in range(megabytes):
            file.write("word " * (MB // 5))
        file.write('"}, {"role": "assistant", "content": "a"}]}\n')
        _line(file, {**GOOD, "x": 1})

    return write


def _one_character(file: IO[str]) -> None:
    for character in ("a", " ", "\n", "é", "\u202e", "😀"):
        row = [{"role": "user", "content": character * (4 * MB)}, GOOD["messages"][1]]
        _line(file, {"messages": row})
    _line(file, GOOD)


def _columns(file: IO[str]) -> None:
    for row in range(20):
        content = [{"role": "user", "content": f"q {row}"}, GOOD["messages"][1]]
        _line(file, {"messages": content} | {f"column {i}": i for i in range(100_000)})


def _wide_table(file: IO[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = 300
    columns = {f"column {i}": pa.array([i] * rows) for i in range(100_000)}
    prompts = {"prompt": [f"q {i}" for i in range(rows)], "completion": ["a"] * rows}
    pq.write_table(pa.table({**columns, **prompts}), file.name)


def _tiny_rows(count: int) -> Callable[[IO[str]], None]:
    def write(file: IO[str]) -> None:
        for i in range(count):
            ids = f"[{i % 49000},{i // 49000},7]"
            file.write(f'{{"input_ids":{ids},"loss_mask":[0,1,1]}}\n')

    return write


def _blank_lines(file: IO[str]) -> None:
    _line(file, GOOD)
    for _ in range(10_000):
        file.write("\n" * 1000)


def _no_rows(file: IO[str]) -> None:
    for _ in range(10_000):
        file.write("1\n" * 1000)
    _line(file, GOOD)


def _deep(file: IO[str]) -> None:
    for before, after in (("[", "]"), ('{"a":', "}")):
        deep = before * 100_000 + "1" + after * 100_000
        call = '"tool_calls": [{"function": {"name": "f", "arguments": %s}}]'
        for value in (deep, json.dumps(deep)):
            file.write(f'{{"messages": {value}}}\n')
            file.write(f'{{"messages": [{{"role": "user", "content": {value}}}]}}\n')
            messages = '{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", '
            file.write(f'{{"messages": [{messages}{call % value}}}]}}\n')
    _line(file, GOOD)


def _unclosed(file: IO[str]) -> None:
    file.write("[" + json.dumps(GOOD) + ', {"messages": "')
    for _ in range(600):
        file.write("x" * MB)


CASES = {
    "one row of 200 MB": Case(
        _large_row(200), {"kept": 1, "too_long": 1, "duplicate": 1}, 60, 3000
    ),
    "one row of 500 MB": Case(
        _large_row(500), {"kept": 1, "too_large": 1, "duplicate": 1}, 60, 2500
    ),
    "an array of a row that does not end": Case(
        _unclosed, "row 1 of the array: expected a row of at most", 60, 3000, ".json"
    ),
    "4 MB of one character": Case(_one_character, {"kept": 1, "too_long": 6}, 60, 2000),
    "4 MB of one character, encoded": Case(
        _one_character, {"kept": 7}, 300, 6000, max_tokens=20 * MB
    ),
    "100,000 keys in each row": Case(_columns, {"kept": 20}, 60, 2000),
    "100,000 columns": Case(_wide_table, {"kept": 300}, 300, 5000, ".parquet"),
    "100,000 levels": Case(_deep, {"kept": 1, "too_deep": 10, "no_assistant": 2}, 60, 2000),
    "10 million blank lines": Case(_blank_lines, {"kept": 1}, 60, 2000),
    "10 million rows that are none": Case(
        _no_rows, {"kept": 1, "not_an_object": 10_000_000}, 600, 2000
    ),
    "10 million rows of 3 tokens": Case(_tiny_rows(10_000_000), {"kept": 10_000_000}, 900, 9000),
}


def work(source: Path, workers: int, max_tokens: int) -> None:
    """Tokenise and plan a source; print what became of its rows."""
    from synthetic import capture_spec

    from draftstates.errors import run_command
    from draftstates.plan.plan import PlanOptions, make_plan
    from draftstates.tokens.sources import TokeniseOptions
    from draftstates.tokens.tokenise import tokenise_source

    def main() -> None:
        tokens = source.parent / "tokens" / "one.parquet"
        counts = tokenise_source(
            name="one",
            paths=[source],
            tokenizer_path=MODEL,
            options=TokeniseOptions(max_tokens=max_tokens, max_skipped_fraction=1.0),
            output=tokens,
            accounting=tokens.with_suffix(".json"),
            workers=workers,
        )
        tokenised = time.monotonic()
        options = PlanOptions(budget=None, exclude=[], deduplicate=True)
        spec = capture_spec(layers=(1,), num_layers=2, hidden_size=4, stored_dtype="float32")
        plan = make_plan([tokens], spec=spec, results=source.parent, options=options)
        totals = plan.accounting.totals
        assert totals.rows_in == totals.kept + sum(totals.skipped.values()) == counts["rows_in"]
        found = {"kept": totals.kept, **totals.skipped}
        seconds = round(time.monotonic() - tokenised, 1)
        print(json.dumps({"found": found, "shards": len(plan.shards), "plan_seconds": seconds}))

    run_command(main)


def try_case(name: str, case: Case, folder: Path, workers: int) -> bool:
    """Run a case in a process of its own, print its line, and return whether it holds."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    source = folder / f"rows{case.suffix}"
    with open(source, "w") as file:
        case.write(file)
    size = source.stat().st_size
    before = _core_seconds()
    command = [sys.executable, __file__, "--work", str(source), "--workers", str(workers)]
    command += ["--max-tokens", str(case.max_tokens)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        peak = _watch(process, time.monotonic() + _PATIENCE * case.seconds)
        said = process.stdout.read() if process.stdout else ""
    seconds = _core_seconds() - before
    shutil.rmtree(folder)
    lines = said.strip().splitlines() or [""]
    wrong = ["traceback"] if "Traceback" in said else []
    if isinstance(case.expected, str):
        shown = next((line for line in lines if line.startswith("error: ")), lines[-1])
        wrong += [] if case.expected in shown else [f"expected {case.expected!r}"]
    else:
        found = json.loads(lines[-1]) if process.returncode == 0 else {"found": lines[-1]}
        shown = json.dumps(found)
        wrong += [] if found["found"] == case.expected else [f"expected {case.expected}"]
    wrong += [f"more than {case.seconds:.0f} s"] if seconds > case.seconds else []
    wrong += [f"more than {case.megabytes} MB"] if peak > case.megabytes else []
    print(
        f"{name:36} {size / 1e6:8,.0f} MB file {seconds:6.0f} s {peak:6,.0f} MB  {shown[:160]}"
        + (f"  WRONG: {'; '.join(wrong)}" if wrong else ""),
        flush=True,
    )
    return not wrong


def _core_seconds() -> float:
    """Return the seconds that processes which have ended took of a core."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _watch(process: subprocess.Popen, deadline: float) -> float:
    """Wait for a process; return the peak of its memory and its workers' together, in MB."""
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, sum(_memory(process.pid)) / MB)
        if time.monotonic() > deadline:
            os.killpg(process.pid, 9)
        time.sleep(0.3)
    return peak


def _memory(session: int) -> Iterator[int]:
    """Yield the bytes that each process of a session has for itself, shared pages divided."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) == session:
                text = (folder / "smaps_rollup").read_text()
                yield int(text.partition("Pss:")[2].split()[0]) << 10
        except (OSError, IndexError, ValueError):
            continue


def main() -> None:
    """Try the cases, print the table, and end with status 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, help="a new folder for the sources")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--max-tokens", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.workers, arguments.max_tokens)
        return
    held = [
        try_case(name, CASES[name], arguments.folder, arguments.workers) for name in arguments.cases
    ]
    print(f"{held.count(False)} cases are wrong")
    sys.exit(not all(held))


if __name__ == "__main__":
    main()

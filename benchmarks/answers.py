"""The stage of answers against SGLang's own `benchmark.serving`: same requests, one server.

    python benchmarks/answers.py --model models/SmolLM2-135M-Instruct --prompts 64 --new 64

Each repeat clears the server's cache before the stage answers all prompts (requests, log
probabilities, journal, file of answers), and again before SGLang's client sends the same bodies, in
turned order. Rates are sampled tokens by the time from the first request until the last answer, for
the stage until its file is synced. Then the stage alone answers two turns of half as many
conversations, and the share of cached tokens is printed. The last lines are a table.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests" / "server"))

import argparse
import contextlib
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import random
import shutil
import statistics
import tempfile
import time
import types
import urllib.request
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from bench_servers import bench_spec, turn
from server_harness import CPU_FLAGS, serve

from draftstates.answers import answer
from draftstates.answers.client import AnswerClient
from draftstates.answers.prompts import write_prompts
from draftstates.config import Answers, Sampling
from draftstates.model.folder import ModelFolder
from draftstates.records import Prompts
from draftstates.tokens.answered import read_answers
from draftstates.tokens.sources import TokeniseOptions

_TEXT = "the a river stone light under house seven small green walk paper night opens"
_WARM_UP = 16


class EqualLengths(AnswerClient):
    """The stage's client, whose answers all have the most tokens.

    Attributes:
        began: when the last client was made; its first request follows.
        sent: what the sampling parameters of all requests have in common.
    """

    began = 0.0
    sent: dict[str, Any] = {}

    def __init__(self, *arguments: Any, **names: Any) -> None:
        super().__init__(*arguments, **names)
        self.parameters["ignore_eos"] = True
        EqualLengths.began, EqualLengths.sent = time.perf_counter(), self.parameters


def questions(count: int, turns: int) -> list[dict[str, Any]]:
    """Return conversations of random words, 20 to 200 a turn."""
    draw = random.Random(0)
    rows = []
    for _ in range(count):
        messages = []
        for _ in range(turns):
            text = " ".join(draw.choices(_TEXT.split(), k=draw.randint(20, 200)))
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": ""}]
        rows.append({"messages": messages[:-1]})
    return rows


def options_of(arguments: argparse.Namespace, new: int) -> TokeniseOptions:
    """Return options under which all prompts are one chunk."""
    sampling = Sampling(temperature=0.7, top_p=0.95, max_new_tokens=new)
    answers = Answers(
        sampling=sampling, chunk=2 * arguments.prompts, in_flight=arguments.concurrency
    )
    return TokeniseOptions(max_tokens=8192, answers=answers)


def prompts_in(folder: Path, count: int, turns: int, arguments: argparse.Namespace) -> Path:
    """Write prompts into a new folder, and return it."""
    folder.mkdir()
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in questions(count, turns)))
    write_prompts(
        source="bench",
        paths=[data],
        tokenizer_path=arguments.model,
        options=options_of(arguments, arguments.new),
        output=folder / "prompts.parquet",
    )
    return folder


def by_the_stage(
    folder: Path, arguments: argparse.Namespace, url: str, *, new: int
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Have the stage answer everything in `folder`; return its figures, and the answers."""
    (chunk,) = Prompts.read(folder / "prompts.json").chunks
    file = folder / "key" / f"{chunk.chunk_id}.parquet"
    shutil.rmtree(file.parent, ignore_errors=True)
    answer.answer_chunk(
        chunk.chunk_id,
        prompts=folder / "prompts.parquet",
        tokenizer_path=arguments.model,
        options=options_of(arguments, new),
        url=url,
        api_key=None,
        output=file,
    )
    seconds = time.perf_counter() - EqualLengths.began
    rows = read_answers(file)[0].to_pylist()
    if short := [row for row in rows if len(row["output_ids"]) != new]:
        raise SystemExit(f"expected answers of {new} tokens, found {len(short)} of other lengths")
    figures = {
        "tokens": new * len(rows),
        "seconds": seconds,
        "prompt_tokens": sum(len(row["prompt_ids"]) for row in rows),
        "cached_tokens": sum(row["cached_tokens"] for row in rows),
    }
    return figures, rows


def sglangs_benchmark() -> types.ModuleType:
    """Return SGLang's benchmark.

    One of its data sets imports a package that a GPU machine may lack; none of them is used.
    """
    if importlib.util.find_spec("datasets") is None:
        stand_in = types.ModuleType("datasets")
        stand_in.__spec__ = importlib.machinery.ModuleSpec("datasets", None)
        stand_in.load_dataset = None
        sys.modules["datasets"] = stand_in
    from sglang.benchmark import serving

    return serving


def by_sglang(prompts: list[list[int]], command: list[str], new: int, output: Path) -> float:
    """Have SGLang's client send ready prompts; return its seconds. It runs in a process of its own.

    Args:
        prompts: ids of each prompt.
        command: arguments of `sglang.benchmark.serving`.
        new: tokens of each answer.
        output: file for what it measured.
    """
    serving = sglangs_benchmark()
    rows = [serving.DatasetRow(prompt=ids, prompt_len=len(ids), output_len=new) for ids in prompts]
    serving.get_dataset = lambda *_: rows
    output.unlink(missing_ok=True)
    sys.argv = ["serving", *command, "--output-file", str(output)]
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        serving.cli_main()
    found = json.loads(output.read_text())
    if found["completed"] != len(rows):
        raise SystemExit(f"SGLang's client: {found['completed']} of {len(rows)} requests completed")
    return found["duration"]


def client_command(arguments: argparse.Namespace, url: str) -> list[str]:
    """Return the arguments with which SGLang's client sends the bodies that the stage sent."""
    host, port = url.removeprefix("http://").split(":")
    parameters = {**EqualLengths.sent, "max_new_tokens": arguments.new}
    body = {"sampling_params": parameters, "return_logprob": True, "logprob_start_len": -1}
    command = ["--backend", "sglang", "--host", host, "--port", port, "--disable-stream"]
    command += ["--model", str(arguments.model), "--tokenizer", str(arguments.model)]
    command += ["--max-concurrency", str(arguments.concurrency), "--warmup-requests", "0"]
    return [*command, "--disable-tqdm", "--extra-request-body", json.dumps(body)]


def measure(
    arguments: argparse.Namespace, url: str, place: Path, pool: ProcessPoolExecutor
) -> None:
    """Measure both ways in each repeat, in turned order, and print the table."""
    one = prompts_in(place / "one", arguments.prompts, 1, arguments)
    two = prompts_in(place / "two", arguments.prompts // 2, 2, arguments)
    # the first answers warm the server and both clients up, and give SGLang's its requests
    rows = by_the_stage(one, arguments, url, new=_WARM_UP)[1]
    prompts = [row["prompt_ids"] for row in rows]
    command, output = client_command(arguments, url), place / "sglang.jsonl"
    pool.submit(by_sglang, prompts[:_WARM_UP], command, arguments.new, output).result()

    def cleared(folder: Path | None = None) -> dict[str, float]:
        urllib.request.urlopen(f"{url}/flush_cache").read()
        if folder:
            return by_the_stage(folder, arguments, url, new=arguments.new)[0]
        asked = pool.submit(by_sglang, prompts, command, arguments.new, output)
        return {"tokens": len(prompts) * arguments.new, "seconds": asked.result()}

    rates: dict[str, list[float]] = {"stage": [], "sglang": []}
    for repeat in range(arguments.repeats):
        for way in ("stage", "sglang") if repeat % 2 else ("sglang", "stage"):
            found = cleared(one if way == "stage" else None)
            rates[way].append(found["tokens"] / found["seconds"])
            print(json.dumps({"repeat": repeat, "way": way, **found}), flush=True)
    turns = cleared(two)
    print(json.dumps({"way": "stage, two turns", **turns}), flush=True)
    ratios = [mine / its for mine, its in zip(rates["stage"], rates["sglang"], strict=True)]
    print("| way | tokens/s | to SGLang's client |\n| --- | --- | --- |")
    for way, found in rates.items():
        spread = f"{statistics.median(found):,.0f} ({min(found):,.0f} to {max(found):,.0f})"
        print(f"| {way} | {spread} | {statistics.median(ratios) if way == 'stage' else 1:.3f} |")
    share = turns["cached_tokens"] / turns["prompt_tokens"]
    print(f"two turns: {share:.0%} of the prompt tokens came from the cache", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--flags", help="the server's flags; those of a CPU where left out")
    parser.add_argument("--logs", type=Path, help="folder for the server's log")
    parser.add_argument("--turn", type=Path, help="file that benchmarks lock while they measure")
    # nothing is captured
    parser.set_defaults(layers="1")
    arguments = parser.parse_args()
    flags = arguments.flags.split() if arguments.flags else CPU_FLAGS
    spec = bench_spec(ModelFolder(arguments.model), arguments)
    answer.AnswerClient = EqualLengths
    with (
        tempfile.TemporaryDirectory() as place,
        ProcessPoolExecutor(
            1, mp_context=multiprocessing.get_context("spawn"), initializer=sglangs_benchmark
        ) as pool,
    ):
        root = Path(place, "root")
        root.mkdir()
        # the first task starts the client's process; its imports take as long as a server's start
        pool.submit(int)
        with (
            serve(
                spec,
                folder=arguments.model,
                root=root,
                base_flags=flags,
                radix_cache=True,
                plugin=False,
                log_folder=arguments.logs,
            ) as server,
            turn(arguments.turn),
        ):
            measure(arguments, server.endpoint.url, Path(place), pool)


if __name__ == "__main__":
    main()

"""The stage of answers against SGLang's own `benchmark.serving`: same requests, one server.

    python benchmarks/answers.py --model models/SmolLM2-135M-Instruct --prompts 64 --new 64

Each repeat clears the server's cache and has the stage answer all prompts (requests, log
probabilities, journal, file of answers), and then SGLang's client send the same bodies, in turned
order. Rates are sampled tokens by the time from the first request until the last answer, for the
stage until its file is synced. With --turns 2, the stage alone answers two turns of each
conversation, and the share of cached tokens is printed. The last lines are a table.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests" / "server"))

import argparse
import json
import random
import shutil
import statistics
import subprocess
import tempfile
import time
import urllib.request
from typing import Any

from server_harness import CPU_FLAGS, serve, spec_for

from draftstates.answers import client
from draftstates.answers.answer import answer_chunk
from draftstates.answers.prompts import write_prompts
from draftstates.config import Answers, Sampling
from draftstates.records import Prompts
from draftstates.tokens.answered import read_answers
from draftstates.tokens.sources import TokeniseOptions

_TEXT = "the a river stone light under house seven small green walk paper night opens"


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


def options_of(arguments: argparse.Namespace) -> TokeniseOptions:
    sampling = Sampling(temperature=0.7, top_p=0.95, max_new_tokens=arguments.new)
    answers = Answers(
        sampling=sampling, chunk=2 * arguments.prompts, in_flight=arguments.concurrency
    )
    return TokeniseOptions(max_tokens=8192, answers=answers)


def by_the_stage(folder: Path, arguments: argparse.Namespace, url: str) -> dict[str, float]:
    """Have the stage answer everything in `folder`; return tokens, seconds and cached tokens."""
    prompts = folder / "prompts.parquet"
    shutil.rmtree(folder / "key", ignore_errors=True)
    start = time.perf_counter()
    files = []
    for chunk in Prompts.read(folder / "prompts.json").chunks:
        files.append(folder / "key" / f"{chunk.chunk_id}.parquet")
        answer_chunk(
            chunk.chunk_id,
            prompts=prompts,
            tokenizer_path=arguments.model,
            options=options_of(arguments),
            url=url,
            api_key=None,
            output=files[-1],
        )
    seconds = time.perf_counter() - start
    rows = [row for file in files for row in read_answers(file)[0].to_pylist()]
    # the jobs' own time excludes the load of the tokenizer
    asked = sum(read_answers(file)[1]["seconds"] for file in files)
    return {
        "tokens": sum(len(row["output_ids"]) for row in rows),
        "seconds": asked,
        "whole_seconds": seconds,
        "prompt_tokens": sum(len(row["prompt_ids"]) for row in rows),
        "cached_tokens": sum(row["cached_tokens"] for row in rows),
    }


def by_sglang(folder: Path, arguments: argparse.Namespace, url: str) -> dict[str, float]:
    """Have SGLang's client send the same bodies, in a process of its own."""
    (file,) = (folder / "key").glob("*.parquet")
    rows = read_answers(file)[0].to_pylist()
    parameters = {**sent_parameters(arguments), "max_new_tokens": arguments.new}
    requests, output = folder / "requests.json", folder / "sglang.jsonl"
    requests.write_text(json.dumps([row["prompt_ids"] for row in rows]))
    output.unlink(missing_ok=True)
    host, port = url.removeprefix("http://").split(":")
    body = {"sampling_params": parameters, "return_logprob": True, "logprob_start_len": -1}
    command = [sys.executable, __file__, "--requests", requests, "--new", str(arguments.new), "--"]
    command += ["--backend", "sglang", "--host", host, "--port", port, "--disable-stream"]
    command += ["--model", arguments.model, "--tokenizer", arguments.model, "--disable-tqdm"]
    command += ["--max-concurrency", str(arguments.concurrency), "--warmup-requests", "0"]
    command += ["--extra-request-body", json.dumps(body), "--output-file", output]
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
    found = json.loads(output.read_text())
    assert found["completed"] == len(rows)
    return {"tokens": len(rows) * arguments.new, "seconds": found["duration"]}


def sglangs_client(requests: Path, new: int) -> None:
    """Run SGLang's benchmark with ready requests in place of its data sets."""
    from sglang.benchmark import serving

    rows = [
        serving.DatasetRow(prompt=ids, prompt_len=len(ids), output_len=new)
        for ids in json.loads(requests.read_text())
    ]
    serving.get_dataset = lambda *_: rows
    sys.argv = [sys.argv[0], *sys.argv[sys.argv.index("--") + 1 :]]
    serving.cli_main()


def sent_parameters(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters of all requests: every answer has the same length."""
    sampling = options_of(arguments).answers.sampling
    sender = client.AnswerClient("", api_key=None, sampling=sampling, stop_ids=[])
    return {**sender.parameters, "ignore_eos": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--flags", help="the server's flags; those of a CPU where left out")
    parser.add_argument("--requests", type=Path, help=argparse.SUPPRESS)
    arguments, _ = parser.parse_known_args()
    if arguments.requests:
        sglangs_client(arguments.requests, arguments.new)
        return
    parameters = sent_parameters(arguments)
    original = client.AnswerClient.__init__

    def begin(self: client.AnswerClient, *args: Any, **names: Any) -> None:
        original(self, *args, **names)
        self.parameters = parameters

    client.AnswerClient.__init__ = begin
    flags = arguments.flags.split() if arguments.flags else CPU_FLAGS
    spec = spec_for(arguments.model, layers=[1], dtype=arguments.dtype)
    with tempfile.TemporaryDirectory() as place:
        folders = {turns: Path(place, f"turns-{turns}") for turns in (1, 2)}
        for turns, folder in folders.items():
            folder.mkdir()
            rows = questions(arguments.prompts, turns)
            data = folder / "data.jsonl"
            data.write_text("".join(json.dumps(row) + "\n" for row in rows))
            write_prompts(
                source="bench",
                paths=[data],
                tokenizer_path=arguments.model,
                options=options_of(arguments),
                output=folder / "prompts.parquet",
            )
        root = Path(place, "root")
        root.mkdir()
        common = {"folder": arguments.model, "root": root, "radix_cache": True, "plugin": False}
        with serve(spec, base_flags=flags, **common) as server:
            measure(folders, arguments, server.endpoint.url)


def measure(folders: dict[int, Path], arguments: argparse.Namespace, url: str) -> None:
    """Measure both in each repeat, in turned order, and print the table."""
    rates: dict[str, list[float]] = {"stage": [], "sglang": []}
    makers = {"stage": by_the_stage, "sglang": by_sglang}
    # the first answers warm the server up, and give SGLang's client its requests
    by_the_stage(folders[1], arguments, url)
    for repeat in range(arguments.repeats):
        for name in list(makers) if repeat % 2 else list(makers)[::-1]:
            urllib.request.urlopen(f"{url}/flush_cache").read()
            found = makers[name](folders[1], arguments, url)
            rates[name].append(found["tokens"] / found["seconds"])
            print(json.dumps({"repeat": repeat, "way": name, **found}), flush=True)
    urllib.request.urlopen(f"{url}/flush_cache").read()
    turns = by_the_stage(folders[2], arguments, url)
    print(json.dumps({"way": "stage, two turns", **turns}), flush=True)
    ratios = [one / other for one, other in zip(rates["stage"], rates["sglang"], strict=True)]
    print("| way | tokens/s | to SGLang's client |\n| --- | --- | --- |")
    for name, found in rates.items():
        spread = f"{statistics.median(found):,.0f} ({min(found):,.0f} to {max(found):,.0f})"
        print(f"| {name} | {spread} | {statistics.median(ratios) if name == 'stage' else 1:.3f} |")
    share = turns["cached_tokens"] / turns["prompt_tokens"]
    print(f"two turns: {share:.0%} of the prompt tokens came from the cache")


if __name__ == "__main__":
    main()

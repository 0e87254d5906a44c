"""A complete run of `snakemake` against plain prefill of the same tokens.

    python benchmarks/workflow.py --model models/SmolLM2-135M-Instruct --dtype float32 \\
        --mix 20-400x100 --min-bytes 1MiB --max-bytes 4MiB --work results/bench-run

The benchmark includes the machine's work between shards. It writes and plans a source of random
tokens. Then the workflow's own server and a server without the plug-in are both up. Each repeat
sends the tokens to the server without the plug-in (`plain`), runs `snakemake` from the plan to the
manifest into new results (`workflow`), and sends the tokens once more. `workflow` includes
extraction, verification, manifest and Snakemake itself, but not tokenising and the server's start.
The output is one JSON line per measurement. `--plain-every 4` saves time: it sends only every
fourth sample to the server without the plug-in.
"""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.append(str(REPOSITORY / "tests" / "server"))

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator

import numpy as np
import yaml
from bench_servers import bench_spec, turn
from capture import Mix, plain
from server_harness import CPU_FLAGS, serve

from draftstates.engine.flags import numeric, placing
from draftstates.model.folder import ModelFolder
from draftstates.paths import Capture
from draftstates.records import Plan
from draftstates.server.run import RUN_FOLDER_VARIABLE


class Run:
    """A working folder with a configuration, for which Snakemake runs in the repository."""

    def __init__(self, arguments: argparse.Namespace, flags: list[str]) -> None:
        self.folder, self.arguments = arguments.work.resolve(), arguments
        self.results = self.folder / "results"
        self.folder.mkdir(parents=True)
        self.config = self.folder / "config.yaml"
        self.config.write_text(
            yaml.safe_dump(
                {
                    "data": {
                        "sources": [
                            {
                                "name": "random",
                                "files": [str(self.folder / "tokens.jsonl")],
                                "format": "tokens",
                            }
                        ],
                        "max_tokens": arguments.mix.longest,
                    },
                    "model": {
                        "path": str(arguments.model.resolve()),
                        "engine_args": numeric(flags),
                    },
                    "capture": {"compute_dtype": arguments.dtype, "stored_dtype": arguments.dtype},
                    "shards": {"min_bytes": arguments.min_bytes, "max_bytes": arguments.max_bytes},
                    "server": {
                        "args": placing(flags),
                        "queue_bytes": arguments.queue_bytes,
                        "idle_seconds": 900,
                    },
                    "results": str(self.results),
                }
            )
        )

    def snakemake(self, *more: str) -> float:
        """Run Snakemake, with its output in snakemake.log, and return the seconds that it took."""
        command = [sys.executable, "-m", "snakemake", "--cores", str(self.arguments.cores)]
        streams = [
            "--configfile",
            str(self.config),
            "--resources",
            f"streams={self.arguments.streams}",
        ]
        start = time.perf_counter()
        with open(self.folder / "snakemake.log", "ab") as log:
            subprocess.run(
                [*command, *more, *streams], cwd=REPOSITORY, stdout=log, stderr=log, check=True
            )
        return time.perf_counter() - start

    @contextlib.contextmanager
    def server(self) -> Iterator[None]:
        """Keep the workflow's own server up and tested; Snakemake runs on it meanwhile."""
        (resolved,) = (self.results / "config").glob("*.yaml")
        command = [
            sys.executable,
            "-m",
            "draftstates.commands.cli",
            "serve",
            "--config",
            str(resolved),
            "--plan",
            str(self.results / "plan.json"),
        ]
        path = self.folder / "serve.log"
        with open(path, "wb") as log:
            process = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log)
        try:
            while not (ready := re.search(rf"{RUN_FOLDER_VARIABLE}=(\S+)", path.read_text())):
                if process.poll() is not None:
                    raise SystemExit(f"the server did not start: {path}")
                time.sleep(0.5)
            os.environ[RUN_FOLDER_VARIABLE] = ready[1]
            yield
        finally:
            os.environ.pop(RUN_FOLDER_VARIABLE, None)
            process.terminate()
            process.wait()

    def forget(self) -> None:
        """Remove what the capture folder holds, but for the self-test's rows of the server."""
        folder = self.results / Plan.read(self.results / "plan.json").capture_folder
        for path in folder.glob("*"):
            if path.is_dir():
                shutil.rmtree(path)
            elif path != Capture(folder).selftest_rows:
                path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="folder with weights and a tokenizer"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--mix", type=Mix.parse, default=Mix(200, 4000, 1024), help="SHORTEST-LONGESTxCOUNT"
    )
    parser.add_argument(
        "--vocabulary", type=int, help="ids are below this number; default: the model's"
    )
    parser.add_argument("--min-bytes", default="1GiB", help="size of a shard")
    parser.add_argument("--max-bytes", default="4GiB", help="size of a shard")
    parser.add_argument("--work", type=Path, required=True, help="new folder, removed at the end")
    parser.add_argument("--cores", type=int, default=os.cpu_count())
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens-in-flight", type=int, default=131072)
    parser.add_argument(
        "--plain-every",
        type=int,
        default=1,
        help="send only every n-th sample to the server without the plug-in",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--queue-bytes", type=int, default=256 << 20)
    parser.add_argument("--flags", help="SGLang's flags, in one string; default: those for a CPU")
    parser.add_argument(
        "--turn", type=Path, help="file that benchmarks share: only one of them measures at a time"
    )
    parser.add_argument("--keep", action="store_true", help="keep the folder")
    arguments = parser.parse_args()
    flags = CPU_FLAGS if arguments.flags is None else arguments.flags.split()
    # the workflow itself sets the other flags for a CPU
    own = ["--max-total-tokens", "16384"] if arguments.flags is None else flags
    model = ModelFolder(arguments.model)
    arguments.layers = arguments.lease = None
    run = Run(arguments, own)
    samples = arguments.mix.samples(vocabulary=arguments.vocabulary or model.vocab_size, seed=0)
    with open(run.folder / "tokens.jsonl", "w") as file:
        for sample in samples:
            file.write(
                json.dumps(
                    {"input_ids": sample.tolist(), "loss_mask": np.ones(len(sample), int).tolist()}
                )
                + "\n"
            )
    print(
        json.dumps(
            {"tokenise_and_plan_seconds": round(run.snakemake(str(run.results / "plan.json")), 1)}
        ),
        flush=True,
    )
    shards = len(Plan.read(run.results / "plan.json").shards)
    spec = bench_spec(model, arguments)
    logs = {"root": run.folder, "log_folder": run.folder}
    ratios = []
    with (
        run.server(),
        serve(spec, plugin=False, folder=arguments.model, base_flags=flags, **logs) as bare,
        turn(arguments.turn),
    ):
        # warms both up before the first measurement
        plain([bare], samples[: max(4, len(samples) // 32)], arguments.tokens_in_flight)
        for repeat in range(arguments.repeats):
            rates: dict[str, list[float]] = {"plain": [], "workflow": []}
            for mode in ("plain", "workflow", "plain"):
                if mode == "plain":
                    sent = samples[:: arguments.plain_every]
                    seconds = plain([bare], sent, arguments.tokens_in_flight)["seconds"]
                else:
                    run.forget()
                    sent, seconds = samples, run.snakemake()
                rates[mode].append(sum(map(len, sent)) / seconds)
                figures = {
                    "mode": mode,
                    "repeat": repeat,
                    "shards": shards,
                    "tokens": sum(map(len, sent)),
                    "seconds": round(seconds, 2),
                }
                print(json.dumps({**figures, "tok_s": round(rates[mode][-1], 1)}), flush=True)
            ratios.append(rates["workflow"][0] / statistics.mean(rates["plain"]))
    print(f"of plain: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    if not arguments.keep:
        shutil.rmtree(run.folder)


if __name__ == "__main__":
    main()

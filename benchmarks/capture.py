"""Prefill with capture against plain prefill, side by side in one run: the same requests, the same flags, two servers.

    python benchmarks/capture.py --model models/SmolLM2-135M-Instruct --dtype float32 --to disk=results/bench --repeats 3

Each repeat runs every mode once, in rotated order: `plain` (requests without capture to a server without the plug-in),
`capture:<name>` (everything the workflow does at capture: laid-out shards, checksums, receipts, the five next tokens, prefix
recaptures, the final sync), and `native` (SGLang's own return_hidden_states, fewer requests). Rates count the samples' tokens
alone, over the time from the first request until every row is synced. Prints one JSON line a measurement, then a table.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parent.parent / "tests" / "server")  # not this folder: its tokenize.py would hide the standard one

import argparse
import asyncio
import contextlib
import dataclasses
import json
import shutil
import statistics
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from memory_watch import MemoryWatch
from server_harness import CPU_FLAGS, Running, serve

from draftstates.capture_spec import CaptureSpec
from draftstates.client import CaptureFailed, Client, Endpoint, Work
from draftstates.config import resolve
from draftstates.extract import ExtractOptions, ShardTokens, lay_out
from draftstates.model import read_model
from draftstates.server.command import server_settings
from draftstates.server.lease import lease


@dataclasses.dataclass(frozen=True)
class Mix:
    """`count` samples of `shortest` to `longest` tokens; `native` of them are enough for the slow path."""

    shortest: int
    longest: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Mix":
        lengths, count = text.split("x")
        shortest, longest = lengths.split("-")
        return cls(int(shortest), int(longest), int(count))

    def samples(self, *, vocabulary: int, seed: int, count: int | None = None) -> list[np.ndarray]:
        random = np.random.default_rng(seed)
        lengths = random.integers(self.shortest, self.longest + 1, count or self.count)
        return [random.integers(3, vocabulary, n).astype(np.int32) for n in lengths]


class PlainClient(Client):
    """Sends the same samples in the same way, for one token each and nothing else."""

    extra: dict = {}

    async def _capture(self, work: Work, number: int) -> None:
        body = {"input_ids": work.input_ids.tolist(), "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}}
        async with self._session.post(f"{self._endpoint.url}/generate", json={**body, **self.extra}) as response:
            text = await response.read()
            if response.status != 200:
                raise CaptureFailed(text[:500].decode(errors="replace"))


class NativeClient(PlainClient):
    extra = {"return_hidden_states": True}


def bare_work(samples: list[np.ndarray]) -> list[Work]:
    return [Work(sample_id=str(i), shard=Path("unused"), first_row=0, input_ids=sample) for i, sample in enumerate(samples)]


async def send(client: Client, work: list[Work]) -> float:
    start = time.perf_counter()
    async with client:
        _, reasons = await client.capture_all(work, retries=0)
    if reasons:
        raise SystemExit(f"{len(reasons)} requests failed: {next(iter(reasons.values()))}")
    return time.perf_counter() - start


def plain(servers: list[Running], samples: list[np.ndarray], limit: int, kind: type[PlainClient] = PlainClient) -> dict:
    """The samples dealt out to all servers, which work at the same time."""

    async def go() -> float:
        parts = [samples[number :: len(servers)] for number in range(len(servers))]
        clients = [kind(server.endpoint, tokens_in_flight=limit) for server in servers]
        return max(await asyncio.gather(*(send(c, bare_work(part)) for c, part in zip(clients, parts, strict=True))))

    seconds = asyncio.run(go())
    return {"seconds": seconds, "answered": seconds}


def capture(servers: list[Running], samples: list[np.ndarray], limit: int, folder: Path, shards: int) -> dict:
    """As `extract_shard` does it, for several shards at once as several jobs would; each server has shards of its own."""
    folder = folder / uuid.uuid4().hex
    folder.mkdir(parents=True)
    started = time.perf_counter()
    dealt = [samples[number :: len(servers)] for number in range(len(servers))]
    laid = [lay_out_shards(server, part, folder / str(i), shards) for i, (server, part) in enumerate(zip(servers, dealt, strict=True))]
    laid_out = time.perf_counter() - started

    async def go() -> tuple[float, float]:
        start = time.perf_counter()
        ends = await asyncio.gather(*(fill(server, work, rows, limit) for server, (work, rows) in zip(servers, laid, strict=True)))
        return max(answered for answered, _ in ends) - start, max(synced for _, synced in ends) - start

    answered, seconds = asyncio.run(go())
    size = sum(path.stat().st_size for _, rows in laid for path in rows)
    shutil.rmtree(folder)
    return {"seconds": seconds, "answered": answered, "laid_out": laid_out, "GB_s": size / seconds / 1e9}


def lay_out_shards(server: Running, samples: list[np.ndarray], folder: Path, shards: int) -> tuple[list[Work], dict[Path, int]]:
    """The work that fills `shards` shards and their probe files, and each file's rows."""
    folder.mkdir()
    work, rows = [], {}
    for number in range(shards):
        mine = samples[number::shards]
        tokens = ShardTokens(
            shard_id=f"bench{number}",
            sample_ids=[f"{number}-{i}" for i in range(len(mine))],
            lengths=[len(s) for s in mine],
            input_ids=np.concatenate(mine),
            loss_mask=np.ones(sum(map(len, mine)), np.uint8),
        )
        shard, probe = folder / f"{number}.safetensors", folder / f"{number}.probe.safetensors"
        here, probes = lay_out(tokens, spec=server.spec, options=ExtractOptions(), shard=shard, probe=probe)
        work += here
        rows |= {shard: len(tokens.input_ids), probe: sum(n for _, n in probes)}
    return work, rows


async def fill(server: Running, work: list[Work], rows: dict[Path, int], limit: int) -> tuple[float, float]:
    """Capture all work: when the last receipt was there, and when every file was synced."""
    async with Client(server.endpoint, tokens_in_flight=limit) as client:
        _, reasons = await client.capture_all(work, retries=0)
        if reasons:
            raise SystemExit(f"{len(reasons)} samples were not captured: {next(iter(reasons.values()))}")
        answered = time.perf_counter()
        for path, count in rows.items():
            await client.synced(path, rows=count)
        return answered, time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", help="comma-separated k; EAGLE-3's three where left out")
    parser.add_argument("--to", action="append", default=[], metavar="NAME=FOLDER", help="capture to this folder; several are compared")
    parser.add_argument("--mix", action="append", type=Mix.parse, help="SHORTEST-LONGESTxCOUNT; default 20-400x64")
    parser.add_argument("--native", type=int, default=8, help="requests of the native path; 0 leaves it out")
    parser.add_argument("--shards", type=int, default=3)
    parser.add_argument("--tokens-in-flight", type=int, default=131072)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="folder that the server may write below")
    parser.add_argument("--queue-bytes", type=int, default=2 << 30)
    parser.add_argument("--flags", help="SGLang's flags, in one string; those of a CPU where left out")
    parser.add_argument("--lease", type=int, metavar="REPLICAS", help="servers by way of the lease, each on GPUs of its own")
    parser.add_argument("--logs", type=Path, help="folder that keeps the servers' logs")
    arguments = parser.parse_args()
    flags = CPU_FLAGS if arguments.flags is None else arguments.flags.split()
    targets = dict(item.split("=", 1) for item in arguments.to)
    config = json.loads((arguments.model / "config.json").read_text())
    spec = bench_spec(config, arguments)
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()) if arguments.logs is None else arguments.logs)
        if arguments.lease:
            bare = ours = lease_servers(stack, spec, arguments, flags, logs)
            targets = {name: str(ours[0].endpoint.root / "bench") for name in targets}  # a leased server writes below its results alone
            watch = stack.enter_context(MemoryWatch({}))
        else:
            common = {"folder": arguments.model, "base_flags": flags, "log_folder": logs, "root": arguments.root}
            native = ["--enable-return-hidden-states"] if arguments.native else []
            queue = {"queue_bytes": arguments.queue_bytes}
            with ThreadPoolExecutor(2) as pool:  # starting is mostly waiting
                starts = [serve(spec, plugin=False, flags=native, **common), serve(spec, queue=queue, **common)]
                bare, ours = ([server] for server in pool.map(stack.enter_context, starts))
            watch = stack.enter_context(MemoryWatch({"plain": bare[0].process.pid, "capture": ours[0].process.pid}))
        for mix in arguments.mix or [Mix(20, 400, 64)]:
            measured = run_mix(mix, bare, ours, targets, arguments, vocabulary=config["vocab_size"])
            print(table(mix, measured), flush=True)
        print(json.dumps({"memory": watch.summary()}), flush=True)


def lease_servers(
    stack: contextlib.ExitStack, spec: CaptureSpec, arguments: argparse.Namespace, flags: list[str], logs: Path
) -> list[Running]:
    """As many replicas as asked for, behind one lease; plain requests go to the same servers, which have nothing to capture of them."""
    results = arguments.root / f"draftstates-bench-{uuid.uuid4().hex[:8]}"
    results.mkdir()
    stack.callback(shutil.rmtree, results, ignore_errors=True)
    plan = results / "plan.json"
    plan.write_text(json.dumps({"capture": {**dataclasses.asdict(spec), "key": spec.key}}))
    server = {"replicas": arguments.lease, "args": flags, "queue_bytes": arguments.queue_bytes, "idle_seconds": 600}
    config = resolve(
        {
            "data": {"sources": [{"name": "none", "files": ["none"]}], "max_tokens": 2},
            "model": {"path": str(arguments.model)},
            "capture": {"compute_dtype": arguments.dtype},
            "server": server,
            "results": str(results),
        },
        origin="benchmark",
    )
    settings = server_settings(config, spec=spec, plan=plan)
    stack.callback(lambda: [shutil.copy(log, logs) for log in (results / ".server").glob("*.log")])
    addresses = [stack.enter_context(lease(settings)) for _ in range(arguments.lease)]
    if len({address.url for address in addresses}) != arguments.lease:
        raise SystemExit(f"{arguments.lease} leases gave {[address.url for address in addresses]}: expected a replica each")
    root = Path(config["results"]).resolve()
    return [Running(Endpoint(url=a.url, api_key=a.api_key, root=root), spec, arguments.model, None, logs) for a in addresses]


def bench_spec(config: dict, arguments: argparse.Namespace) -> CaptureSpec:
    count = config["num_hidden_layers"]
    layers = [int(k) for k in arguments.layers.split(",")] if arguments.layers else [2, count // 2, count - 3]
    return CaptureSpec(
        model=arguments.model.name,
        model_digest=read_model(arguments.model).digest if arguments.lease else "benchmark",
        compute_dtype=arguments.dtype,
        quantization=None,
        stored_dtype=arguments.dtype,
        num_layers=count,
        hidden_size=config["hidden_size"],
        residual_layers=tuple(layers),
        final_norm="post_norm",
    )


def run_mix(
    mix: Mix, bare: list[Running], ours: list[Running], targets: dict[str, str], arguments: argparse.Namespace, *, vocabulary: int
) -> dict:
    limit = arguments.tokens_in_flight
    modes = {"plain": lambda samples: plain(bare, samples, limit)}
    for name, folder in targets.items():
        modes[f"capture:{name}"] = lambda samples, folder=folder: capture(ours, samples, limit, Path(folder).resolve(), arguments.shards)
    measured: dict[str, list[dict]] = {}
    warm = mix.samples(vocabulary=vocabulary, seed=1000, count=max(4, mix.count // 4))
    for run in modes.values():
        run(warm)
    for repeat in range(arguments.repeats):
        samples = mix.samples(vocabulary=vocabulary, seed=repeat)
        names = list(modes)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            record(measured, name, samples, modes[name](samples), repeat)
    if arguments.native:
        samples = mix.samples(vocabulary=vocabulary, seed=99, count=arguments.native)
        record(measured, "native", samples, plain(bare, samples, limit, NativeClient), 0)
    return measured


def record(measured: dict[str, list[dict]], name: str, samples: list[np.ndarray], figures: dict, repeat: int) -> None:
    tokens = sum(map(len, samples))
    figures = {"mode": name, "repeat": repeat, "tokens": tokens, "tok_s": tokens / figures["seconds"], **figures}
    measured.setdefault(name, []).append(figures)
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}), flush=True)


def table(mix: Mix, measured: dict[str, list[dict]]) -> str:
    """Medians and spread over the repeats; ratios are medians of the repeats' own ratios."""
    base = [m["tok_s"] for m in measured["plain"]]
    lines = [
        f"| {mix.count} samples of {mix.shortest} to {mix.longest} tokens | tokens/s, median (least to most) | of plain |",
        "|---|---|---|",
    ]
    for name, runs in measured.items():
        rates = [m["tok_s"] for m in runs]
        ratios = [rate / plain for rate, plain in zip(rates, base, strict=False)]
        rate = f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"
        lines.append(f"| {name} | {rate} | {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

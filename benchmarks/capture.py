"""Prefill with capture against plain prefill: same requests, same flags, two servers.

    python benchmarks/capture.py --model models/SmolLM2-135M-Instruct --dtype float32 \\
        --to disk=results/bench --repeats 3

Each repeat runs every mode once, in rotated order:

- `plain`: requests without capture to a server without the plug-in;
- `capture:<name>`: all work of the workflow at capture: laying out shards, checksums, receipts, the
  five next tokens, prefix recaptures, the final sync;
- `native`: SGLang's own return_hidden_states, with fewer requests.

Rates count only the samples' tokens, divided by the time from the first request until every row is
synced. The output is one JSON line per measurement, then a table.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests" / "server"))

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

import gpu_profile
import numpy as np
from bench_servers import bench_spec, lease_servers, own_servers, turn
from memory_watch import MemoryWatch
from server_harness import CPU_FLAGS, Running

from draftstates.extract.client import CaptureFailed, Client, Work
from draftstates.extract.extract import ExtractOptions, make_work
from draftstates.model.folder import ModelFolder
from draftstates.paths import BUILDING
from draftstates.plan.prefixes import shard_id, share_prefixes
from draftstates.plan.shard_tokens import ShardTokens
from draftstates.shards import layout

_SHARD_BYTES = 8e9


@dataclasses.dataclass(frozen=True)
class Mix:
    """The number and the lengths of a benchmark's samples.

    Attributes:
        shortest: least number of tokens of a sample.
        longest: largest number of tokens of a sample.
        count: number of samples.
    """

    shortest: int
    longest: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Mix":
        """Return the mix that a text such as 200-4000x384 names."""
        lengths, count = text.split("x")
        shortest, longest = lengths.split("-")
        return cls(int(shortest), int(longest), int(count))

    def samples(self, *, vocabulary: int, seed: int, count: int | None = None) -> list[np.ndarray]:
        """Return random samples.

        Args:
            vocabulary: ids are below this number.
            seed: of the random numbers.
            count: number of samples; None takes that of the mix.
        """
        random = np.random.default_rng(seed)
        lengths = random.integers(self.shortest, self.longest + 1, count or self.count)
        return [random.integers(3, vocabulary, n).astype(np.int32) for n in lengths]


@dataclasses.dataclass(frozen=True)
class Answered:
    """A sample that was answered; of what `Captured` holds, its namespace alone."""

    namespace: str | None


class PlainClient(Client):
    """A client that sends the same samples in the same way, for one token each, without capture.

    Attributes:
        cached: tokens that came from the server's cache.
    """

    extra: dict = {}
    cached = 0

    async def _send(self, work: Work, number: int, namespace: str | None = None) -> Answered:
        if namespace is None and self._endpoint.fresh_namespace:
            namespace = uuid.uuid4().hex
        body = {
            "input_ids": work.input_ids.tolist(),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
            **({"extra_key": namespace} if namespace else {}),
            **self.extra,
        }
        async with self._session.post(f"{self._endpoint.url}/generate", json=body) as response:
            text = await response.read()
            if response.status != 200:
                raise CaptureFailed(text[:500].decode(errors="replace"))
        if not self.extra:
            # the answer with states has 100 kB a token
            self.cached += json.loads(text)["meta_info"]["cached_tokens"]
        return Answered(namespace)


class NativeClient(PlainClient):
    """A client that asks for SGLang's own hidden states."""

    extra = {"return_hidden_states": True}


def bare_work(samples: list[np.ndarray]) -> list[Work]:
    """Return the samples as work without a shard."""
    return [
        Work(sample_id=str(i), shard=Path("unused"), first_row=0, input_ids=sample)
        for i, sample in enumerate(samples)
    ]


async def send(client: Client, work: list[Work]) -> float:
    """Send all work, and return the seconds until the last answer."""
    start = time.perf_counter()
    async with client:
        _, reasons = await client.capture(work, retries=0)
    if reasons:
        raise SystemExit(f"{len(reasons)} requests failed: {next(iter(reasons.values()))}")
    return time.perf_counter() - start


def plain(
    servers: list[Running],
    samples: list[np.ndarray],
    limit: int,
    kind: type[PlainClient] = PlainClient,
) -> dict:
    """Send the samples, divided among all servers, and measure the time."""

    async def go() -> float:
        parts = [samples[number :: len(servers)] for number in range(len(servers))]
        clients = [kind(server.endpoint, tokens_in_flight=limit) for server in servers]
        return max(
            await asyncio.gather(
                *(send(c, bare_work(part)) for c, part in zip(clients, parts, strict=True))
            )
        )

    seconds = asyncio.run(go())
    return {"seconds": seconds, "answered": seconds}


def capture(
    servers: list[Running],
    samples: list[np.ndarray],
    limit: int,
    folder: Path,
    shards: int,
    *,
    min_shared_tokens: int | None = None,
) -> dict:
    """Capture the samples as `extract_shard` does, and measure the time.

    Several shards are captured at once, as by several jobs. Each server has shards of its own.

    Args:
        min_shared_tokens: shortest prefix whose rows are shared; None shares none.
    """
    folder = folder / uuid.uuid4().hex
    folder.mkdir(parents=True)
    started = time.perf_counter()
    dealt = [samples[number :: len(servers)] for number in range(len(servers))]
    laid = [
        lay_out_shards(server, part, folder / str(i), shards, min_shared_tokens)
        for i, (server, part) in enumerate(zip(servers, dealt, strict=True))
    ]
    laid_out = time.perf_counter() - started

    async def go() -> list[Filled]:
        return await asyncio.gather(
            *(
                fill(server, work, rows, limit)
                for server, (work, rows) in zip(servers, laid, strict=True)
            )
        )

    filled = asyncio.run(go())
    seconds = max(each.synced for each in filled)
    size = sum(path.stat().st_size for _, rows in laid for path in rows)
    prefixes = sum(len(item.input_ids) for work, _ in laid for item in work if item.prefix)
    kept = sum(p.stat().st_size for _, rows in laid for p in rows if "recaptures" not in p.name)
    shutil.rmtree(folder)
    return {
        "seconds": seconds,
        "answered": max(each.answered for each in filled),
        "laid_out": laid_out,
        "GB_s": size / seconds / 1e9,
        "prefixes": prefixes,
        "bytes": kept,
        "cached": sum(each.cached for each in filled),
        "again": sum(each.again for each in filled),
    }


def shards_of(servers: list[Running], samples: list[np.ndarray]) -> int:
    """Return how many shards of about 8 GB each server's part of the samples makes."""
    return max(
        1, round(sum(map(len, samples)) * servers[0].spec.row_bytes / len(servers) / _SHARD_BYTES)
    )


def lay_out_shards(
    server: Running,
    samples: list[np.ndarray],
    folder: Path,
    shards: int,
    min_shared_tokens: int | None,
) -> tuple[list[Work], dict[Path, int]]:
    """Lay out shards and recaptures files; return the work that fills them, and their rows."""
    folder = folder / BUILDING
    folder.mkdir(parents=True)
    work, rows = [], {}
    for number in range(shards):
        # as in a plan, neighbours are in one shard
        mine = samples[number * len(samples) // shards : (number + 1) * len(samples) // shards]
        names, lengths = [f"{number}-{i}" for i in range(len(mine))], [len(s) for s in mine]
        input_ids = np.concatenate(mine)
        segments = (
            share_prefixes(input_ids, lengths, minimum=min_shared_tokens)
            if min_shared_tokens
            else None
        )
        tokens = ShardTokens(
            shard_id=shard_id(names, segments),
            sample_ids=names,
            lengths=lengths,
            input_ids=input_ids,
            loss_mask=np.ones(len(input_ids), np.uint8),
            segments=segments,
        )
        shard, recaptures = (
            folder / f"{number}.safetensors",
            folder / f"{number}.recaptures.safetensors",
        )
        layout.create(shard, spec=server.spec, **vars(tokens))
        here, chosen = make_work(
            tokens, spec=server.spec, options=ExtractOptions(), shard=shard, recaptures=recaptures
        )
        work += here
        rows |= {
            shard: segments.rows if segments else len(input_ids),
            recaptures: sum(n for _, n in chosen),
        }
    return work, rows


@dataclasses.dataclass(frozen=True)
class Filled:
    """What it took to capture all work.

    Attributes:
        answered: seconds until the last receipt.
        synced: seconds until the last file's sync.
        cached: tokens that came from the server's cache.
        again: shared rows that were computed a second time, and compared with the stored ones.
    """

    answered: float
    synced: float
    cached: int
    again: int


async def fill(server: Running, work: list[Work], rows: dict[Path, int], limit: int) -> Filled:
    """Capture all work into the laid-out files, of which each has so many rows."""
    start = time.perf_counter()
    async with Client(server.endpoint, tokens_in_flight=limit) as client:
        captured, reasons = await client.capture(work, retries=0)
        if reasons:
            raise SystemExit(
                f"{len(reasons)} samples were not captured: {next(iter(reasons.values()))}"
            )
        answered = time.perf_counter() - start
        for path, count in rows.items():
            await client.synced(path, rows=count)
    receipts = [item.receipt for item in captured]
    return Filled(
        answered,
        time.perf_counter() - start,
        cached=sum(receipt.cached_tokens for receipt in receipts),
        again=sum(receipt.again_rows for receipt in receipts),
    )


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which servers are compared, and where they write."""
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", help="comma-separated k; default: EAGLE-3's three layers")
    parser.add_argument(
        "--to",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="capture to this folder; repeat the option to compare folders",
    )
    parser.add_argument("--shards", type=int, help="default: as many as give shards of about 8 GB")
    parser.add_argument("--tokens-in-flight", type=int, default=131072)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--root", type=Path, default=Path.cwd(), help="folder below which the server may write"
    )
    parser.add_argument("--queue-bytes", type=int, default=2 << 30)
    parser.add_argument("--flags", help="SGLang's flags, in one string; default: those for a CPU")
    parser.add_argument(
        "--turn", type=Path, help="file that benchmarks share: only one of them measures at a time"
    )
    parser.add_argument("--logs", type=Path, help="folder that keeps the servers' logs")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server_arguments(parser)
    parser.add_argument(
        "--mix", action="append", type=Mix.parse, help="SHORTEST-LONGESTxCOUNT; default 20-400x64"
    )
    parser.add_argument(
        "--native", type=int, default=8, help="requests of the native path; 0 skips it"
    )
    parser.add_argument(
        "--graphs",
        help="flags of a third server, without the plug-in: SGLang with its own CUDA graphs",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="show where the GPU's time goes, with and without capture",
    )
    parser.add_argument(
        "--lease",
        type=int,
        metavar="REPLICAS",
        help="number of replicas behind one lease, each on GPUs of its own",
    )
    arguments = parser.parse_args()
    flags = CPU_FLAGS if arguments.flags is None else arguments.flags.split()
    model = ModelFolder(arguments.model)
    spec = bench_spec(model, arguments)
    with contextlib.ExitStack() as stack:
        logs = Path(
            stack.enter_context(tempfile.TemporaryDirectory())
            if arguments.logs is None
            else arguments.logs
        )
        logs.mkdir(parents=True, exist_ok=True)
        targets = dict(item.split("=", 1) for item in arguments.to)
        if arguments.lease:
            leased = lease_servers(stack, spec, arguments, flags, logs)
            servers = {"plain": leased, "capture": leased}
            # a leased server writes only below its results
            targets = {name: str(leased[0].endpoint.root / "bench") for name in targets}
        else:
            needed = {"plain"}
            if arguments.to:
                needed.add("capture")
            if arguments.graphs is not None:
                needed.add("graphs")
            servers = own_servers(stack, spec, arguments, flags, logs, needed=needed)
        stack.enter_context(turn(arguments.turn))
        trees = {
            name: server.process.pid for name, (server, *_) in servers.items() if server.process
        }
        watch = stack.enter_context(MemoryWatch(trees))
        for number, mix in enumerate(arguments.mix or [Mix(20, 400, 64)]):
            # measured once, because this path is slow
            native = 0 if number else arguments.native
            measured = run_mix(
                mix, servers, targets, arguments, vocabulary=model.vocab_size, native=native
            )
            print(table(mix, measured), flush=True)
        print(json.dumps({"memory": watch.summary()}), flush=True)


def run_mix(
    mix: Mix,
    servers: dict[str, list[Running]],
    targets: dict[str, str],
    arguments: argparse.Namespace,
    *,
    vocabulary: int,
    native: int,
) -> dict:
    limit = arguments.tokens_in_flight
    modes = {
        name: lambda samples, name=name: plain(servers[name], samples, limit)
        for name in ("plain", "graphs")
        if name in servers
    }
    for name, folder in targets.items():
        modes[f"capture:{name}"] = lambda samples, folder=folder: capture(
            servers["capture"],
            samples,
            limit,
            Path(folder).resolve(),
            arguments.shards or shards_of(servers["capture"], samples),
        )
    measured: dict[str, list[dict]] = {}
    warm = mix.samples(vocabulary=vocabulary, seed=1000, count=max(4, mix.count // 4))
    for run in modes.values():
        run(warm)
    if arguments.profile:
        show_profile(modes, servers, targets, warm, arguments.logs)
    for repeat in range(arguments.repeats):
        samples = mix.samples(vocabulary=vocabulary, seed=repeat)
        names = list(modes)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            record(measured, name, samples, modes[name](samples), repeat)
    if native:
        samples = mix.samples(vocabulary=vocabulary, seed=99, count=native)
        record(
            measured, "native", samples, plain(servers["plain"], samples, limit, NativeClient), 0
        )
    return measured


def show_profile(
    modes: dict,
    servers: dict[str, list[Running]],
    targets: dict[str, str],
    samples: list[np.ndarray],
    logs: Path | None,
) -> None:
    """Print the GPU's time with and without capture, and keep the traces.

    The passes are separate ones, because a profile slows the work that it records.
    """
    folder = Path(tempfile.mkdtemp(prefix="traces-", dir=logs))
    pairs = {"plain": "plain", "capture": f"capture:{next(iter(targets))}"}
    traces = [
        gpu_profile.record(
            servers[name][0].endpoint.url, folder / name, lambda mode=mode: modes[mode](samples)
        )
        for name, mode in pairs.items()
    ]
    print(f"{folder}:\n{gpu_profile.table(*traces)}", flush=True)


def record(
    measured: dict[str, list[dict]],
    name: str,
    samples: list[np.ndarray],
    figures: dict,
    repeat: int,
) -> None:
    tokens = sum(map(len, samples))
    figures = {
        "mode": name,
        "repeat": repeat,
        "tokens": tokens,
        "tok_s": tokens / figures["seconds"],
        **figures,
    }
    measured.setdefault(name, []).append(figures)
    print(
        json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}),
        flush=True,
    )


def table(mix: Mix, measured: dict[str, list[dict]]) -> str:
    """Return medians and spread over the repeats; a ratio is the median of the repeats' ratios."""
    base = [m["tok_s"] for m in measured["plain"]]
    lines = [
        (
            f"| {mix.count} samples of {mix.shortest} to {mix.longest} tokens | tokens/s, median"
            " (minimum to maximum) | of plain |"
        ),
        "|---|---|---|",
    ]
    for name, runs in measured.items():
        rates = [m["tok_s"] for m in runs]
        ratios = [rate / plain for rate, plain in zip(rates, base, strict=False)]
        rate = f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"
        lines.append(
            f"| {name} | {rate} | {statistics.median(ratios):.3f} ({min(ratios):.3f} to"
            f" {max(ratios):.3f}) |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

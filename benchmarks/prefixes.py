"""Capture of samples that share prefixes: with rows of their own, stored once, and computed once.

    python benchmarks/prefixes.py --model models/SmolLM2-135M-Instruct --dtype float32 \\
        --structure sharegpt_prefixes.json --conversations 20 --to disk=results/bench --repeats 3

The structure is that of real conversations, one sample per turn: for each conversation a list of
[tokens, number of the parent in the conversation or -1, tokens shared with it]. The ids are random.
Each repeat runs every mode once, in rotated order:

- `plain`: requests without capture to a server without the plug-in;
- `plain, cached`: the same to a server with a radix cache, in the order of `computed once`;
- `off:<name>`: capture with `share_prefixes: false`;
- `stored once:<name>`: capture with `share_prefixes: true`;
- `computed once:<name>`: capture with `reuse_prefixes: true`, by a server with a radix cache.

Rates count the tokens of all samples, shared ones too, divided by the time from the first request
until every row is synced. The output is one JSON line per measurement, then a table with the bytes.
A server's KV cache must hold `--tokens-in-flight` and the prefixes that they share: what it evicts
is computed a second time, and listed.
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
import uuid
from functools import partial

import numpy as np
from bench_servers import bench_spec, own_servers, turn
from capture import (
    PlainClient,
    add_server_arguments,
    capture,
    lay_out_shards,
    plain,
    record,
    send,
    shards_of,
)
from server_harness import CPU_FLAGS, Running
from structure import random_samples

from draftstates.model.folder import ModelFolder

# each mode's server
SERVERS = {
    "plain": "plain",
    "plain, cached": "cached",
    "off": "capture",
    "stored once": "capture",
    "computed once": "reusing",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server_arguments(parser)
    parser.add_argument("--structure", type=Path, required=True, help="JSON file")
    parser.add_argument("--conversations", type=int, help="the first so many; default: all")
    parser.add_argument("--min-shared-tokens", type=int, default=64)
    parser.add_argument(
        "--modes",
        type=lambda text: text.split("+"),
        default=list(SERVERS),
        help=f"joined by +, with `plain, cached`; default: {'+'.join(SERVERS)}",
    )
    arguments = parser.parse_args()
    arguments.native, arguments.graphs = 0, None
    flags = CPU_FLAGS if arguments.flags is None else arguments.flags.split()
    model = ModelFolder(arguments.model)
    structure = json.loads(arguments.structure.read_text())[: arguments.conversations]
    with contextlib.ExitStack() as stack:
        logs = arguments.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs.mkdir(parents=True, exist_ok=True)
        needed = {SERVERS[mode] for mode in arguments.modes}
        spec = bench_spec(model, arguments)
        servers = own_servers(stack, spec, arguments, flags, logs, needed=needed)
        stack.enter_context(turn(arguments.turn))
        print(measure(servers, structure, arguments, vocabulary=model.vocab_size), flush=True)


def measure(
    servers: dict, structure: list, arguments: argparse.Namespace, *, vocabulary: int
) -> str:
    """Run every mode once a repeat, and return the table."""
    limit = arguments.tokens_in_flight
    modes = {}
    if "plain" in arguments.modes:
        modes["plain"] = lambda samples: plain(servers["plain"], samples, limit)
    if "plain, cached" in arguments.modes:
        modes["plain, cached"] = partial(plain_in_order, *reusing(servers["cached"]), arguments)
    for name, folder in (item.split("=", 1) for item in arguments.to):
        for mode in arguments.modes:
            if mode.startswith("plain"):
                continue
            capturing = servers[SERVERS[mode]]
            if mode == "computed once":
                capturing = reusing(capturing)
            minimum = None if mode == "off" else arguments.min_shared_tokens
            modes[f"{mode}:{name}"] = partial(
                capture_all, capturing, Path(folder).resolve(), minimum, arguments
            )
    warm = random_samples(
        structure[: max(2, len(structure) // 16)], vocabulary=vocabulary, seed=1000
    )
    for run in modes.values():
        run(warm)
    measured: dict[str, list[dict]] = {}
    names = list(modes)
    for repeat in range(arguments.repeats):
        samples = random_samples(structure, vocabulary=vocabulary, seed=repeat)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            record(measured, name, samples, modes[name](samples), repeat)
    return table(measured)


def reusing(servers: list[Running]) -> list[Running]:
    """Return servers with a radix cache such that requests share namespaces."""
    endpoints = [
        dataclasses.replace(server.endpoint, fresh_namespace=True, reuse_prefixes=True)
        for server in servers
    ]
    return [
        dataclasses.replace(server, endpoint=endpoint)
        for server, endpoint in zip(servers, endpoints, strict=True)
    ]


def plain_in_order(
    server: Running, arguments: argparse.Namespace, samples: list[np.ndarray]
) -> dict:
    """Send what `computed once` sends, less the prefix recaptures, and measure the time."""
    folder = Path(arguments.to[0].split("=", 1)[1]).resolve() / uuid.uuid4().hex
    shards = arguments.shards or shards_of([server], samples)
    try:
        work, _ = lay_out_shards(server, samples, folder, shards, arguments.min_shared_tokens)
    finally:
        shutil.rmtree(folder)
    client = PlainClient(server.endpoint, tokens_in_flight=arguments.tokens_in_flight)
    seconds = asyncio.run(send(client, [item for item in work if not item.prefix]))
    return {"seconds": seconds, "answered": seconds, "cached": client.cached}


def capture_all(
    servers: list[Running],
    folder: Path,
    minimum: int | None,
    arguments: argparse.Namespace,
    samples: list[np.ndarray],
) -> dict:
    shards = arguments.shards or shards_of(servers, samples)
    limit = arguments.tokens_in_flight
    return capture(servers, samples, limit, folder, shards, min_shared_tokens=minimum)


def table(measured: dict[str, list[dict]]) -> str:
    """Return medians over the repeats; the bytes are those of shards, without recaptures.

    A ratio is the median of the repeats' ratios.
    """
    whole = next(
        (runs[0]["bytes"] for name, runs in measured.items() if name.startswith("off")), None
    )
    lines = [
        "| | tokens/s | of plain | of plain, cached | cached | again | GB | of `off` |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in measured.items():
        cells = [name, f"{statistics.median(each['tok_s'] for each in runs):,.0f}"]
        for base in ("plain", "plain, cached"):
            if base not in measured:
                cells.append("")
                continue
            pairs = zip(runs, measured[base], strict=True)
            ratio = statistics.median(run["tok_s"] / other["tok_s"] for run, other in pairs)
            cells.append(f"{ratio:.3f}")
        cells += [f"{runs[0].get(figure, 0):,}" for figure in ("cached", "again")]
        size = runs[0].get("bytes")
        cells += [
            f"{size / 1e9:.3f}" if size else "",
            f"{size / whole:.4f}" if size and whole else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""The servers that `capture.py` compares.

They are a server that captures, the same server without the plug-in, and, with --graphs, one with
CUDA graphs.
"""

import argparse
import contextlib
import fcntl
import shutil
import uuid
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from server_harness import Running, serve

from draftstates.capture.numbers import MADE_UP
from draftstates.config import resolve
from draftstates.engine.flags import numeric, placing
from draftstates.extract.client import Endpoint
from draftstates.model.digest import model_digest
from draftstates.model.folder import ModelFolder
from draftstates.records import Accounting, Plan, PlannedChecks, SourceAccount
from draftstates.server.command import server_settings
from draftstates.server.lease import lease
from draftstates.spec import CaptureSpec


@contextlib.contextmanager
def turn(file: Path | None) -> Iterator[None]:
    """Let one benchmark measure at a time.

    Other benchmarks with the same file wait here; their servers are up and idle.

    Args:
        file: the shared file; None does not wait.
    """
    if file is None:
        yield
        return
    with open(file, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def bench_spec(model: ModelFolder, arguments: argparse.Namespace) -> CaptureSpec:
    """Return the capture of a benchmark, from the model's folder and the arguments."""
    count = model.num_layers
    layers = (
        [int(k) for k in arguments.layers.split(",")]
        if arguments.layers
        else [2, count // 2, count - 3]
    )
    return CaptureSpec(
        model=arguments.model.name,
        model_digest=(
            MADE_UP if "dummy" in (arguments.flags or "").split() else model_digest(model)
        ),
        compute_dtype=arguments.dtype,
        quantization=None,
        stored_dtype=arguments.dtype,
        num_layers=count,
        hidden_size=model.hidden_size,
        residual_layers=tuple(layers),
        final_norm="post_norm",
        engine_args=tuple(numeric((arguments.flags or "").split())),
    )


def own_servers(
    stack: contextlib.ExitStack,
    spec: CaptureSpec,
    arguments: argparse.Namespace,
    flags: list[str],
    logs: Path,
    *,
    needed: Collection[str],
) -> dict[str, list[Running]]:
    """Start servers at the same time, because a start mostly waits.

    Args:
        needed: of `plain`, `capture`, `graphs` (without the plug-in, with the CUDA graphs of
            --graphs), `cached` (without the plug-in, with a radix cache) and `reusing` (captures
            with a radix cache).
    """
    common = {"folder": arguments.model, "log_folder": logs, "root": arguments.root}
    native = ["--enable-return-hidden-states"] if arguments.native else []
    graphs = (arguments.graphs or "").split()
    queue = {"queue_bytes": arguments.queue_bytes}
    # none of them starts before it is entered
    all_starts = {
        "plain": serve(spec, plugin=False, base_flags=flags, flags=native, **common),
        "capture": serve(spec, base_flags=flags, queue=queue, **common),
        "cached": serve(spec, plugin=False, base_flags=flags, radix_cache=True, **common),
        "reusing": serve(spec, base_flags=flags, radix_cache=True, queue=queue, **common),
        "graphs": serve(spec, plugin=False, base_flags=graphs, **common),
    }
    starts = {name: start for name, start in all_starts.items() if name in needed}
    with ThreadPoolExecutor(len(starts)) as pool:
        return {
            name: [server]
            for name, server in zip(
                starts, pool.map(stack.enter_context, starts.values()), strict=True
            )
        }


def lease_servers(
    stack: contextlib.ExitStack,
    spec: CaptureSpec,
    arguments: argparse.Namespace,
    flags: list[str],
    logs: Path,
) -> list[Running]:
    """Start the replicas of --lease behind one lease.

    Plain requests go to the same servers, which capture nothing of them.
    """
    results = arguments.root / f"draftstates-bench-{uuid.uuid4().hex[:8]}"
    results.mkdir()
    stack.callback(shutil.rmtree, results, ignore_errors=True)
    plan = results / "plan.json"
    account = SourceAccount(
        rows_in=0, kept=0, samples=0, skipped={}, failed={}, tokens=0, supervised_tokens=0
    )
    Plan(
        capture_folder=spec.folder_name,
        capture=spec,
        checks=PlannedChecks(recapture_fraction=0, recapture_minimum=0),
        shards=(),
        accounting=Accounting(sources={}, totals=account),
        images={},
        bytes_needed=0,
        bytes_present=0,
        disk_free=0,
    ).publish(plan)
    server = {
        "replicas": arguments.lease,
        "args": placing(flags),
        "queue_bytes": arguments.queue_bytes,
        "idle_seconds": 600,
    }
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
        raise SystemExit(
            f"{arguments.lease} leases gave {[address.url for address in addresses]}: expected a"
            " replica each"
        )
    root = config.results.resolve()
    return [
        Running(
            Endpoint(url=a.url, api_key=a.api_key, root=root), spec, arguments.model, None, logs
        )
        for a in addresses
    ]

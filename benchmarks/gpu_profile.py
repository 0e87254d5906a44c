"""The time of a server's GPU, by SGLang's own profiler, with and without capture.

`record` has a running server profile its batches. `table` compares two such traces: the time that
the compute kernels cover, the gaps between them and their places, the copies to the host, and the
kernels that run only with capture.
"""

import gzip
import json
import statistics
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

_TRACE_SECONDS = 60.0


def record(url: str, folder: Path, run: Callable[[], object]) -> list[dict]:
    """Return the GPU events of the server at `url` while `run` sends it work."""
    folder.mkdir(parents=True)
    _post(
        f"{url}/start_profile",
        {"output_dir": str(folder), "activities": ["GPU"], "with_stack": False},
    )
    run()
    _post(f"{url}/stop_profile", {})
    deadline = time.monotonic() + _TRACE_SECONDS
    while time.monotonic() < deadline:
        for path in folder.glob("*.trace.json.gz"):
            try:
                return gpu_events(json.loads(gzip.decompress(path.read_bytes())))
            except (EOFError, ValueError):
                # the server is still writing the trace
                break
        time.sleep(0.5)
    raise SystemExit(f"no profile appeared in {folder} within {_TRACE_SECONDS:.0f} s")


def _post(url: str, body: dict) -> None:
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()


def gpu_events(trace: dict) -> list[dict]:
    """Return the kernels, copies and fills of a Chrome trace.

    Each has a name, a kind, and begin and duration in microseconds.
    """
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"}
    found = [e for e in trace["traceEvents"] if e.get("cat") in kinds and "dur" in e]
    return [
        {"name": e["name"], "kind": e["cat"], "begin": float(e["ts"]), "dur": float(e["dur"])}
        for e in found
    ]


def covered(events: list[dict]) -> float:
    """Return the microseconds that at least one of the events covers."""
    total, end = 0.0, float("-inf")
    for begin, stop in sorted((e["begin"], e["begin"] + e["dur"]) for e in events):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total


def gaps(kernels: list[dict]) -> dict[str, list[float]]:
    """Return the microseconds without a kernel, by the names of the kernels before and after."""
    found: dict[str, list[float]] = defaultdict(list)
    end, before = float("inf"), ""
    for event in sorted(kernels, key=lambda e: e["begin"]):
        if event["begin"] > end:
            found[f"{before[:40]} -> {event['name'][:40]}"].append(event["begin"] - end)
        if before == "" or event["begin"] + event["dur"] > end:
            end, before = event["begin"] + event["dur"], event["name"]
    return found


def by_name(events: list[dict]) -> dict[str, list[float]]:
    durations: dict[str, list[float]] = defaultdict(list)
    for event in events:
        durations[event["name"]].append(event["dur"])
    return durations


def figures(events: list[dict]) -> dict[str, float]:
    """Return a trace's times in milliseconds.

    They are the time from the first kernel to the last, the part of it that kernels cover, the
    part that they do not cover, and the copies to the host.
    """
    kernels = [e for e in events if e["kind"] == "kernel"]
    to_host = [e for e in events if "DtoH" in e["name"]]
    span = max(e["begin"] + e["dur"] for e in kernels) - min(e["begin"] for e in kernels)
    busy = covered(kernels)
    return {
        "span": span / 1e3,
        "kernels": busy / 1e3,
        "gaps": (span - busy) / 1e3,
        "to_host": covered(to_host) / 1e3,
    }


def table(plain: list[dict], capture: list[dict]) -> str:
    """Return a table of both profiles: times, longest kernels, kernels of capture alone, gaps."""
    a, b = figures(plain), figures(capture)
    lines = ["| ms | plain | capture |", "|---|---|---|"]
    lines += [f"| {name} | {a[name]:.1f} | {b[name]:.1f} |" for name in a]
    mine, theirs = (
        by_name([e for e in events if e["kind"] == "kernel"]) for events in (capture, plain)
    )
    longest = sorted(theirs, key=lambda name: -sum(theirs[name]))[:6]
    for name in longest:
        one, other = statistics.median(theirs[name]), statistics.median(mine.get(name, [0.0]))
        lines.append(
            f"| median of {len(theirs[name])}, {len(mine.get(name, []))}: {name[:70]} |"
            f" {one / 1e3:.4f} | {other / 1e3:.4f} |"
        )
    own = sorted(mine.keys() - theirs.keys(), key=lambda name: -sum(mine[name]))[:8]
    lines += [
        f"| sum of {len(mine[name])}, with capture alone: {name[:70]} | 0 |"
        f" {sum(mine[name]) / 1e3:.2f} |"
        for name in own
    ]
    for name, events in (("plain", plain), ("capture", capture)):
        between = gaps([e for e in events if e["kind"] == "kernel"])
        for pair in sorted(between, key=lambda pair: -sum(between[pair]))[:6]:
            lines.append(
                f"| {name}: sum of {len(between[pair])} gaps, {pair} | |"
                f" {sum(between[pair]) / 1e3:.2f} |"
            )
    return "\n".join(lines)

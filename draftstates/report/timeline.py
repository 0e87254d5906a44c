"""Times of a run: seconds of each stage, and what the servers did when.

They come from Snakemake's benchmark files, the servers' logs and the files' own times, so they are
known for a run of long ago too, and they are missing where those files are.
"""

import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from draftstates.paths import Results
from draftstates.records import Plan

# in the order of the data; of other jobs, only those of the run's own capture count
STAGES = ("tokenise", "plan", "server", "extract", "verify", "compact", "manifest", "export")
# with compact storage, one job captures a shard, verifies and rewrites it
_CAPTURING = ("extract", "compact")
_BINS, _LEAST_BINS = 120, 12
# ranges of all servers together
_MOST_RATES = 2400
# longest time that a batch's tokens are spread over, when no other batch follows
_BATCH_SECONDS = 60.0
_PREFILL = re.compile(
    r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[^\]]*\] Prefill batch.*?#new-token: (\d+)"
)
_STAMP = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)", re.MULTILINE)
_QUEUED = re.compile(r"#queue-req: (\d+)")
_RESTART = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) replica (\d+) is started again")
_READ_BYTES, _TAIL_BYTES = 64 << 20, 64 << 10
_QUARTER = 900.0
# jobs with a longer pause between them belong to different runs
_PAUSE_SECONDS = 3600.0


def timeline(results: Results, plan: Plan) -> dict[str, Any]:
    """Return the times of a run.

    Returns:
        `stages`: for each stage `jobs` and `seconds`, summed over its jobs;
        `jobs`: of the server, of extraction and of verification, with `stage`, `name`, `start` and
            `end` in Unix time; for a shard also `tokens` and `bytes`;
        `earlier`: number of shards that were captured in earlier runs, whose jobs are left out;
        `rates`: `server`, `start`, `end`, `per_second` and the longest `queue`, in ranges of
            equal length;
        `writing`: `start`, `end`, `per_second`: bytes of the shards over the time of their
            extraction, in such ranges;
        `disk`: `at`, `bytes`: bytes of the shards that were finished then;
        `events`: `at`, `what`: starts and restarts of servers.
    """
    shards = {shard.shard_id: shard for shard in plan.shards}
    jobs = []
    stages: dict[str, dict[str, float]] = {stage: {"jobs": 0, "seconds": 0.0} for stage in STAGES}
    for stage, name, path in _benchmarks(results, plan.capture_folder):
        if (seconds := _seconds(path)) is None or stage not in stages:
            continue
        stages[stage]["jobs"] += 1
        stages[stage]["seconds"] += seconds
        if stage not in ("server", "verify", *_CAPTURING):
            continue
        end = path.stat().st_mtime
        job = {"stage": stage, "name": name, "start": end - seconds, "end": end}
        if name in shards:
            job |= {"tokens": shards[name].tokens, "bytes": shards[name].bytes}
        elif stage != "server":
            # a shard of an earlier plan
            continue
        jobs.append(job)
    jobs, earlier = _last_run(jobs)
    extractions = sorted(
        (job for job in jobs if job["stage"] in _CAPTURING), key=lambda job: job["end"]
    )
    begin = min((job["start"] for job in jobs), default=0.0)
    return {
        "stages": {name: stage for name, stage in stages.items() if stage["jobs"]},
        "jobs": jobs,
        "earlier": earlier,
        "rates": _rates(results, extractions, begin=begin),
        "writing": _over_time(
            [{**job, "server": "", "queue": None} for job in extractions], of="bytes"
        ),
        "disk": _summed(extractions),
        "events": sorted(_events(results, jobs, begin=begin), key=lambda event: event["at"]),
    }


def _last_run(jobs: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """Return the jobs after the last long pause, by start, and the extractions before it."""
    jobs = sorted(jobs, key=lambda job: job["start"])
    first, last = 0, float("-inf")
    for number, job in enumerate(jobs):
        if job["start"] > last + _PAUSE_SECONDS:
            first = number
        last = max(last, job["end"])
    return jobs[first:], sum(job["stage"] in _CAPTURING for job in jobs[:first])


def _benchmarks(results: Results, capture: str) -> Iterator[tuple[str, str, Path]]:
    """Give stage, name of the job and file of each benchmark, of this capture or of none."""
    root = results.benchmark("x").parent
    for path in sorted(root.rglob("*.tsv")):
        parts = path.relative_to(root).with_suffix("").parts
        of_capture = parts[0] == capture
        if parts[0] in STAGES or of_capture:
            stage, *name = parts[1:] if of_capture else parts
            yield stage, "/".join(name), path


def _seconds(path: Path) -> float | None:
    """Return the seconds of a benchmark file, or None for one that holds none."""
    try:
        names, values = (line.split("\t") for line in path.read_text().splitlines()[:2])
        seconds = float(dict(zip(names, values, strict=True))["s"])
        return seconds if math.isfinite(seconds) and seconds >= 0 else None
    except (OSError, ValueError, KeyError):
        return None


def _summed(extractions: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    found, total = [], 0
    for job in extractions:
        total += job["bytes"]
        found.append({"at": job["end"], "bytes": total})
    return found


def _rates(
    results: Results, extractions: Sequence[dict[str, Any]], *, begin: float
) -> list[dict[str, Any]]:
    """Return tokens per second over time, from the servers' logs or else from the extractions."""
    batches: list[dict[str, Any]] = []
    last = max((job["end"] for job in extractions), default=0.0)
    for log in sorted(results.server_state.rglob("server*.log")):
        shift = _zone_shift(log)
        found = [
            (at + shift, tokens, queue)
            for at, tokens, queue in _prefills(log)
            if begin - 1 <= at + shift <= last + 1
        ]
        # A log of Slurm has none.
        if not found:
            continue
        ends = [at for at, *_ in found[1:]] + [float("inf")]
        batches += [
            {
                "server": log.stem,
                "start": at,
                # a batch ends before the next one is begun
                "end": min(max(end, at + 1), at + _BATCH_SECONDS),
                "tokens": tokens,
                "queue": queue,
            }
            for (at, tokens, queue), end in zip(found, ends, strict=True)
        ]
    if batches and extractions:
        return _over_time(batches)
    return _over_time([{**job, "server": "all servers", "queue": None} for job in extractions])


def _over_time(work: Sequence[dict[str, Any]], *, of: str = "tokens") -> list[dict[str, Any]]:
    """Return the rate of each server over time, as if each piece of its work had had one rate.

    Args:
        work: `server`, `start`, `end`, `queue`, and what is counted.
        of: `tokens` or `bytes`.
    """
    if not work:
        return []
    first, last = min(each["start"] for each in work), max(each["end"] for each in work)
    servers = sorted({each["server"] for each in work})
    width = max(1.0, (last - first) / max(_LEAST_BINS, min(_BINS, _MOST_RATES // len(servers))))
    bins = int((last - first) / width) + 1
    counts: dict[tuple[str, int], float] = defaultdict(float)
    queues: dict[tuple[str, int], int | None] = {}
    for each in work:
        rate = each[of] / max(each["end"] - each["start"], 1e-9)
        begin, end = (int((each[name] - first) / width) for name in ("start", "end"))
        for number in range(begin, min(end, bins - 1) + 1):
            place = (each["server"], number)
            start = first + number * width
            shared = min(start + width, each["end"]) - max(start, each["start"])
            counts[place] += rate * max(0.0, shared)
            if each["queue"] is not None:
                queues[place] = max(queues.get(place) or 0, each["queue"])
    return [
        {
            "server": server,
            "start": first + number * width,
            "end": first + (number + 1) * width,
            "per_second": round(counts[server, number] / width, 1),
            "queue": queues.get((server, number), None if work[0]["queue"] is None else 0),
        }
        for server in servers
        for number in range(bins)
    ]


def _prefills(log: Path) -> Iterator[tuple[float, int, int]]:
    """Give time, tokens and waiting requests of each prefill that an SGLang log tells of.

    Of a long log only the end is read. The times are read as those of this machine's time zone.
    """
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, 2) - _READ_BYTES))
        for raw in file:
            if b"Prefill batch" not in raw:
                continue
            line = raw.decode(errors="replace")
            if found := _PREFILL.match(line):
                queued = _QUEUED.search(line)
                yield _time(found[1]), int(found[2]), int(queued[1]) if queued else 0


def _zone_shift(log: Path) -> float:
    """Return the seconds that a log's times lack, where they are not of this machine's time zone.

    A container may log in UTC. The last line was written when the file was; time zones differ by
    quarters of an hour.
    """
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
        stamps = _STAMP.findall(file.read().decode(errors="replace"))
        written = os.fstat(file.fileno()).st_mtime
    return round((written - _time(stamps[-1])) / _QUARTER) * _QUARTER if stamps else 0.0


def _events(
    results: Results, jobs: Iterable[dict[str, Any]], *, begin: float
) -> Iterator[dict[str, Any]]:
    for job in jobs:
        if job["stage"] == "server":
            yield {"at": job["start"], "what": "start asked for"}
            yield {"at": job["end"], "what": "self-test passed"}
    for log in sorted(results.server_state.rglob("supervisor.log")):
        for line in log.read_text(errors="replace").splitlines():
            if (found := _RESTART.match(line)) and _time(found[1]) >= begin:
                yield {"at": _time(found[1]), "what": f"replica {found[2]} started again"}


def _time(text: str) -> float:
    """Return the Unix time of a local time."""
    return time.mktime(time.strptime(text, "%Y-%m-%d %H:%M:%S"))

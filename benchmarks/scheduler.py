"""A simulation of a run: its duration and its limit.

Shards go through extracting jobs, replicas, the disk and verification. Between two events every
rate is constant: the jobs of a replica share its tokens per second, and all replicas share the
disk's bytes per second. Snakemake's own time per job is serial. Verification takes the cores that
it has. A replica that fails loses its unfinished shards.

`benchmarks/estimate.py` runs the simulation.
"""

import dataclasses
import heapq
import random
from collections import deque
from collections.abc import Sequence
from math import inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """The resources of a run. Rates are per second; times are in seconds.

    Attributes:
        rate: tokens per second of one replica.
        replicas: number of replicas.
        streams: extracting jobs at once, over all replicas.
        row_bytes: bytes of one token.
        write: bytes per second of all disks together.
        cores: cores for verification, of which a job takes four at most.
        verify: bytes per second that one core verifies.
        dispatch: Snakemake's own time per job, one job after the other.
        job: time from a job's start to its first request or byte.
        start: time of a server's start.
        plan: time before the first job.
        recaptures: tokens of prefix recaptures, as a share of the samples' tokens.
        failure: mean time between the failures of a replica.
    """

    rate: float
    replicas: int = 1
    streams: int = 4
    row_bytes: int = 0
    write: float = inf
    cores: int = 4
    verify: float = inf
    dispatch: float = 0.0
    job: float = 0.0
    start: float = 0.0
    plan: float = 0.0
    recaptures: float = 0.0
    failure: float = inf


@dataclasses.dataclass
class Outcome:
    """The result of a simulation.

    Attributes:
        seconds: until the last shard is verified.
        tokens: tokens of verified shards.
        lost: tokens that failures wasted.
        jobs: number of started jobs.
        verified: the verified shards, in the order of their end.
    """

    seconds: float = 0.0
    tokens: int = 0
    lost: float = 0.0
    jobs: int = 0
    verified: list[int] = dataclasses.field(default_factory=list)


class Simulation:
    """One run. `capturing` and `verifying` map a shard to its remaining tokens and bytes."""

    def __init__(self, tokens: Sequence[int], setup: Setup, *, seed: int = 0) -> None:
        self.tokens, self.setup, self.outcome = tokens, setup, Outcome()
        self.now = self.dispatcher = setup.plan
        self.random = random.Random(seed)
        self.to_capture, self.to_verify = deque(range(len(tokens))), deque[int]()
        self.streams, self.slots = setup.streams, max(1, setup.cores // 4)
        self.capturing: dict[int, float] = {}
        self.verifying: dict[int, float] = {}
        self.replica_of: dict[int, int] = {}
        self.up = [False] * setup.replicas
        self.events: list[tuple[float, str, int]] = [
            (self.now + setup.start, "up", r) for r in range(setup.replicas)
        ]

    def run(self) -> Outcome:
        """Step from event to event until every shard is verified, and return the outcome."""
        while len(self.outcome.verified) < len(self.tokens):
            self._dispatch()
            capture, verify = self._rates()
            ends = [self.capturing[s] / rate for s, rate in capture.items()] + [
                left / verify for left in self.verifying.values()
            ]
            step = min([self.events[0][0] - self.now if self.events else inf, *ends])
            if step == inf:
                raise RuntimeError("the run stands still")
            self.now += step
            for shard, rate in capture.items():
                self.capturing[shard] -= rate * step
            for shard in self.verifying:
                self.verifying[shard] -= verify * step if verify < inf else self.verifying[shard]
            self._finish()
            while self.events and self.events[0][0] <= self.now:
                self._happen(*heapq.heappop(self.events)[1:])
        self.outcome.seconds = self.now
        return self.outcome

    def _dispatch(self) -> None:
        """Start as many jobs as possible, extracting jobs first, as the rules say."""
        while self.to_capture and self.streams:
            self.streams -= 1
            self._start("capture", self.to_capture.popleft())
        while self.to_verify and self.slots:
            self.slots -= 1
            self._start("verify", self.to_verify.popleft())

    def _start(self, kind: str, shard: int) -> None:
        self.dispatcher = max(self.dispatcher, self.now) + self.setup.dispatch
        self.outcome.jobs += 1
        heapq.heappush(self.events, (self.dispatcher + self.setup.job, kind, shard))

    def _rates(self) -> tuple[dict[int, float], float]:
        """Return the present rates.

        Returns:
            Tokens per second of each shard that a live replica captures, and bytes per second of
            each shard in verification.
        """
        shared = [0] * self.setup.replicas
        for shard in self.capturing:
            shared[self.replica_of[shard]] += 1
        alive = {
            s: self.setup.rate / shared[self.replica_of[s]]
            for s in self.capturing
            if self.up[self.replica_of[s]]
        }
        wanted = sum(alive.values()) * self.setup.row_bytes
        slow = min(1.0, self.setup.write / wanted) if wanted else 1.0
        return {s: rate * slow for s, rate in alive.items()}, self.setup.verify * min(
            4, self.setup.cores
        )

    def _finish(self) -> None:
        for shard in [s for s, left in self.capturing.items() if left <= 1e-6]:
            del self.capturing[shard]
            self.streams += 1
            self.to_verify.append(shard)
        for shard in [s for s, left in self.verifying.items() if left <= 1e-3]:
            del self.verifying[shard]
            self.slots += 1
            self.outcome.verified.append(shard)
            self.outcome.tokens += self.tokens[shard]

    def _happen(self, kind: str, number: int) -> None:
        """Handle an event: a job's process is ready, or a replica is up or fails."""
        if kind == "verify":
            self.verifying[number] = float(self.tokens[number] * self.setup.row_bytes)
        elif kind == "capture":
            load = [
                sum(r == replica for r in (self.replica_of[s] for s in self.capturing))
                for replica in range(self.setup.replicas)
            ]
            self.replica_of[number] = min(
                range(self.setup.replicas), key=lambda r: (not self.up[r], load[r])
            )
            self.capturing[number] = self.tokens[number] * (1 + self.setup.recaptures)
        elif kind == "up":
            self.up[number] = True
            if self.setup.failure < inf:
                heapq.heappush(
                    self.events,
                    (self.now + self.random.expovariate(1 / self.setup.failure), "down", number),
                )
        else:
            self._fail(number)

    def _fail(self, replica: int) -> None:
        self.up[replica] = False
        heapq.heappush(self.events, (self.now + self.setup.start, "up", replica))
        for shard in [s for s in self.capturing if self.replica_of[s] == replica]:
            self.outcome.lost += self.tokens[shard] * (
                1 + self.setup.recaptures
            ) - self.capturing.pop(shard)
            self.streams += 1
            self.to_capture.appendleft(shard)

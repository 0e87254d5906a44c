"""The server jobs of a run: their submission, watch, replacement and end."""

import dataclasses
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable

from draftstates.errors import UserError
from draftstates.files import open_log, read_json, write_private
from draftstates.server.replica import ServerFailed
from draftstates.server.settings import ServerSettings
from draftstates.server.slurm import commands
from draftstates.server.slurm.folder import RunFolder

# Slurm may show a reason for a moment while the controller reads its files
_HOPELESS_SECONDS = 20.0
# reasons to wait that the end of another job does not remove
_HOPELESS = (
    "PartitionDown",
    "PartitionInactive",
    "PartitionNodeLimit",
    "PartitionTimeLimit",
    "BadConstraints",
    "JobHeldUser",
    "JobHeldAdmin",
    "InvalidAccount",
    "InvalidQOS",
    "AccountNotAllowed",
    "QOSNotAllowed",
    "QOSTimeLimit",
    "AssocTimeLimit",
    "DependencyNeverSatisfied",
)


@dataclasses.dataclass
class Server:
    """One server job, from its submission on.

    Attributes:
        replica: number of the replica, counted from 0.
        generation: identifies the server in the run folder.
        job: Slurm's id of the job.
        submitted: time of the submission, on the monotonic clock.
        state: the job's state in Slurm's queue.
        reason: why the job waits in Slurm's queue.
        hopeless_since: since when the reason is one of `_HOPELESS`, or None.
        url: address of the server; None until the server is ready.
        draining: whether the server gets no more work.
    """

    replica: int
    generation: str
    job: str
    submitted: float
    state: str = "PENDING"
    reason: str = ""
    hopeless_since: float | None = None
    url: str | None = None
    draining: bool = False

    @property
    def accepts(self) -> bool:
        """Whether the server accepts work."""
        return self.url is not None and not self.draining

    def __str__(self) -> str:
        if self.draining:
            return f"job {self.job} is near its time limit"
        if self.url:
            return f"job {self.job} is ready"
        return f"job {self.job} is {self.state}" + (
            f" ({self.reason})" if self.state == "PENDING" else ", its server starts"
        )


class Servers:
    """The present server jobs of a run.

    Args:
        run: the run folder.
        leases_on: returns how many clients a server has, by its generation.

    Attributes:
        start_seconds: how long the slowest start took.
    """

    def __init__(self, run: RunFolder, *, leases_on: Callable[[str], int]) -> None:
        self._run = run
        self._leases_on = leases_on
        self._settings: ServerSettings | None = None
        self._present: list[Server] = []
        self._restarts: Counter[int] = Counter()
        self._next_look = 0.0
        self.start_seconds = 0.0

    @property
    def settings(self) -> ServerSettings | None:
        """Settings of the present servers, or None without a server."""
        return self._settings if self._present else None

    def begin(self, settings: ServerSettings) -> None:
        """Submit a job for each replica.

        Raises:
            ServerFailed: Slurm refuses a job; all others are cancelled.
        """
        self._settings = settings
        self._restarts.clear()
        write_private(self._run.settings, settings.to_json())
        for replica in range(settings.replicas):
            self._submit(replica)

    def look(self) -> None:
        """Check the servers, and replace those that have failed or are near their time limit.

        Raises:
            ServerFailed: a server has failed and no other one is ready; all are cancelled.
        """
        if not self._settings:
            return
        for server in list(self._present):
            place = self._run.server(server.generation)
            if failed := read_json(place.failed):
                self._failed(server, failed["error"], lasting=failed.get("lasting", False))
            elif server.url is None and (found := read_json(place.address)):
                server.url = found["url"]
                self.start_seconds = max(self.start_seconds, found["start_seconds"])
                _say(str(server))
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + self._settings.slurm.poll_seconds
            self._look_at_queue()
        for server in [
            server
            for server in self._present
            if server.draining and not self._leases_on(server.generation)
        ]:
            self._end([server])

    def choose(self) -> Server | None:
        """Return the least busy server that accepts work, or None."""
        accepting = [server for server in self._present if server.accepts]
        return min(accepting, key=lambda server: self._leases_on(server.generation), default=None)

    def end(self) -> None:
        """Cancel all server jobs."""
        self._end(list(self._present))

    def status(self) -> str:
        """Return the state of all servers as one line."""
        return "; ".join(map(str, self._present))

    def _submit(self, replica: int) -> None:
        assert self._settings
        generation = secrets.token_hex(8)
        self._run.server(generation).folder.mkdir(mode=0o700)
        log = self._settings.log_of(replica).with_suffix(".slurm.log")
        # makes the file readable by its user alone before Slurm writes to it
        os.close(open_log(log))
        command = [
            sys.executable,
            "-m",
            "draftstates.server.slurm.job",
            str(self._run.folder),
            generation,
            str(replica),
        ]
        try:
            job = commands.submit(
                self._settings.slurm.sbatch, name=self._job_name, log=log, command=command
            )
        except UserError as error:
            if not any(server.url for server in self._present):
                self.end()
                raise ServerFailed(str(error)) from error
            _say(f"replica {replica} is given up: {error}")
            return
        self._present.append(Server(replica, generation, job, submitted=time.monotonic()))
        self._next_look = min(self._next_look, time.monotonic() + 1.0)
        _say(f"replica {replica} is job {job}, log {log}")

    @property
    def _job_name(self) -> str:
        return f"draftstates-{self._run.folder.name}"

    def _look_at_queue(self) -> None:
        entries = commands.queue(self._job_name)
        if entries is None:
            return
        for server in list(self._present):
            entry = entries.get(server.job)
            if entry is None:
                self._gone(server)
            else:
                self._judge(server, entry)

    def _gone(self, server: Server) -> None:
        if failed := read_json(self._run.server(server.generation).failed):
            self._failed(server, failed["error"], lasting=failed.get("lasting", False))
        elif server.draining:
            self._present.remove(server)
        else:
            self._failed(
                server,
                f"server job {server.job} has left Slurm's queue: cancelled, out of time, or its"
                " node failed",
            )

    def _judge(self, server: Server, entry: commands.QueueEntry) -> None:
        assert self._settings
        server.state, server.reason = entry.state, entry.reason
        slurm, now = self._settings.slurm, time.monotonic()
        hopeless = entry.state == "PENDING" and entry.reason in _HOPELESS
        server.hopeless_since = (server.hopeless_since or now) if hopeless else None
        if server.hopeless_since and now - server.hopeless_since >= _HOPELESS_SECONDS:
            self._failed(
                server, f"server job {server.job} cannot start: {entry.reason}", lasting=True
            )
        elif entry.state == "PENDING" and now - server.submitted > slurm.queue_seconds:
            self._failed(
                server,
                f"server job {server.job} did not start within {slurm.queue_seconds:g} s:"
                f" {entry.reason}",
            )
        elif (
            entry.seconds_left is not None
            and entry.seconds_left <= slurm.drain_seconds
            and not server.draining
        ):
            if server.url is None:
                what = (
                    f"server job {server.job} has {entry.seconds_left:g} s left before its time"
                    " limit and is not ready"
                )
                self._failed(
                    server,
                    f"{what}; it takes no work in the last {slurm.drain_seconds:g} s: raise --time"
                    " in server.slurm.sbatch",
                )
            else:
                server.draining = True
                _say(str(server))
                self._submit(server.replica)

    def _failed(self, server: Server, error: str, *, lasting: bool = False) -> None:
        assert self._settings
        _say(f"replica {server.replica} has failed: {error}")
        # the clients of the server read this file
        write_private(self._run.server(server.generation).failed, {"error": error})
        self._end([server])
        if not any(other.url for other in self._present):
            self.end()
            raise ServerFailed(error, lasting=lasting)
        self._restarts[server.replica] += 1
        if not lasting and self._restarts[server.replica] <= self._settings.restarts:
            self._submit(server.replica)

    def _end(self, servers: list[Server]) -> None:
        for server in servers:
            self._run.server(server.generation).stop.touch()
            self._present.remove(server)
        if not commands.cancel(server.job for server in servers):
            _say(
                f"jobs {[server.job for server in servers]} could not be cancelled; they end when"
                " this run does"
            )


def _say(text: str) -> None:
    print(f"{time.strftime('%F %T')} {text}", flush=True)

"""A server job, from its submission until it has left Slurm's queue."""

import os
import re
import sys
import time

from draftstates.files import open_log, read_json, write_private
from draftstates.server.address import Address
from draftstates.server.folder import RunFolder, ServerFolder, say
from draftstates.server.lasting import Failure
from draftstates.server.settings import ServerSettings
from draftstates.server.slurm import commands

# Slurm may show a reason for a moment while the controller reads its files
_HOPELESS_SECONDS = 20.0
# reasons to wait that the end of another job does not remove
_HOPELESS = re.compile(
    "PartitionDown|PartitionInactive|PartitionNodeLimit|PartitionTimeLimit|BadConstraints"
    "|JobHeldUser|JobHeldAdmin|InvalidAccount|InvalidQOS|AccountNotAllowed|QOSNotAllowed"
    "|QOSTimeLimit|AssocTimeLimit|DependencyNeverSatisfied"
)


class Queue:
    """Slurm's queue, as far as the jobs of a run are in it.

    Args:
        run: the run folder.
    """

    def __init__(self, run: RunFolder) -> None:
        self.job_name = f"draftstates-{run.folder.name}"
        self._entries: dict[str, commands.QueueEntry] = {}
        self._next_look = 0.0
        # when the entries are of, on the monotonic clock
        self.seen = float("-inf")

    def look(self, *, every: float) -> None:
        """Ask Slurm, if the last look was `every` seconds ago."""
        now = time.monotonic()
        if now < self._next_look:
            return
        entries = commands.queue(self.job_name)
        # a controller that does not answer may have taken longer than `every`
        self._next_look = time.monotonic() + every
        if entries is not None:
            self._entries, self.seen = entries, now

    def look_soon(self) -> None:
        """Have the next look a second from now: a refused job is known by then."""
        self._next_look = min(self._next_look, time.monotonic() + 1.0)

    def entry(self, job: str) -> commands.QueueEntry | None:
        """Return a job's entry at the last look."""
        return self._entries.get(job)


class SlurmServer:
    """One server job, which tests its server by itself, on its own node.

    Args:
        run: the run folder.
        settings: settings of the server.
        queue: the queue of the run's jobs.
        number: number of the replica, counted from 0.
        place: folder of this server.

    Attributes:
        start_seconds: how long the start took; None until the server is ready.
        draining: whether the job is near its time limit, so that the server gets no more clients.

    Raises:
        UserError: Slurm refuses the job.
    """

    def __init__(
        self,
        run: RunFolder,
        settings: ServerSettings,
        queue: Queue,
        *,
        api_key: str,
        number: int,
        place: ServerFolder,
    ) -> None:
        self.number = number
        self.place = place
        self.start_seconds: float | None = None
        self.draining = False
        self._settings = settings
        self._queue = queue
        self._submitted = time.monotonic()
        self._hopeless_since: float | None = None
        self._cancelled: float | None = None
        self.address = Address(url="", api_key=api_key, launcher=settings.launcher)
        write_private(place.settings, settings.to_json())
        log = settings.log_of(number).with_suffix(".slurm.log")
        # makes the file readable by its user alone before Slurm writes to it
        os.close(open_log(log))
        self._job = commands.submit(
            settings.slurm.sbatch,
            name=queue.job_name,
            log=log,
            command=_job_command(run, place, number),
        )
        queue.look_soon()
        say(f"replica {number} is job {self._job}, log {log}")

    def __str__(self) -> str:
        if self.draining:
            return f"job {self._job} is near its time limit"
        if self.ready:
            return f"job {self._job} is ready"
        entry = self._queue.entry(self._job)
        state, reason = (entry.state, entry.reason) if entry else ("PENDING", "")
        rest = f" ({reason})" if state == "PENDING" else ", its server starts"
        return f"job {self._job} is {state}{rest}"

    @property
    def ready(self) -> bool:
        """Whether the server has passed its self-test."""
        return self.start_seconds is not None

    def failure(self) -> Failure | None:
        """Check the job once.

        Returns:
            The error that the job left, or why it cannot start or has gone; None if it is well.
        """
        self._queue.look(every=self._settings.slurm.poll_seconds)
        if failed := read_json(self.place.failed):
            return Failure(failed["error"], failed["lasting"])
        if not self.ready and (found := read_json(self.place.address)):
            self.start_seconds = found["start_seconds"]
            self.address = Address(
                url=found["url"], api_key=self.address.api_key, launcher=self._settings.launcher
            )
        if self._queue.seen <= self._submitted:
            return None
        entry = self._queue.entry(self._job)
        if entry is not None:
            return self._judge(entry)
        if self.draining:
            return None
        return Failure(
            f"server job {self._job} has left Slurm's queue: cancelled, out of time, or its node"
            " failed"
        )

    def end(self) -> None:
        """Cancel the job."""
        self._cancelled = time.monotonic()
        if not commands.cancel([self._job]):
            say(f"job {self._job} could not be cancelled; it ends by itself")
        self._queue.look_soon()

    def is_gone(self) -> bool:
        """Return whether the job has left the queue since it was cancelled."""
        self._queue.look(every=self._settings.slurm.poll_seconds)
        assert self._cancelled is not None
        return self._queue.seen > self._cancelled and self._queue.entry(self._job) is None

    def _judge(self, entry: commands.QueueEntry) -> Failure | None:
        slurm, now = self._settings.slurm, time.monotonic()
        hopeless = entry.state == "PENDING" and bool(_HOPELESS.fullmatch(entry.reason))
        self._hopeless_since = (self._hopeless_since or now) if hopeless else None
        if self._hopeless_since and now - self._hopeless_since >= _HOPELESS_SECONDS:
            return Failure(f"server job {self._job} cannot start: {entry.reason}", lasting=True)
        if entry.state == "PENDING" and now - self._submitted > slurm.queue_seconds:
            return Failure(
                f"server job {self._job} did not start within {slurm.queue_seconds:g} s:"
                f" {entry.reason}"
            )
        if entry.seconds_left is None or entry.seconds_left > slurm.drain_seconds:
            return None
        self.draining = self.ready
        if self.draining:
            return None
        return Failure(
            f"server job {self._job} has {entry.seconds_left:g} s left before its time limit and is"
            f" not ready; it takes no work in the last {slurm.drain_seconds:g} s: raise --time in"
            " server.slurm.sbatch"
        )


def _job_command(run: RunFolder, place: ServerFolder, number: int) -> list[str]:
    module = "draftstates.server.slurm.job"
    return [sys.executable, "-m", module, str(run.folder), place.generation, str(number)]

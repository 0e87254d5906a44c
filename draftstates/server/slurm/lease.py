"""A client's lease on a server job."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

from draftstates.errors import UserError
from draftstates.files import read_json
from draftstates.server.address import Address, health
from draftstates.server.processes import Process
from draftstates.server.processes import owner as configured_owner
from draftstates.server.settings import ServerSettings
from draftstates.server.slurm.folder import Pulse, RunFolder
from draftstates.server.slurm.leases import Request
from draftstates.server.slurm.run import present_run, start_run

_POLL_SECONDS = 0.5
_STATUS_SECONDS = 60.0
_HEALTH_SECONDS = 60.0
# a client may notice the death of a server before the error is written
_FAILURE_SECONDS = 3.0


@contextlib.contextmanager
def slurm_lease(settings: ServerSettings, *, owner: Process | None) -> Iterator[Address]:
    """Hold a lease on a server job, like `draftstates.server.lease.lease`.

    The process gets TERM when the run is gone.

    Args:
        settings: settings of the server.
        owner: the process whose end ends the servers, if this call starts the run.
    """
    run = present_run() or start_run(settings.state, owner=owner or configured_owner())
    client = f"{socket.gethostname()} process {os.getpid()}, job {os.environ.get('SLURM_JOB_ID')}"
    request = Request(run.leases, settings, client=client)
    with _beating(request, run, limit=settings.slurm.heartbeat_seconds):
        try:
            answer = _wait(request, run)
            address = Address(
                url=answer["url"], api_key=answer["api_key"], launcher=settings.launcher
            )
            try:
                _see_reachable(address)
                yield address
            except Exception as error:
                if failure := _failure(run, answer["generation"]):
                    raise UserError(f"{error}\n{failure}") from error
                raise
        finally:
            request.give_back()


@contextlib.contextmanager
def _beating(request: Request, run: RunFolder, *, limit: float) -> Iterator[None]:
    """Keep the lease alive, and end this process when its run is gone."""
    done, pulse = threading.Event(), Pulse(run.heartbeat)

    def watch() -> None:
        while not done.wait(min(5.0, limit / 8)):
            with contextlib.suppress(OSError):
                request.beat()
            if pulse.silence() > limit:
                print("the run that this process works for is gone", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGTERM)
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _wait(request: Request, run: RunFolder) -> dict[str, str]:
    """Wait for the supervisor's grant and return it.

    Raises:
        UserError: the supervisor has refused the lease.
    """
    next_line = time.monotonic() + _STATUS_SECONDS / 6
    while True:
        if answer := request.answer():
            if "error" in answer:
                raise UserError(answer["error"])
            return answer
        if time.monotonic() > next_line:
            next_line = time.monotonic() + _STATUS_SECONDS
            with contextlib.suppress(OSError):
                print(
                    f"waiting for a server: {run.status.read_text()}", file=sys.stderr, flush=True
                )
        time.sleep(_POLL_SECONDS)


def _see_reachable(address: Address) -> None:
    if problem := health(address.url, seconds=_HEALTH_SECONDS):
        raise UserError(
            f"the server at {address.url} does not answer on {socket.gethostname()}: {problem}; if"
            " it is well, set server.slurm.interface to a network that all nodes share"
        )


def _failure(run: RunFolder, generation: str) -> str | None:
    """Return how the server of this lease failed, or None if it has not failed."""
    deadline = time.monotonic() + _FAILURE_SECONDS
    while time.monotonic() < deadline:
        if failed := read_json(run.server(generation).failed):
            return failed["error"]
        time.sleep(_POLL_SECONDS)
    return None

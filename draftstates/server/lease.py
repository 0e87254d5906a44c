"""Leases on the servers of a run, as clients see them.

The jobs of a run share its servers. A client writes a request into the run folder, and the run's
supervisor answers it (`supervisor.py`). `docs/server.md` shows who starts, watches and ends whom.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

from draftstates.containers import present_image
from draftstates.errors import UserError
from draftstates.files import read_json
from draftstates.server.address import Address, health
from draftstates.server.folder import Pulse, RunFolder
from draftstates.server.leases import Request
from draftstates.server.processes import Process
from draftstates.server.run import RUN_FOLDER_VARIABLE, present_run, start_run
from draftstates.server.settings import ServerSettings

_POLL_SECONDS = 0.1
_STATUS_SECONDS = 60.0
# a busy server answers late
_HEALTH_SECONDS = 60.0
# a server that is kept up may have no good health for so long
_SILENT_SECONDS = 120.0
# a client may notice the death of a server before its supervisor does
_FAILURE_SECONDS = 3.0


@contextlib.contextmanager
def lease(settings: ServerSettings, *, kept: bool = False) -> Iterator[Address]:
    """Hold a lease on the server that `settings` describe, which is started if necessary.

    Of several replicas, the lease is on the least busy one. The call blocks until the server is
    ready. This process gets TERM when its run is gone. A process that belongs to no run begins one
    of its own.

    Args:
        settings: settings of the server (`server_settings`, `generate_settings`).
        kept: whether a person holds the lease; meanwhile leases of another kind are refused.

    Raises:
        UserError: the server cannot start, fails its self-test, does not answer, or is in use with
            other settings; or the body raised an exception and the server has died: the message
            then contains the last lines of the server's log.
    """
    run = present_run() or _begin_run(settings)
    request = Request(run.leases, settings, kept=kept)
    try:
        with _watching(request, run, limit=settings.slurm.heartbeat_seconds):
            answer = _wait(request, run)
            address = Address(
                url=answer["url"],
                api_key=answer["api_key"],
                launcher=settings.launcher,
                server=answer["server"],
                failed=run.server(answer["generation"]).failed,
            )
            try:
                if settings.launcher == "slurm":
                    _see_reachable(address)
                yield address
            except Exception as error:
                if failure := _failure(run, answer["generation"]):
                    raise UserError(f"{error}\n{failure}") from error
                raise
    finally:
        request.give_back()


def _begin_run(settings: ServerSettings) -> RunFolder:
    if image := present_image():
        raise UserError(
            f"this process in {image} belongs to no run, and a container starts no server: run the"
            " step through Snakemake"
        )
    return start_run(settings.state)


def hold(settings: ServerSettings) -> None:
    """Hold a lease and print the address of the server, until KeyboardInterrupt.

    Raises:
        UserError: the server does not start, or ends by itself.
    """
    with lease(settings, kept=True) as address:
        print(
            f"ready at {address.url}; its log is {settings.log}; Ctrl-C ends it; to run on it:"
            f" {RUN_FOLDER_VARIABLE}={os.environ[RUN_FOLDER_VARIABLE]} snakemake",
            flush=True,
        )
        try:
            problem = _until_silent(address)
        except KeyboardInterrupt:
            return
        raise UserError(f"the server does not answer any more: {problem}")


def _until_silent(address: Address) -> str:
    """Return what is wrong with a server that has not been healthy for some time.

    On a machine with too much work, a server's own look at its health can fail.
    """
    healthy = time.monotonic()
    while True:
        problem = health(address.url, seconds=_HEALTH_SECONDS)
        if not problem:
            healthy = time.monotonic()
        elif time.monotonic() - healthy > _SILENT_SECONDS or (
            address.failed and address.failed.exists()
        ):
            return problem
        time.sleep(1.0)


@contextlib.contextmanager
def _watching(request: Request, run: RunFolder, *, limit: float) -> Iterator[None]:
    """Keep the lease alive, and end this process when its run is gone: nobody needs its work."""
    owner, _ = run.read_owner()
    done, pulse = threading.Event(), Pulse(owner, run.heartbeat)

    def watch() -> None:
        while not done.wait(1.0 if owner.is_here else min(5.0, limit / 8)):
            with contextlib.suppress(OSError):
                request.beat()
            if pulse.has_stopped(limit):
                print("the run that this process works for is gone", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGTERM)
                return

    thread = threading.Thread(target=watch, daemon=True)
    if owner != Process.current():
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.is_alive():
            thread.join()


def _wait(request: Request, run: RunFolder) -> dict[str, str]:
    """Wait for the supervisor's grant and return it.

    Raises:
        UserError: the supervisor has refused the lease, or the run is over.
    """
    next_line = time.monotonic() + _STATUS_SECONDS / 6
    while True:
        try:
            answer = request.answer()
        except FileNotFoundError:
            raise UserError(f"the run is over, and its folder {run.folder} is gone") from None
        # a file server may be unavailable for a moment
        except OSError:
            answer = None
        if answer:
            if "error" in answer:
                raise UserError(answer["error"])
            return answer
        if time.monotonic() > next_line:
            next_line = time.monotonic() + _STATUS_SECONDS
            with contextlib.suppress(OSError):
                status = read_json(run.status) or {"servers": "its supervisor starts"}
                print(f"waiting for a server: {status['servers']}", file=sys.stderr, flush=True)
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

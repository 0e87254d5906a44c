"""Leases on the servers of a run.

The jobs of a run share its servers. The first job that needs a server has it started; the server
ends when it is idle or when the run is gone. A server that cannot start is started once in a run:
all other jobs get the same error (see `lasting`). On one machine a lease is an `flock`, so that the
kernel releases it however a client ends. `State` describes the locks.
"""

import contextlib
import fcntl
import os
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from draftstates.containers import present_image
from draftstates.errors import UserError
from draftstates.files import is_held, locked, read_json, write_private
from draftstates.server.acceptance import external_address
from draftstates.server.address import Address
from draftstates.server.lasting import Failed
from draftstates.server.processes import OWNER_VARIABLE, Process
from draftstates.server.processes import owner as configured_owner
from draftstates.server.settings import ServerSettings
from draftstates.server.slurm.lease import slurm_lease
from draftstates.server.starter import have_supervisor_started, start_supervisor
from draftstates.server.state import State

_POLL_SECONDS = 0.1
_OWNER_POLL_SECONDS = 1.0
# how often a supervisor that stops while clients wait is replaced
_STARTS = 3
# a client may notice the death of a server before its supervisor does
_FAILURE_SECONDS = 1.5


@contextlib.contextmanager
def lease(settings: ServerSettings, *, owner: Process | None = None) -> Iterator[Address]:
    """Hold a lease on the server that `settings` describe, and start the server if necessary.

    Of several replicas, the lease is on the least busy one. The call blocks until the server has
    passed its self-test. This process gets TERM when the owner is gone.

    Args:
        settings: settings of the server.
        owner: the process whose end ends the server; by default the process that DRAFTSTATES_OWNER
            names, or else this process.

    Raises:
        UserError: the server cannot start, fails its self-test, does not answer (external), or is
            in use with other settings; or the body raised an exception and the server has died: the
            message then contains the last lines of the server's log.
    """
    if settings.launcher == "slurm":
        with slurm_lease(settings, owner=owner) as address:
            yield address
        return
    owner = owner or configured_owner()
    if not owner.is_alive():
        raise UserError(
            f"the process {owner} that {OWNER_VARIABLE} names is gone, so a server for it would end"
            " at once"
        )
    state = State(settings.state.absolute())
    state.make_folders()
    with _ending_with(owner):
        if settings.launcher == "external":
            with locked(state.start_lock, fcntl.LOCK_EX):
                address = external_address(settings, state, owner=owner)
            yield address
            return
        with locked(state.lease_lock, fcntl.LOCK_SH):
            address, use = _obtain(settings, state, owner)
            try:
                yield address
            except Exception as error:
                if failure := _failure(state, _generation(use)):
                    raise UserError(f"{error}\n{failure}") from error
                raise
            finally:
                use.unlink(missing_ok=True)


@contextlib.contextmanager
def _ending_with(owner: Process) -> Iterator[None]:
    """End this process when its owner is gone: nobody needs the work of a job without its run."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_OWNER_POLL_SECONDS):
            if not owner.is_alive():
                os.kill(os.getpid(), signal.SIGTERM)
                return

    if owner.pid != os.getpid():
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _obtain(settings: ServerSettings, state: State, owner: Process) -> tuple[Address, Path]:
    """Wait for a running server; return its address and the file that marks it as used."""
    for _ in range(_STARTS):
        with locked(state.start_lock, fcntl.LOCK_EX):
            _join_or_start(settings, state, owner)
        if _wait_for_address(state):
            with locked(state.start_lock, fcntl.LOCK_EX):
                if found := _choose(state):
                    return found
    raise UserError(
        f"the server was stopped {_STARTS} times while it was waited for; see {state.log}"
    )


def _choose(state: State) -> tuple[Address, Path] | None:
    """Return the least busy replica, or None without one. The caller holds the start lock."""
    found = read_json(state.address)
    if found is None:
        return None
    busy: Counter[str] = Counter()
    for path in state.uses.iterdir():
        if Process.parse(path.name.split(".")[1]).is_alive():
            busy[_generation(path)] += 1
        else:
            path.unlink()
    server = min(found["servers"], key=lambda server: busy[server["generation"]])
    use = state.uses / f"{server['generation']}.{Process.current()}.{uuid.uuid4().hex}"
    use.touch()
    return Address(url=server["url"], api_key=found["api_key"], launcher=found["launcher"]), use


def _generation(use: Path) -> str:
    return use.name.split(".")[0]


def _join_or_start(settings: ServerSettings, state: State, owner: Process) -> None:
    if failed := Failed.read(state.failed):
        failed.refuse(fingerprint=settings.fingerprint, owner=str(owner))
    if _supervised(state):
        same = (
            ServerSettings.from_json(state.settings.read_text()).fingerprint == settings.fingerprint
        )
        if same and not state.failed.exists():
            (state.owners / str(owner)).touch()
            return
        if not same:
            _stop_other(state)
        while _supervised(state):
            time.sleep(_POLL_SECONDS)
    for path in state.owners.iterdir():
        if not Process.parse(path.name).is_alive():
            path.unlink()
    (state.owners / str(owner)).touch()
    _start_supervisor(settings, state)


def _supervised(state: State) -> bool:
    return is_held(state.alive_lock, fcntl.LOCK_SH)


def _stop_other(state: State) -> None:
    """Stop a server with other settings that an earlier run left behind.

    Raises:
        UserError: the run of that server is still alive.
    """
    living = [path.name for path in state.owners.iterdir() if Process.parse(path.name).is_alive()]
    if living:
        raise UserError(
            f"{state.folder}: a server with other settings runs there for process"
            f" {living[0].split(':')[0]}; wait until that ends, or give this one another state"
            " folder"
        )
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(state.pid.read_text()), signal.SIGTERM)


def _start_supervisor(settings: ServerSettings, state: State) -> None:
    for path in (state.address, state.failed, *state.failures.iterdir()):
        path.unlink(missing_ok=True)
    write_private(state.settings, settings.to_json())
    if present_image():
        have_supervisor_started(state)
    else:
        start_supervisor(state)


def _wait_for_address(state: State) -> bool:
    """Wait for a server of the supervisor just joined; return False if they were stopped.

    Raises:
        UserError: all of these servers have failed.
    """
    while True:
        # checked first: once the supervisor has ended, its files are complete
        gone = not _supervised(state)
        if failed := Failed.read(state.failed):
            raise UserError(failed.error)
        if gone:
            return False
        if state.address.exists():
            return True
        time.sleep(_POLL_SECONDS)


def _failure(state: State, generation: str) -> str | None:
    """Return how the server of this lease failed, or None if it has not failed."""
    deadline = time.monotonic() + _FAILURE_SECONDS
    while time.monotonic() < deadline:
        if failed := read_json(state.failures / generation):
            return failed["error"]
        time.sleep(_POLL_SECONDS)
    announced = read_json(state.address)
    if (
        announced
        and any(server["generation"] == generation for server in announced["servers"])
        and _supervised(state)
    ):
        return None
    return f"the server was stopped while it was in use; see {state.log}"

"""A run of servers: its folder, and the supervisor that is started whenever a lease waits."""

import atexit
import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from draftstates.errors import UserError
from draftstates.files import open_log, read_json, tail
from draftstates.server.folder import RUN_FOLDER_VARIABLE, RunFolder, is_there, overwrite
from draftstates.server.keeper import end_without_supervisor
from draftstates.server.leases import waiting_stems
from draftstates.server.processes import Process

_POLL_SECONDS = 0.2
# how often in a row a supervisor that fails or is killed soon is replaced
_STARTS = 3
_QUICK_SECONDS = 60.0


def start_run(state: Path, *, owner: Process | None = None) -> RunFolder:
    """Make a run folder, and start supervisors for it as long as this process lives.

    All later child processes of this process find the folder by DRAFTSTATES_RUN_FOLDER.

    Args:
        state: folder in which the run folder is made.
        owner: a process of this machine with which the run ends; by default this process.
    """
    state = state.resolve()
    for folder in state.glob("run-*"):
        if is_over(RunFolder(folder)):
            _remove(RunFolder(folder))
    run = RunFolder(state / f"run-{secrets.token_hex(4)}")
    run.make(owner or Process.current())
    os.environ[RUN_FOLDER_VARIABLE] = str(run.folder)
    log = state / "supervisor.log"
    atexit.register(_remove, run)
    threading.Thread(target=_supervise, args=(run, log), name="supervise", daemon=True).start()
    return run


def present_run() -> RunFolder | None:
    """Return the run that this process belongs to, or None without a run.

    Raises:
        UserError: the run is over.
    """
    folder = os.environ.get(RUN_FOLDER_VARIABLE)
    if not folder:
        return None
    run = RunFolder(Path(folder))
    if is_over(run):
        raise UserError(
            f"the run that {RUN_FOLDER_VARIABLE} names is over or has lost its folder"
            f" ({folder}), so no server would work for it"
        )
    return run


def is_over(run: RunFolder) -> bool:
    """Return whether the owner of a run has ended, as far as this machine can tell."""
    try:
        owner, _ = run.read_owner()
    except FileNotFoundError:
        return True
    return owner.is_here and not owner.is_alive()


def _remove(run: RunFolder) -> None:
    """Remove the folder of a run that ends, unless a supervisor still ends servers and does it."""
    supervisor = read_json(run.supervisor)
    if not (supervisor and Process(**supervisor).is_alive()):
        shutil.rmtree(run.folder, ignore_errors=True)
        # A run without servers leaves nothing; logs and locks of servers stay.
        with contextlib.suppress(OSError):
            run.folder.parent.rmdir()


def _supervise(run: RunFolder, log: Path) -> None:
    """Start a supervisor whenever a lease waits and none runs.

    A supervisor that was killed is replaced for the leases that wait. Its servers have ended.
    """
    failures, problem = 0, None
    while is_there(run.folder, unknown=True):
        time.sleep(_POLL_SECONDS)
        # a file server may be unavailable for a moment
        with contextlib.suppress(OSError):
            waiting = waiting_stems(run.leases)
            if waiting and failures < _STARTS:
                began = time.monotonic()
                problem = _run_supervisor(run, log)
                failures = failures + 1 if time.monotonic() - began < _QUICK_SECONDS else 1
                failures = failures if problem else 0
            elif waiting:
                error = f"the server's supervisor ended {_STARTS} times: {problem}"
                for stem in waiting:
                    with contextlib.suppress(OSError):
                        overwrite(stem.with_suffix(".grant"), {"error": error})
                failures = 0


def _run_supervisor(run: RunFolder, log: Path) -> str | None:
    """Run a supervisor to its end, and return how it failed, or None."""
    command = [sys.executable, "-m", "draftstates.server.supervisor", str(run.folder)]
    try:
        output = open_log(log)
        options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        try:
            supervisor = subprocess.Popen(command, start_new_session=True, **options)
            status = supervisor.wait()
        finally:
            os.close(output)
    except OSError as error:
        return f"it cannot be started: {error}"
    if not status:
        return None
    end_without_supervisor(run.folder, supervisor.pid)
    return f"the last lines of {log}:\n{tail(log)}"

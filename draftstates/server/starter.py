"""Starts supervisors on the host for clients in containers: `python -m draftstates.server.starter STATE OWNER`.

A client in a container cannot start a server: what outlives the container loses the image under its feet, and there is no Apptainer in
it. So a run whose steps are in containers has one process of this kind on the host, as long as its owner lives.
"""

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

from draftstates.errors import UserError
from draftstates.server.files import is_held, locked, open_log, tail, write_private
from draftstates.server.processes import Process, exit_on_term
from draftstates.server.state import State

_POLL_SECONDS = 0.1


def start_supervisor(state: State) -> None:
    """Start a supervisor of this machine for the settings in `state`, and wait until it holds the alive lock.

    Raises:
        UserError: it did not come so far, with the last lines of its log.
    """
    ready, to_supervisor = os.pipe()
    output = open_log(state.log)
    start = os.fstat(output).st_size
    process = subprocess.Popen(
        [sys.executable, "-m", "draftstates.server.supervisor", str(state.folder), str(to_supervisor)],
        start_new_session=True,
        pass_fds=(to_supervisor,),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
    )
    os.close(output)
    os.close(to_supervisor)
    write_private(state.pid, str(process.pid))
    answered = os.read(ready, 1)  # from here on it holds the alive lock
    os.close(ready)
    if not answered:
        raise UserError(f"the server's supervisor did not start; the last lines of {state.log}:\n{tail(state.log, start=start)}")


def have_supervisor_started(state: State) -> None:
    """As `start_supervisor`, by a starter on the host. The caller holds the start lock.

    Raises:
        UserError: there is no starter, or the supervisor did not start.
    """
    state.taken.unlink(missing_ok=True)  # of a starter that was killed
    write_private(state.wanted, "")
    while state.wanted.exists() or state.taken.exists():
        if not is_held(state.starter_lock, fcntl.LOCK_EX):
            state.wanted.unlink(missing_ok=True)
            raise UserError(f"{state.folder}: no process on the host starts servers for this container; run the step through Snakemake")
        time.sleep(_POLL_SECONDS)
    if not is_held(state.alive_lock, fcntl.LOCK_SH):
        raise UserError(f"the server's supervisor did not start; the last lines of {state.log}:\n{tail(state.log)}")


def launch_starter(state: State, *, owner: Process) -> None:
    """Start a starter that ends with `owner`."""
    state.make_folders()
    output = open_log(state.log)
    try:
        with locked(state.starter_lock, fcntl.LOCK_SH) as lock:
            subprocess.Popen(
                [sys.executable, "-m", "draftstates.server.starter", str(state.folder), str(owner)],
                start_new_session=True,
                pass_fds=(lock,),  # so it is held from now on, until that process ends
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
    finally:
        os.close(output)


def main() -> None:
    state, owner = State(Path(sys.argv[1])), Process.parse(sys.argv[2])
    exit_on_term()
    while owner.is_alive():
        _look(state)
        time.sleep(_POLL_SECONDS)


def _look(state: State) -> None:
    try:
        state.wanted.rename(state.taken)  # of several starters one succeeds
    except FileNotFoundError:
        return
    try:
        start_supervisor(state)
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
    finally:
        state.taken.unlink(missing_ok=True)


if __name__ == "__main__":
    main()

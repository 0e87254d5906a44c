"""The starter, a process that starts supervisors on the host for clients in containers.

Command: `python -m draftstates.server.starter STATE OWNER`.

A client in a container cannot start a server: a process that outlives the container loses the
image, and the image contains no Apptainer. So a run whose steps are in containers has one starter
on the host, as long as the run's owner lives.
"""

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

from draftstates.errors import UserError
from draftstates.files import is_held, locked, open_log, tail, write_private
from draftstates.server.processes import Process, exit_on_term
from draftstates.server.state import State

_POLL_SECONDS = 0.1


def start_supervisor(state: State) -> None:
    """Start a supervisor on this machine, and wait until it holds the alive lock.

    The supervisor reads its settings from `state`.

    Raises:
        UserError: the supervisor did not start; the message has the last lines of its log.
    """
    ready, to_supervisor = os.pipe()
    output = open_log(state.log)
    start = os.fstat(output).st_size
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "draftstates.server.supervisor",
            str(state.folder),
            str(to_supervisor),
        ],
        start_new_session=True,
        pass_fds=(to_supervisor,),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
    )
    os.close(output)
    os.close(to_supervisor)
    write_private(state.pid, str(process.pid))
    # the supervisor writes one byte when it holds the alive lock
    answered = os.read(ready, 1)
    os.close(ready)
    if not answered:
        raise UserError(
            "the server's supervisor did not start; the last lines of"
            f" {state.log}:\n{tail(state.log, start=start)}"
        )


def have_supervisor_started(state: State) -> None:
    """Have a starter on the host start a supervisor. The caller holds the start lock.

    Raises:
        UserError: no starter runs on the host, or the supervisor did not start.
    """
    # a starter that was killed may have left this file behind
    state.taken.unlink(missing_ok=True)
    write_private(state.wanted, "")
    while state.wanted.exists() or state.taken.exists():
        if not is_held(state.starter_lock, fcntl.LOCK_EX):
            state.wanted.unlink(missing_ok=True)
            raise UserError(
                f"{state.folder}: no process on the host starts servers for this container; run the"
                " step through Snakemake"
            )
        time.sleep(_POLL_SECONDS)
    if not is_held(state.alive_lock, fcntl.LOCK_SH):
        raise UserError(
            "the server's supervisor did not start; the last lines of"
            f" {state.log}:\n{tail(state.log)}"
        )


def launch_starter(state: State, *, owner: Process) -> None:
    """Launch a starter that ends with `owner`."""
    state.make_folders()
    output = open_log(state.log)
    try:
        with locked(state.starter_lock, fcntl.LOCK_SH) as lock:
            subprocess.Popen(
                [sys.executable, "-m", "draftstates.server.starter", str(state.folder), str(owner)],
                start_new_session=True,
                # the starter inherits the lock and holds it until it ends
                pass_fds=(lock,),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
    finally:
        os.close(output)


def main() -> None:
    """Start a supervisor whenever a client asks for one, until the owner is gone."""
    state, owner = State(Path(sys.argv[1])), Process.parse(sys.argv[2])
    exit_on_term()
    while owner.is_alive():
        _look(state)
        time.sleep(_POLL_SECONDS)


def _look(state: State) -> None:
    try:
        # one of several starters succeeds
        state.wanted.rename(state.taken)
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

"""The keeper of one server.

Command: `python -m draftstates.server.keeper STOP_SECONDS REPORT_FD COMMAND...`.

The keeper is a process between supervisor and server, so that no single KILL leaves an orphan. If
the supervisor is killed, the kernel sends TERM to the keeper, and the keeper ends the tree of
processes. If the keeper is killed, the kernel kills the server, and the supervisor becomes the
parent of the rest of the tree. If both are killed, the run's owner finds the rest by a variable in
its environment.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from draftstates.server.folder import RUN_FOLDER_VARIABLE
from draftstates.server.processes import (
    Process,
    become_subreaper,
    end_descendants,
    exit_on_term,
    machine,
    start_child,
)

_VARIABLE = "DRAFTSTATES_KEEPER"
# more than a keeper needs to end a server
_LEFT_SECONDS = 60.0


def main() -> None:
    """Run the server of the command line, report its end, and end what it leaves behind."""
    stop_seconds, report, command = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    os.set_inheritable(report, False)
    exit_on_term()
    become_subreaper()
    current = Process.current()
    os.environ[_VARIABLE] = f"{os.getppid()} {current.pid} {current.started}"
    try:
        # before the rest of the tree is ended, which may take a while
        os.write(report, str(_run(command)).encode())
    finally:
        end_descendants(stop_seconds)


def _run(command: list[str]) -> int:
    """Run the command and return its exit code, or minus the signal that ended it."""
    try:
        server = start_child(command, when_orphaned=signal.SIGKILL, start_new_session=True)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    while True:
        # this call also reaps adopted orphans
        pid, status = os.wait()
        if pid == server.pid:
            return os.waitstatus_to_exitcode(status)


def end_without_supervisor(run: Path, supervisor: int) -> None:
    """Kill what the servers leave whose supervisor and keepers are gone; return when none is left.

    Args:
        run: the run folder.
        supervisor: number of the process that is gone. Its other keepers are ending their servers.
    """
    deadline = time.monotonic() + _LEFT_SECONDS
    while (left := list(_kept(run, supervisor))) and time.monotonic() < deadline:
        for process, keeper in left:
            if not keeper.is_alive():
                with contextlib.suppress(psutil.Error):
                    process.kill()
        time.sleep(0.1)


def _kept(run: Path, supervisor: int) -> Iterator[tuple[psutil.Process, Process]]:
    """Yield the processes of a supervisor's servers, each with its keeper."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            if environment.get(RUN_FOLDER_VARIABLE) == str(run) and _VARIABLE in environment:
                parent, pid, started = map(int, environment[_VARIABLE].split())
                if parent == supervisor:
                    yield process, Process(pid, started, machine())


if __name__ == "__main__":
    main()

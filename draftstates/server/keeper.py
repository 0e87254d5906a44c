"""The keeper of one server.

Command: `python -m draftstates.server.keeper STOP_SECONDS REPORT_FD COMMAND...`.

The keeper is a process between supervisor and server, so that no single KILL leaves an orphan. If
the supervisor is killed, the kernel sends TERM to the keeper, and the keeper ends the tree of
processes. If the keeper is killed, the kernel kills the server, and the supervisor becomes the
parent of the rest of the tree.
"""

import os
import signal
import sys

from draftstates.server.processes import (
    become_subreaper,
    end_descendants,
    exit_on_term,
    start_child,
)


def main() -> None:
    """Run the server of the command line, report its end, and end what it leaves behind."""
    stop_seconds, report, command = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    os.set_inheritable(report, False)
    exit_on_term()
    become_subreaper()
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


if __name__ == "__main__":
    main()

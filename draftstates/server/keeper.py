"""Keeps one server: `python -m draftstates.server.keeper STOP_SECONDS REPORT_FD COMMAND...`.

A process of its own between supervisor and server, so that no single KILL leaves an orphan. If the supervisor is killed, the
kernel sends TERM here and the tree is ended; if this process is killed, the kernel kills the server and the rest of the tree
falls to the supervisor.
"""

import os
import signal
import subprocess
import sys

from draftstates.server.processes import become_subreaper, die_with_parent, end_descendants, exit_on_term


def main() -> None:
    stop_seconds, report, command = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    os.set_inheritable(report, False)
    exit_on_term()
    become_subreaper()
    try:
        os.write(report, str(_run(command)).encode())  # at once: ending what the server has left may take a while
    finally:
        end_descendants(stop_seconds)


def _run(command: list[str]) -> int:
    """Exit code of the command; minus the signal that ended it."""
    try:
        server = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_parent(signal.SIGKILL))
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    while True:
        pid, status = os.wait()  # adopted orphans are reaped on the way
        if pid == server.pid:
            return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()

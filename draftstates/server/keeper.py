"""Keeps one server: `python -m draftstates.server.keeper STOP_SECONDS COMMAND...`.

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
    stop_seconds, command = float(sys.argv[1]), sys.argv[2:]
    exit_on_term()
    become_subreaper()
    try:
        sys.exit(_run(command))
    finally:
        end_descendants(stop_seconds)


def _run(command: list[str]) -> int:
    """Exit status of the command, as a shell would give it."""
    try:
        server = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_parent(signal.SIGKILL))
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    while True:
        pid, status = os.wait()  # adopted orphans are reaped on the way
        if pid == server.pid:
            code = os.waitstatus_to_exitcode(status)
            return 128 - code if code < 0 else code


if __name__ == "__main__":
    main()

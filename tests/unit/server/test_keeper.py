"""What a server leaves whose supervisor and keeper were killed at once."""

import os
import subprocess
import threading
import time
from pathlib import Path

from draftstates.server import keeper
from draftstates.server.processes import Process

RUN = Path("/run-of-the-test")


def left(kept_by: Process, *, supervisor: int) -> "subprocess.Popen[bytes]":
    """Start a process as a server of a supervisor and a keeper leaves it."""
    named = f"{supervisor} {kept_by.pid} {kept_by.started}"
    environment = {"DRAFTSTATES_RUN_FOLDER": str(RUN), "DRAFTSTATES_KEEPER": named}
    return subprocess.Popen(["sleep", "60"], env={**os.environ, **environment})


def test_what_has_no_keeper_is_killed_and_what_another_process_has_started_stays() -> None:
    gone = Process(pid=1, started=1, machine="")
    orphan, other = left(gone, supervisor=5), left(gone, supervisor=6)
    keeper.end_without_supervisor(RUN, 5)
    assert orphan.wait(timeout=10) < 0
    assert other.poll() is None
    other.kill()
    other.wait()


def test_a_living_keeper_ends_its_server_itself_and_is_waited_for() -> None:
    server = left(Process.current(), supervisor=5)
    threading.Timer(0.5, server.terminate).start()
    # a zombie is nobody's server any more
    threading.Thread(target=server.wait).start()
    began = time.monotonic()
    keeper.end_without_supervisor(RUN, 5)
    assert time.monotonic() - began > 0.4
    assert server.wait(timeout=10) == -15

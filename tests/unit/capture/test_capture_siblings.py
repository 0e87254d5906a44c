"""A data parallel server of which one rank was killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import pathlib, time
from draftstates.capture import siblings
pathlib.Path("/proc/self/comm").write_text("sglang::schedul")
siblings.watch(seconds=0.1)
print("up", flush=True)
time.sleep(60)
"""
CONTROLLER = f"""
import subprocess, sys, time
command = [sys.executable, "-c", {RANK!r}]
ranks = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
for rank in ranks:
    rank.stdout.readline()
time.sleep(0.5)
print(*(rank.pid for rank in ranks), flush=True)
time.sleep(60)
"""
SERVER = f"""
import signal, subprocess, sys
signal.signal(signal.SIGQUIT, lambda *_: sys.exit(7))
subprocess.run([sys.executable, "-c", {CONTROLLER!r}])
"""


@pytest.mark.parametrize("killed", [0, 1])
def test_a_server_one_of_whose_ranks_was_killed_ends(killed: int) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
        ),
    }
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        ranks = [int(pid) for pid in server.stdout.readline().split()]
        assert len(ranks) == 2
        # while both live, it stays
        with pytest.raises(subprocess.TimeoutExpired):
            server.wait(1)
        os.kill(ranks[killed], signal.SIGKILL)
        assert server.wait(20) == 7
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        server.stdout.close()

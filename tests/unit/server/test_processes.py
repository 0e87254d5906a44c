"""How a tree of processes is ended: no descendant may live on, and nothing returns too early."""

import subprocess
import sys
import textwrap
from pathlib import Path

# The first thread of this process ends, the others go on: to the kernel it is a zombie that has a
# living child. Every process with many threads or much memory passes through this state on its way
# out, for a moment that grows with both.
ZOMBIE_WITH_A_CHILD = """
import ctypes, os, platform, subprocess, sys, threading, time

child = subprocess.Popen(["sleep", "30"])
threading.Thread(target=time.sleep, args=(30,)).start()
print(child.pid, flush=True)
SYS_EXIT = {"x86_64": 60, "aarch64": 93}[platform.machine()]
ctypes.CDLL(None).syscall(SYS_EXIT, 0)
"""

SUBREAPER = """
import os, subprocess, sys, time
from draftstates.server.processes import become_subreaper, end_descendants

become_subreaper()
main = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1]],
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
)
child = int(main.stdout.readline())
state = lambda: open(f"/proc/{main.pid}/stat").read().rsplit(")", 1)[1].split()[0]
while state() != "Z":
    time.sleep(0.01)
end_descendants(5.0)
try:
    os.waitpid(-1, os.WNOHANG)
    print("a child is left")
except ChildProcessError:
    print("no child is left")
print("the grandchild lives" if os.path.exists(f"/proc/{child}") else "the grandchild is gone")
"""

TERMINATED_TWICE = """
import os, signal, subprocess
from draftstates.server.processes import become_subreaper, end_descendants, exit_on_term

exit_on_term()
become_subreaper()
child = subprocess.Popen(["sleep", "30"])
print(child.pid, flush=True)
try:
    os.kill(os.getpid(), signal.SIGTERM)
finally:
    os.kill(os.getpid(), signal.SIGTERM)
    end_descendants(5.0)
"""
REUSED = """
import subprocess
from draftstates.server import processes

child = processes.start_child(["sleep", "60"], when_orphaned=processes.signal.SIGKILL)
ended = processes.start_child(["true"], when_orphaned=processes.signal.SIGKILL)
ended.wait()
# stands in for an orphan that this process has adopted
orphan = subprocess.Popen(["sleep", "60"])
ended.pid = orphan.pid
print(processes.kill_orphans(), child.poll(), orphan.wait(timeout=10))
child.kill()
"""


def test_an_orphan_with_the_number_of_a_child_that_has_ended_is_killed() -> None:
    done = subprocess.run([sys.executable, "-c", REUSED], stdout=subprocess.PIPE, text=True)
    assert done.stdout.split()[:2] == ["True", "None"]


def test_a_second_term_does_not_end_the_clean_up() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TERMINATED_TWICE], stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert done.returncode == 143
    assert not Path(f"/proc/{int(done.stdout)}").exists()


def test_the_children_of_a_zombie_end_too_before_the_end_returns() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SUBREAPER), ZOMBIE_WITH_A_CHILD],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == ["no child is left", "the grandchild is gone"]

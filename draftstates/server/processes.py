"""Processes on Linux: whether one is alive, and how to end a whole tree of them."""

import contextlib
import ctypes
import dataclasses
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# a process that KILL has not ended by then is stuck in the kernel, and nothing ends it
_KERNEL_SECONDS = 30.0
_libc = ctypes.CDLL(None, use_errno=True)
# the children that this process has started, unlike the orphans that it adopts
_started: "list[subprocess.Popen[bytes]]" = []


@dataclasses.dataclass(frozen=True)
class Process:
    """A process, identified by number and start time, because the kernel reuses numbers.

    Attributes:
        pid: number of the process.
        started: start time in hundredths of a second since boot.
        machine: identity of the running kernel and of the space of process numbers.
    """

    pid: int
    started: int
    machine: str

    @classmethod
    def of(cls, pid: int) -> "Process":
        """Return the process of this machine with this number.

        Raises:
            psutil.NoSuchProcess: no process has this number.
        """
        return cls(pid, _started_at(psutil.Process(pid)), machine())

    @classmethod
    def current(cls) -> "Process":
        """Return this process."""
        return cls.of(os.getpid())

    @property
    def is_here(self) -> bool:
        """Whether the process belongs to this machine, so that `is_alive` can tell."""
        return self.machine == machine()

    @property
    def reaches_loopback(self) -> bool:
        """Whether the process runs on this machine, perhaps in a container's process numbers."""
        return self.machine.split()[0] == machine().split()[0]

    def is_alive(self) -> bool:
        """Return whether the process of this machine runs. A zombie does not run."""
        # a look while the clock is set may see another start time
        return self._is_seen() or self._is_seen()

    def _is_seen(self) -> bool:
        try:
            found = psutil.Process(self.pid)
            ended = found.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            return not ended and _started_at(found) == self.started
        except psutil.Error:
            return False


@functools.cache
def machine() -> str:
    """Return the identity of this machine: equal where process numbers mean the same processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _started_at(process: psutil.Process) -> int:
    return round(100 * (process.create_time() - psutil.boot_time()))


def start_child(
    command: list[str], *, when_orphaned: signal.Signals, **options: Any
) -> "subprocess.Popen[bytes]":
    """Start a child that the kernel sends a signal when this process ends, also by KILL.

    Args:
        command: argv of the child.
        when_orphaned: the signal.
        options: of `subprocess.Popen`.
    """
    child = subprocess.Popen(command, preexec_fn=_die_with_parent(when_orphaned), **options)
    _started.append(child)
    return child


def _die_with_parent(number: signal.Signals) -> Callable[[], None]:
    parent = os.getpid()

    def in_child() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        # the parent ended before the call above
        if os.getppid() != parent:
            os._exit(1)

    return in_child


def become_subreaper() -> None:
    """Make every later orphan among this process's descendants its child, so that none escapes."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def exit_on_term() -> None:
    """Make TERM raise SystemExit, and ignore INT and HUP, which are meant for a terminal's jobs."""

    def leave(number: int, _: object) -> None:
        # a second TERM would end the clean-up
        ignore(signal.SIGTERM)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    ignore(signal.SIGINT, signal.SIGHUP)


def ignore(*numbers: signal.Signals) -> None:
    """Make signals have no effect on this process, unlike on the children that it starts."""
    for number in numbers:
        # not SIG_IGN, which a child would inherit
        signal.signal(number, lambda *_: None)


def kill_orphans() -> bool:
    """Kill the orphans that this process has adopted, and all below them.

    Returns:
        Whether any was left. Call it until none is.
    """
    # an orphan may have got the number of a child that has ended
    own = {child.pid for child in _started if child.poll() is None}
    orphans = [child for child in psutil.Process().children() if child.pid not in own]
    for orphan in orphans:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (orphan, *orphan.children(recursive=True)):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(orphan.pid, os.WNOHANG)
    return bool(orphans)


def end_descendants(grace: float) -> None:
    """End every process below this one.

    The children get TERM, and so do the orphans that this process adopts meanwhile. After `grace`
    seconds, all processes that are left get KILL. This process must be a subreaper: it then has a
    child to wait for as long as any descendant has a thread left. It returns when no child is left,
    and a GPU is free by then. A server that gets TERM ends its own children; this process ends what
    the server leaves behind. From then on TERM has no effect on this process.

    Args:
        grace: seconds between TERM and KILL.
    """
    ignore(signal.SIGTERM)
    deadline = time.monotonic() + grace
    terminated: set[int] = set()
    # zombies count: a main process whose threads are still ending has children below it
    while _reap():
        late = time.monotonic() > deadline
        if time.monotonic() > deadline + _KERNEL_SECONDS:
            break
        for process in psutil.Process().children(recursive=late):
            if late or process.pid not in terminated:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL if late else signal.SIGTERM)
                terminated.add(process.pid)
        time.sleep(0.05)


def _reap() -> bool:
    """Collect the children that have ended; return whether any child is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True

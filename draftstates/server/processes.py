"""Processes on Linux: whether one is alive, and how to end a whole tree of them."""

import contextlib
import ctypes
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from draftstates.errors import UserError

OWNER_VARIABLE = "DRAFTSTATES_OWNER"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# a process that KILL has not ended by then is stuck in the kernel, and nothing ends it
_KERNEL_SECONDS = 30.0
_libc = ctypes.CDLL(None, use_errno=True)


@dataclasses.dataclass(frozen=True)
class Process:
    """A process, identified by number and start time, because the kernel reuses numbers.

    Attributes:
        pid: number of the process.
        started: start time in clock ticks since boot.
    """

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> "Process":
        """Return the process with this number.

        Raises:
            OSError: no process has this number.
        """
        return cls(pid, _stat(pid)[2])

    @classmethod
    def current(cls) -> "Process":
        """Return this process."""
        return cls.of(os.getpid())

    @classmethod
    def parse(cls, text: str) -> "Process":
        """Return the process that the text `<pid>:<start time>` names.

        Raises:
            UserError: the text has another form.
        """
        try:
            pid, started = map(int, text.split(":"))
        except ValueError:
            raise UserError(
                f"{OWNER_VARIABLE} must be <pid>:<start time>, found {text!r}"
            ) from None
        return cls(pid, started)

    def __str__(self) -> str:
        return f"{self.pid}:{self.started}"

    def is_alive(self) -> bool:
        """Return whether the process runs. A zombie does not run."""
        try:
            state, _, started = _stat(self.pid)
        except OSError:
            return False
        return state not in "ZX" and started == self.started


def owner() -> Process:
    """Return the process whose end ends the server.

    It is the process that DRAFTSTATES_OWNER names, or else this process.

    Raises:
        UserError: the variable is malformed.
    """
    text = os.environ.get(OWNER_VARIABLE)
    return Process.parse(text) if text else Process.current()


def adopt_ownership() -> None:
    """Make this process the owner of what it starts, unless it has a living owner itself."""
    if not owner().is_alive() or OWNER_VARIABLE not in os.environ:
        os.environ[OWNER_VARIABLE] = str(Process.current())


def _stat(pid: int) -> tuple[str, int, int]:
    """Return state, parent and start time of a process."""
    # the name in parentheses may contain any character
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return fields[0], int(fields[1]), int(fields[19])


def become_subreaper() -> None:
    """Make every later orphan among this process's descendants its child, so that none escapes."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with_parent(number: signal.Signals) -> Callable[[], None]:
    """Return a `preexec_fn` that makes the kernel send the child a signal when this process ends.

    The kernel sends the signal also if KILL ends this process.
    """
    parent = os.getpid()

    def in_child() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        # the parent ended before the call above
        if os.getppid() != parent:
            os._exit(1)

    return in_child


def exit_on_term() -> None:
    """Make TERM raise SystemExit, and ignore INT and HUP, which are meant for a terminal's jobs."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for number in (signal.SIGINT, signal.SIGHUP):
        # not SIG_IGN, which a child would inherit
        signal.signal(number, lambda *_: None)


def descendants() -> dict[int, int]:
    """Return every process below this one with its parent, zombies included.

    A main process whose threads are still ending is a zombie, and its children live below it.
    """
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = _stat(int(entry.name))[1]
    found: dict[int, int] = {}
    todo = {os.getpid()}
    while todo:
        below = {pid: parent for pid, parent in parents.items() if parent in todo}
        found |= below
        todo = set(below)
    return found


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
    signal.signal(signal.SIGTERM, lambda *_: None)
    deadline = time.monotonic() + grace
    terminated: set[int] = set()
    while _reap():
        late = time.monotonic() > deadline
        if time.monotonic() > deadline + _KERNEL_SECONDS:
            break
        for pid, parent in descendants().items():
            if late or (parent == os.getpid() and pid not in terminated):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                terminated.add(pid)
        time.sleep(0.05)


def _reap() -> bool:
    """Collect the children that have ended; return whether any child is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True

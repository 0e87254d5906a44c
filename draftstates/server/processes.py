"""Processes: who is alive, and how to end a whole tree of them (Linux)."""

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
_KERNEL_SECONDS = 30.0  # what KILL does not end by then is stuck in the kernel, and nothing ends that
_libc = ctypes.CDLL(None, use_errno=True)


@dataclasses.dataclass(frozen=True)
class Process:
    """A process by number and start time (clock ticks since boot), since numbers are used again."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> "Process":
        """Raises OSError if there is none."""
        return cls(pid, _stat(pid)[2])

    @classmethod
    def current(cls) -> "Process":
        return cls.of(os.getpid())

    @classmethod
    def parse(cls, text: str) -> "Process":
        """From `<pid>:<start time>`.

        Raises:
            UserError: it is something else.
        """
        try:
            pid, started = map(int, text.split(":"))
        except ValueError:
            raise UserError(f"{OWNER_VARIABLE} must be <pid>:<start time>, found {text!r}") from None
        return cls(pid, started)

    def __str__(self) -> str:
        return f"{self.pid}:{self.started}"

    def is_alive(self) -> bool:
        """Whether it runs; a zombie does not."""
        try:
            state, _, started = _stat(self.pid)
        except OSError:
            return False
        return state not in "ZX" and started == self.started


def owner() -> Process:
    """The process whose end ends the server: the one in DRAFTSTATES_OWNER, else this one.

    Raises:
        UserError: the variable is malformed.
    """
    text = os.environ.get(OWNER_VARIABLE)
    return Process.parse(text) if text else Process.current()


def adopt_ownership() -> None:
    """Make this process the owner for all that it starts, unless it has a living owner itself."""
    if not owner().is_alive() or OWNER_VARIABLE not in os.environ:
        os.environ[OWNER_VARIABLE] = str(Process.current())


def _stat(pid: int) -> tuple[str, int, int]:
    """State, parent and start time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()  # the name before it may hold anything
    return fields[0], int(fields[1]), int(fields[19])


def become_subreaper() -> None:
    """From now on every orphan among this process's descendants becomes its child: none can slip away."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with_parent(number: signal.Signals) -> Callable[[], None]:
    """A `preexec_fn`: the kernel sends the child signal `number` when this process ends, also by KILL."""
    parent = os.getpid()

    def in_child() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the call above
            os._exit(1)

    return in_child


def exit_on_term() -> None:
    """TERM raises SystemExit here; INT and HUP, meant for a terminal's jobs, do nothing."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which a child would inherit


def descendants() -> dict[int, int]:
    """All living processes below this one, each with its parent."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent, _ = _stat(int(entry.name))
                if state not in "ZX":
                    parents[int(entry.name)] = parent
    found: dict[int, int] = {}
    todo = {os.getpid()}
    while todo:
        below = {pid: parent for pid, parent in parents.items() if parent in todo}
        found |= below
        todo = set(below)
    return found


def end_descendants(grace: float) -> None:
    """End every process below this one: TERM to its children, also to those it inherits on the way; after `grace` seconds KILL to all.

    A server ends its own helpers when it gets TERM; only what it leaves behind falls to this process, which must be a subreaper.
    TERM has no effect on this process any more.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)
    deadline = time.monotonic() + grace
    told: set[int] = set()
    _reap()
    while left := descendants():
        late = time.monotonic() > deadline
        if time.monotonic() > deadline + _KERNEL_SECONDS:
            break
        for pid, parent in left.items():
            if late or (parent == os.getpid() and pid not in told):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                told.add(pid)
        time.sleep(0.05)
        _reap()


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass

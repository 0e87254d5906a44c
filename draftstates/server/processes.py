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
_libc = ctypes.CDLL(None, use_errno=True)


@dataclasses.dataclass(frozen=True)
class Process:
    """A process by number and start time (clock ticks since boot), since numbers are used again."""

    pid: int
    started: int

    @classmethod
    def current(cls) -> "Process":
        return cls(os.getpid(), _stat(os.getpid())[2])

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


def descendants() -> list[int]:
    """All living processes below this one."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent, _ = _stat(int(entry.name))
                if state not in "ZX":
                    children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def end_descendants(grace: float) -> None:
    """End every process below this one: TERM to its children, KILL to whatever is left after `grace` seconds.

    The caller must be a subreaper, or an orphan may slip away. TERM reaches this process no more.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)
    _reap()
    for pid in descendants():
        with contextlib.suppress(OSError):
            if _stat(pid)[1] == os.getpid():
                os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while left := descendants():
        if time.monotonic() > deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline + 30:  # only a process stuck in the kernel is left, and nothing ends that
            break
        time.sleep(0.05)
        _reap()


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass

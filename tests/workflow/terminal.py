"""Snakemake in a terminal of its own.

A test presses the terminal's keys, kills its processes, closes it, and checks the processes that
remain.
"""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import termios
import threading
from pathlib import Path

from workspace import Workspace

MARK = "DRAFTSTATES_TEST_MARK"
CTRL_C = b"\x03"


class Terminal:
    """Run of Snakemake that owns its terminal, as in a person's window.

    `seen` is its output. Every process of it is known by a mark in its environment, or by its
    session: SGLang's processes overwrite their environment with a title.
    """

    def __init__(self, workspace: Workspace, *flags: str) -> None:
        self._mark = f"{MARK}={workspace.folder}\0".encode()
        self._sessions: set[int] = set()
        self._closed = threading.Event()
        self._output = b""
        self._master, slave = pty.openpty()
        start = workspace.prepare(*flags)
        start["env"] = {**start["env"], MARK: str(workspace.folder), "TERM": "dumb"}
        self.process = subprocess.Popen(
            **start,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def seen(self) -> str:
        return self._output.decode(errors="replace").replace("\r\n", "\n")

    def press(self, key: bytes) -> None:
        os.write(self._master, key)

    def close(self) -> None:
        """Close the terminal: the kernel sends HUP to all processes that it controls."""
        self._closed.set()
        self._reader.join()

    def find(self, *words: str) -> list[int]:
        """Return the pids of the run's living processes whose command line holds all words."""
        return [
            int(line.split()[0]) for line in self.processes() if all(word in line for word in words)
        ]

    def processes(self) -> list[str]:
        """Return pid and command line of each living process of this run."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                pid = int(entry.name)
                state, session = re.match(
                    r".*\) (\S) \S+ \S+ (\S+)", (entry / "stat").read_text(), re.DOTALL
                ).groups()
                marked = self._mark in (entry / "environ").read_bytes()
                if marked:
                    self._sessions.add(int(session))
                if state not in "ZX" and (marked or int(session) in self._sessions):
                    command = (entry / "cmdline").read_bytes().replace(bytes(1), b" ")
                    found.append(f"{pid} {command.decode(errors='replace')}")
        return found

    def end(self) -> None:
        """End all remaining processes."""
        for pid in self.find():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.close()

    def _read(self) -> None:
        while not self._closed.wait(0.02):
            if select.select([self._master], [], [], 0.05)[0]:
                # No process has the other end any more.
                with contextlib.suppress(OSError):
                    self._output += os.read(self._master, 65536)
        os.close(self._master)

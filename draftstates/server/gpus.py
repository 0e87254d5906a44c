"""The lock that keeps the servers of two runs, or of two supervisors, off the same GPUs."""

import dataclasses
import fcntl
import json
import os
from pathlib import Path

from draftstates.errors import UserError
from draftstates.server.processes import Process


class GpuLock:
    """The lock of one supervisor.

    A keeper inherits it, so it is free when the last process of the last server has ended.

    Args:
        run: folder of the run.
        owner: the process with which the run ends.
    """

    def __init__(self, run: Path, owner: Process) -> None:
        self._holder = {"run": str(run), **dataclasses.asdict(owner)}
        self._lock: int | None = None

    @property
    def held(self) -> tuple[int, ...]:
        """The descriptor that a keeper inherits."""
        return () if self._lock is None else (self._lock,)

    def take(self, state: Path) -> bool:
        """Take the lock in the folder `state`; return whether it is taken.

        Raises:
            UserError: the servers of another run, which is alive, hold it.
        """
        if self._lock is not None:
            return True
        state.mkdir(parents=True, exist_ok=True)
        lock = os.open(state / "gpus.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{json.dumps(self._holder)}\n".encode(), 0)
            self._lock = lock
        except BlockingIOError:
            self._refuse_living(state, os.pread(lock, 4096, 0).decode())
        finally:
            # an open descriptor would hold the lock against this process too
            if self._lock is None:
                os.close(lock)
        return self._lock is not None

    def release(self) -> None:
        """Release the lock. It stays held as long as a keeper lives."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _refuse_living(self, state: Path, text: str) -> None:
        # a supervisor that has just taken the lock may not have written yet
        if not text.endswith("\n"):
            return
        holder = json.loads(text)
        if holder.pop("run") == self._holder["run"]:
            return
        owner = Process(**holder)
        if owner.is_here and owner.is_alive():
            raise UserError(
                f"{state}: a server of another run works there, that of process {owner.pid}; wait"
                " until that ends, or give this one another state folder"
            )

"""The GPUs of a local server, and the lock that keeps two runs or two supervisors off them."""

import dataclasses
import fcntl
import itertools
import json
import os
import re
from pathlib import Path

from draftstates.errors import UserError
from draftstates.files import NO_LOCKS
from draftstates.server.processes import Process

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
# a number, or the UUID of a GPU or of a part of one
_GPU = re.compile(r"\d+|(?:GPU|MIG)-\S+")


def visible_gpus() -> list[str]:
    """Return the GPUs that a server of this process sees, as CUDA_VISIBLE_DEVICES names them.

    Without that variable, they are all GPUs of this machine, by number.
    """
    named = os.environ.get(VISIBLE_GPUS)
    if named is None:
        return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    # CUDA hides every GPU from the first name on that is no GPU's, such as -1
    return list(itertools.takewhile(_GPU.fullmatch, map(str.strip, named.split(","))))


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
            UserError: the servers of another run, which is alive, hold it; or the file system has
                no locks.
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
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            raise UserError(
                f"{state}: expected a file system with locks, which keep two servers off the same"
                f" GPUs, found none ({error.strerror}); name a folder of this machine's own disk in"
                " server.state"
            ) from error
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
        # otherwise its servers are about to end
        if owner.is_alive() or not owner.is_here:
            where = "" if owner.is_here else " of another machine or container"
            raise UserError(
                f"{state}: a server of another run works there, that of process {owner.pid}{where};"
                " wait until that ends, or name another folder in server.state"
            )

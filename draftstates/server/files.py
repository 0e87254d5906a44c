"""Small files that several processes share: private, whole or absent, and locked by the kernel."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_private(path: Path, content: dict[str, Any] | str) -> None:
    """Write `content` (an object as JSON) to `path`, mode 0600, so that a reader sees the old file or the new one and nothing between."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content if isinstance(content, str) else json.dumps(content, indent=1))
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`, or None where there is no such file."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def locked(path: Path, mode: int) -> Iterator[int]:
    """Hold `flock(mode)` on `path`; gives the descriptor. The kernel drops the lock with the process, however that ends.

    Raises:
        BlockingIOError: the mode has LOCK_NB and another process holds the lock.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # close-on-exec: no child inherits a lock
    try:
        fcntl.flock(descriptor, mode)
        yield descriptor
    finally:
        os.close(descriptor)


def is_held(path: Path, against: int) -> bool:
    """Whether someone holds a lock on `path` that keeps out `against` (LOCK_SH: an exclusive one; LOCK_EX: any)."""
    try:
        with locked(path, against | fcntl.LOCK_NB):
            return False
    except BlockingIOError:
        return True


def open_log(path: Path) -> int:
    """Descriptor that appends to `path`, mode 0600 where it is new: a server's log shows its API key."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def tail(path: Path, *, start: int = 0, lines: int = 20) -> str:
    """The last lines of what `path` holds from byte `start` on."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(start, end - 65536))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])

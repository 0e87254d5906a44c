"""Operations on files for all stages.

Atomic publishing, private files, JSON documents and their versions, differences between expected
and found values, locks, checksums.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import shlex
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from draftstates.errors import UserError

_READ_BYTES = 1 << 22
_WRITE_BITS = 0o222
# errors of flock on a file system without locks, such as Lustre or NFS as some mount it
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """A field whose value is not the expected one."""

    name: str
    expected: object
    found: object

    def __str__(self) -> str:
        return f"expected {self.name} {self.expected}, found {self.found}"


def differences(
    expected: Mapping[str, object], found: Mapping[str, object]
) -> Iterator[Difference]:
    """Yield each field of `expected` whose value in `found` differs or is missing (None)."""
    for name, value in expected.items():
        if found.get(name) != value:
            yield Difference(name=name, expected=value, found=found.get(name))


def first_difference(
    expected: Mapping[str, object], found: Mapping[str, object]
) -> Difference | None:
    """Return the first field, in the order of `expected`, whose value differs."""
    return next(differences(expected, found), None)


def read_document(
    path: Path, *, what: str, format: str, version: int, remedy: str
) -> dict[str, Any]:
    """Read a JSON document of one of the project's formats.

    Args:
        path: file of the document.
        what: noun of the document for the message, such as "a plan".
        format: value that its field `format` must have.
        version: value that its field `format_version` must have.
        remedy: command that makes the document, as the end of a sentence.

    Raises:
        UserError: the file cannot be read, is not JSON, or has another format or version.
    """
    try:
        document = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise UserError(f"{path}: expected {what}: {error.strerror}; {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: expected {what}, found no JSON: {type(error).__name__}: {error}; {remedy}"
        ) from error
    if not isinstance(document, dict) or "format" not in document:
        raise UserError(f"{path}: expected {what}, found a document without `format`; {remedy}")
    check_version(
        path,
        what=what,
        expected=(format, version),
        found=(document["format"], document.get("format_version")),
        remedy=remedy,
    )
    return document


def check_version(
    path: Path,
    *,
    what: str,
    expected: tuple[str, int],
    found: tuple[object, object],
    remedy: str,
) -> None:
    """Refuse a file of another format, or of another version of the format.

    Args:
        path: the file.
        what: noun of the file for the message, such as "a plan".
        expected: format and version that this draftstates reads and writes.
        found: format and version that the file names.
        remedy: command that makes the file, as the end of a sentence.

    Raises:
        UserError: the two differ; the message says where the version is older.
    """
    if found == expected:
        return
    if found[0] != expected[0]:
        raise UserError(f"{path}: expected {what} ({expected[0]}), found {found[0]}; {remedy}")
    older = isinstance(found[1], int) and found[1] < expected[1]
    origin = f"made by {'an earlier' if older else 'another'} draftstates"
    raise UserError(
        f"{path}: {found[0]} version {found[1]}, {origin}; expected version {expected[1]}: {remedy}"
    )


def replace_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write `text` to `path` so that a reader sees the whole old content or the whole new one.

    The content is not synced; use `publish_text` for results.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
    os.replace(temporary, path)


def write_private(path: Path, content: dict[str, Any] | str) -> None:
    """Replace `path` by `content` (an object becomes JSON), with mode 0600."""
    text = content if isinstance(content, str) else json.dumps(content, indent=1)
    replace_text(path, text, mode=0o600)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in `path`, or None where the file does not exist.

    Raises:
        UserError: the file holds no JSON object.
    """
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise _no_object(path, str(error)) from error
    if not isinstance(found, dict):
        raise _no_object(path, type(found).__name__)
    return found


def _no_object(path: Path, found: str) -> UserError:
    remedy = f"remove the file, and run again: rm -f {shlex.quote(str(path))}"
    return UserError(f"{path}: expected a JSON object, found {found}; {remedy}")


@contextlib.contextmanager
def locked(path: Path, mode: int) -> Iterator[int]:
    """Hold `flock(mode)` on `path` and yield the descriptor.

    The kernel drops the lock when the process ends, even when it is killed.

    Raises:
        BlockingIOError: the mode has LOCK_NB and another process holds the lock.
    """
    # Python opens it close-on-exec, so that no child inherits the lock
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, mode)
        yield descriptor
    finally:
        os.close(descriptor)


def open_log(path: Path) -> int:
    """Open `path` for appending and return the descriptor.

    A new file has mode 0600, since a server's log shows its API key.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def tail(path: Path, *, start: int = 0, lines: int = 20) -> str:
    """Return the last lines of a log, of the content from byte `start` on, or why it has none."""
    try:
        with open(path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - 65536))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    # the lines explain an error, which counts without them
    except OSError as error:
        return f"({path} cannot be read: {error.strerror})"


def publish(source: Path, final: Path, *, read_only: bool = False) -> None:
    """Give a complete file its final name, synced before and after.

    Args:
        read_only: whether the file loses its write bits first.
    """
    if read_only:
        os.chmod(source, os.stat(source).st_mode & ~_WRITE_BITS)
    sync(source)
    os.replace(source, final)
    sync(final.parent)


def sync(path: Path) -> None:
    """Sync a file, or a folder's entries (its renames), to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def publishing(final: Path) -> Iterator[Path]:
    """Yield the path of a partial file to write; publish it as `final` when the block has ended.

    After an error in the block the partial file is removed. The folder of `final` is made where it
    is missing.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(f".{final.name}.{socket.gethostname()}.{os.getpid()}.partial")
    try:
        yield partial
        publish(partial, final)
    finally:
        partial.unlink(missing_ok=True)


def publish_text(text: str, final: Path) -> None:
    """Write `text` to `final`, whole or not at all."""
    with publishing(final) as partial:
        partial.write_text(text, encoding="utf-8")


def publish_json(document: Mapping[str, Any], final: Path) -> None:
    """Write `document` to `final` as indented JSON, whole or not at all."""
    publish_text(json.dumps(document, indent=1) + "\n", final)


def publish_folder(source: Path, final: Path) -> None:
    """Give a complete folder of files its final name, synced before and after."""
    for path in source.iterdir():
        sync(path)
    sync(source)
    os.rename(source, final)
    sync(final.parent)


def files_digest(files: Iterable[Path], *, root: Path) -> str:
    """Return the SHA-256 of files, 64 hex digits.

    It depends on their paths relative to `root`, their content and their order.
    """
    digest = hashlib.sha256()
    for file in files:
        digest.update(
            file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0"
        )
    return digest.hexdigest()


def file_checksum(path: Path) -> str:
    """Return the XXH3-128 of a whole file, 32 hex digits, as `xxhsum -H2` prints it."""
    digest, block = xxhash.xxh3_128(), memoryview(bytearray(_READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()

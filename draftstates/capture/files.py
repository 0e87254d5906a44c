"""Destination files, laid out by the client, opened and filled by the server.

The server syncs a file when every row is written.
"""

import ctypes
import errno
import functools
import os
import stat
import threading
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from draftstates.capture.settings import CaptureSettings
from draftstates.errors import UserError
from draftstates.extract import protocol
from draftstates.files import first_difference
from draftstates.paths import BUILDING, Results
from draftstates.shards import layout
from draftstates.spec import STORED_DTYPES

_LIBC = ctypes.CDLL(None, use_errno=True)
# SYNC_FILE_RANGE_WRITE: start the write-back, do not wait for it
_START_WRITE_BACK = 2
_MOST_OPEN = 256


def is_self_tests(file: str, *, root: Path) -> bool:
    """Return whether a request's file, relative to the root, belongs to a self-test."""
    try:
        return place_of(file, root=root).is_relative_to(Results(root).selftests)
    except UserError:
        return False


def place_of(file: str, *, root: Path) -> Path:
    """Return where a request's file lies, in a folder below the root that links do not lead out of.

    Raises:
        UserError: the folder lies elsewhere, or is no building folder.
    """
    named = root / file
    folder = named.parent.resolve()
    if named.name in ("", ".."):
        raise UserError(f"{file} names no file")
    if not folder.is_relative_to(root):
        raise UserError(f"{file} lies outside {root}, the folder that this server was started with")
    if BUILDING not in folder.relative_to(root).parts:
        raise UserError(
            f"{file} is not below a folder {BUILDING}: a server writes shards under construction"
            " alone, never one that is published"
        )
    return folder / named.name


def is_trusted(path: Path, *, root: Path) -> bool:
    """Return whether a note below the root was left by this user, or by the root's owner."""
    try:
        found = path.lstat()
        owners = {os.getuid(), root.stat().st_uid}
        inside = path.parent.resolve() == root.resolve() / path.parent.relative_to(root)
    except OSError:
        return False
    return inside and stat.S_ISREG(found.st_mode) and found.st_uid in owners


def _open_own(path: Path, flags: int) -> int:
    """Open a file that is no link and has no other name.

    Raises:
        UserError: it is one, or has one.
        OSError: it cannot be opened.
    """
    try:
        # a pipe would wait for its other end
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(f"{path} is a link: expected a file of its own") from error
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        os.close(descriptor)
        raise UserError(f"{path} has another name too, or is no file: expected a file of its own")
    return descriptor


class DestinationFile:
    """One shard under construction, filled by this process and perhaps by others.

    Each data parallel rank has samples of its own. All ranks append receipts to one file, so the
    receipts say which rows are written.

    Attributes:
        states: first byte and bytes per row of `hidden_states` and `final_hidden_state`, as far as
            they are captured.
        rows: rows of the whole shard.
    """

    def __init__(self, path: Path, settings: CaptureSettings) -> None:
        self._fd = _open_own(path, os.O_WRONLY)
        try:
            header = layout.read_header(path)
            _compare(path, header, settings)
            self._receipts = _open_own(
                protocol.growing_receipts(path), os.O_RDWR | os.O_CREAT | os.O_APPEND
            )
        except BaseException:
            os.close(self._fd)
            raise
        self.states = header.states()
        self.rows = header.rows
        self._path = path
        self._reader = protocol.ReceiptReader(self._receipts)
        # Number of rows by first row, from each sample's newest receipt.
        self._written: dict[int, int] = {}
        self._sealed = False
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._fd, self._receipts)

    def is_in_place(self) -> bool:
        """Return whether the file is still where it was opened: neither published nor given up."""
        return self._path.exists()

    def write(self, tensor: str, row: int, data: memoryview) -> None:
        """Write rows at their place and have the kernel start the write-back at once.

        Args:
            tensor: `hidden_states` or `final_hidden_state`.
            row: the first row in the shard.
            data: bytes of whole rows.
        """
        if self._is_sealed():
            # The client may have given the file its final name. A late attempt must not touch it.
            raise RuntimeError(
                "every row of this shard is captured and synced already; start the run a second"
                " time, and it captures the shard from its start"
            )
        begin, width = self.states[tensor]
        start = at = begin + row * width
        end = at + len(data)
        if row < 0 or end > begin + self.rows * width:
            raise ValueError(
                f"{len(data) // width} rows from row {row} on do not lie in a shard of {self.rows}"
                " rows"
            )
        while at < end:
            at += os.pwrite(self._fd, data[at - start :], at)
        _LIBC.sync_file_range(
            self._fd, ctypes.c_int64(start), ctypes.c_int64(end - start), _START_WRITE_BACK
        )

    def shared_rows(self, first_row: int, start: int, rows: int) -> dict[str, torch.Tensor]:
        """Return rows that a sample shares, as the file has them, by tensor.

        Args:
            first_row: first row that the sample writes itself.
            start: position of the first of these rows in the sample.
            rows: number of rows.
        """
        index = int(np.searchsorted(self._shard.segments.ends, first_row))
        places = self._shard.segments.row_numbers(index)[start : start + rows]
        return {name: self._shard.state_rows(name, 0, self.rows)[places] for name in self.states}

    @functools.cached_property
    def _shard(self) -> layout.Shard:
        return layout.Shard(self._path)

    def finish_sample(self, receipt: protocol.Receipt) -> bool:
        """Append a sample's receipt; return whether every row of the shard is written with it.

        Raises:
            OSError: the disk has no room for it.
        """
        self._append(receipt.line())
        return self._is_sealed()

    def _is_sealed(self) -> bool:
        """Return whether every row of the shard has been written at some time, by any rank."""
        with self._lock:
            for receipt in self._reader.new():
                self._written[protocol.parse_rid(receipt.rid).first_row] = receipt.rows
                self._sealed = (
                    self._sealed
                    or sum(self._written.values()) + self._reader.copied_rows == self.rows
                )
            return self._sealed

    def sync(self) -> None:
        """Bring the data to the disk, then append a line that says so."""
        os.fdatasync(self._fd)
        self._append(protocol.synced_line(self.rows))

    def _append(self, line: bytes) -> None:
        if os.write(self._receipts, line) < len(line):
            raise OSError(errno.ENOSPC, "no room for a line of receipts")


class Destinations:
    """Open destinations of a server.

    Each one is opened once, lies below the root, and is laid out for the server's capture.
    """

    def __init__(self, settings: CaptureSettings) -> None:
        self._settings = settings
        self._open: dict[str, DestinationFile] = {}
        self._syncer = ThreadPoolExecutor(2, thread_name_prefix="draftstates-sync")

    def open(self, file: str) -> DestinationFile:
        """Return the open destination of a request.

        Raises:
            UserError: the file lies outside the root or the building folders, is missing, is a link
                or has another name, or is laid out for another capture.
        """
        if file not in self._open:
            path = place_of(file, root=self._settings.root)
            if not os.path.lexists(path):
                raise UserError(f"the server sees no {path}; its root is {self._settings.root}")
            # A deleted file takes room on the disk for as long as it is open.
            self._open = {name: each for name, each in self._open.items() if each.is_in_place()}
            self._open[file] = DestinationFile(path, self._settings)
            while len(self._open) > _MOST_OPEN:
                # The oldest first. It stays open for the writers that hold it, and closes with the
                # last of them.
                self._open.pop(next(iter(self._open)))
        return self._open[file]

    def sync_later(self, destination: DestinationFile) -> None:
        """Sync a destination in a thread of its own."""
        self._syncer.submit(_sync, destination)


def _sync(destination: DestinationFile) -> None:
    try:
        destination.sync()
    # The client misses the line that says so; the log says why.
    except OSError:
        traceback.print_exc()


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _compare(path: Path, header: layout.ShardHeader, settings: CaptureSettings) -> None:
    spec = settings.spec
    expected = {
        "residual_layers": spec.residual_layers,
        "final_norm": spec.final_norm,
        "final_state": spec.final_state,
        "stored dtype": STORED_DTYPES[spec.stored_dtype][0],
        # Last: the key differs wherever another value differs, and for another model or dtype.
        "capture key": spec.key,
    }
    found = {
        "residual_layers": header.residual_layers,
        "final_norm": header.metadata["final_norm"],
        "final_state": "final_hidden_state" in header.states(),
        "stored dtype": header.dtype,
        "capture key": header.metadata["capture_key"],
    }
    if difference := first_difference(expected, found):
        raise UserError(
            f"{path}: laid out for {difference.name} {difference.found}, but this server captures"
            f" {difference.expected}"
        )

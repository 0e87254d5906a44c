"""The files that rows go into: laid out by the client, opened and filled by the server, synced when every row is in."""

import ctypes
import errno
import os
import threading
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from draftstates import shards, wire
from draftstates.capture.settings import CaptureSettings
from draftstates.capture_spec import STORED_DTYPES
from draftstates.errors import UserError

_LIBC = ctypes.CDLL(None, use_errno=True)
_START_WRITE_BACK = 2  # SYNC_FILE_RANGE_WRITE: ask for it, do not wait
_MOST_OPEN = 256


class DestinationFile:
    """One shard under construction, filled by this process and perhaps by others: each data parallel rank has samples of its own.

    What has been written is therefore read from the receipts, which all of them append to one file.

    Attributes:
        states: first byte and bytes per row of `hidden_states` and `final_hidden_state`.
    """

    def __init__(self, path: Path, settings: CaptureSettings) -> None:
        header = shards.read_header(path)
        _compare(path, header, settings)
        self.states = header.states()
        self.rows = header.rows
        self._path = path
        self._fd = os.open(path, os.O_WRONLY)
        self._receipts = os.open(wire.receipts_path(path), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._reader = wire.ReceiptReader(self._receipts)
        self._written: dict[int, int] = {}  # rows by first row, as the sample's newest receipt says
        self._sealed = False
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._fd, self._receipts)

    def is_in_place(self) -> bool:
        """Whether the file is still where it was opened: neither published nor given up."""
        return self._path.exists()

    def write(self, tensor: str, row: int, data: memoryview) -> None:
        """Put rows at their place and ask the kernel to start writing them back at once."""
        if self._is_sealed():
            # the client may have given the file its final name; an abandoned attempt must not touch it
            raise RuntimeError("every row of this shard was captured and synced before; run again, and it is made anew")
        begin, width = self.states[tensor]
        start = at = begin + row * width
        end = at + len(data)
        if row < 0 or end > begin + self.rows * width:
            raise ValueError(f"{len(data) // width} rows from row {row} on do not lie in a shard of {self.rows} rows")
        while at < end:
            at += os.pwrite(self._fd, data[at - start :], at)
        _LIBC.sync_file_range(self._fd, ctypes.c_int64(start), ctypes.c_int64(end - start), _START_WRITE_BACK)

    def finish_sample(self, receipt: wire.Receipt) -> bool:
        """Append a sample's receipt; True where every row of the shard has then been written.

        Raises:
            OSError: there is no room for it.
        """
        self._append(receipt.line())
        return self._is_sealed()

    def _is_sealed(self) -> bool:
        """Whether every row of the shard has been written at some time, whoever did it."""
        with self._lock:
            for receipt in self._reader.new():
                self._written[wire.parse_rid(receipt.rid).first_row] = receipt.rows
                self._sealed = self._sealed or sum(self._written.values()) + self._reader.copied_rows == self.rows
            return self._sealed

    def sync(self) -> None:
        """Bring the data to the disk, then say so."""
        os.fdatasync(self._fd)
        self._append(wire.synced_line(self.rows))

    def _append(self, line: bytes) -> None:
        if os.write(self._receipts, line) < len(line):
            raise OSError(errno.ENOSPC, "no room for a line of receipts")


class Destinations:
    """Opens each destination once, only below the root, only if it is laid out for what this server captures."""

    def __init__(self, settings: CaptureSettings) -> None:
        self._settings = settings
        self._open: dict[str, DestinationFile] = {}
        self._syncer = ThreadPoolExecutor(2, thread_name_prefix="draftstates-sync")

    def open(self, file: str) -> DestinationFile:
        """The open destination of a request.

        Raises:
            UserError: outside the root, not there, or laid out for another capture.
        """
        if file not in self._open:
            path = (self._settings.root / file).resolve()
            if not path.is_relative_to(self._settings.root):
                raise UserError(f"{file} lies outside {self._settings.root}, the folder that this server was started with")
            if not path.exists():
                raise UserError(f"the server sees no {path}; its root is {self._settings.root}")
            # a deleted file keeps its bytes from the disk for as long as it is open
            self._open = {name: each for name, each in self._open.items() if each.is_in_place()}
            self._open[file] = DestinationFile(path, self._settings)
            while len(self._open) > _MOST_OPEN:
                # oldest first; it stays open for writers that hold it and closes with the last of them
                self._open.pop(next(iter(self._open)))
        return self._open[file]

    def sync_later(self, destination: DestinationFile) -> None:
        self._syncer.submit(_sync, destination)


def _sync(destination: DestinationFile) -> None:
    try:
        destination.sync()
    except OSError:  # the client will miss its word; the log says why
        traceback.print_exc()


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _compare(path: Path, header: shards.ShardHeader, settings: CaptureSettings) -> None:
    spec = settings.spec
    expected = {
        "residual_layers": spec.residual_layers,
        "final_norm": spec.final_norm,
        "stored dtype": STORED_DTYPES[spec.stored_dtype][0],
        "capture key": spec.key,  # last: it differs wherever another one does, and for another model or another number format
    }
    found = {
        "residual_layers": header.residual_layers,
        "final_norm": header.metadata["final_norm"],
        "stored dtype": header.tensors["hidden_states"][0],
        "capture key": header.metadata["capture_key"],
    }
    for name, value in expected.items():
        if found[name] != value:
            raise UserError(f"{path}: laid out for {name} {found[name]}, but this server captures {value}")

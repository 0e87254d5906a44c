"""Protocol of client and server for one captured sample.

The request's id (`rid`) tells the server the place of the sample's rows. The server appends one
JSON line for each finished sample, the receipt, to a file beside the destination. Neither needs a
route of its own in SGLang.
"""

import dataclasses
import json
import os
from collections import deque
from pathlib import Path
from typing import Any

from draftstates.errors import UserError

VERSION = "ds2"
# Key in the answer's meta_info: it proves that the plug-in saw the request.
ANSWER_KEY = "draftstates"
# Number of most likely next tokens that each request asks for, for the alignment check.
TOP_TOKENS = 5
# The same of each row of a prefix recapture, beside the token that follows: of two logits at least,
# the difference is known.
ROW_TOKENS = 2
GROWING_RECEIPTS_SUFFIX = ".receipts.jsonl"
# The states of a self-test request are held against second readings, the shared rows of a comparing
# one, as far as they are computed again, against the file's.
PLAIN, SELF_TEST, COMPARING = "c", "p", "r"
# A self-test request keeps so many of its first and of its last rows of every layer.
_KEPT = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Destination:
    """Place of the rows of one request.

    Attributes:
        file: path of a laid-out shard, relative to the server's root.
        first_row: first row in that shard of those that are written.
        rows: tokens of the sample, all of which must be computed.
        shared: first rows of them that the shard has already, and that are not written.
        ids_hash: `ids.ids_hash` of the ids sent, so that a receipt is bound to them.
        attempt: distinguishes a retry from earlier attempts.
        kind: `PLAIN`, `SELF_TEST` or `COMPARING`.
    """

    file: str
    first_row: int
    rows: int
    ids_hash: str
    attempt: str
    kind: str = PLAIN
    shared: int = 0

    @property
    def written(self) -> int:
        """Number of rows that are written."""
        return self.rows - self.shared

    @property
    def rid(self) -> str:
        return "|".join(
            [
                VERSION,
                self.kind,
                self.file,
                str(self.first_row),
                str(self.rows),
                str(self.shared),
                self.ids_hash,
                self.attempt,
            ]
        )


def parse_rid(rid: str) -> Destination | None:
    """Return the destination that a request id names, or None for another program's id."""
    parts = str(rid).split("|")
    if len(parts) != 8 or parts[0] != VERSION:
        return None
    _, kind, file, first_row, rows, shared, ids_hash, attempt = parts
    try:
        return Destination(
            file=file,
            first_row=int(first_row),
            rows=int(rows),
            shared=int(shared),
            ids_hash=ids_hash,
            attempt=attempt,
            kind=kind,
        )
    except ValueError:
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Receipt:
    """Receipt of one sample that reached its last row.

    Attributes:
        rows: rows written in this attempt; fewer than asked for if a cache skipped some.
        chunks: number of prefill chunks of these rows.
        cached_tokens: tokens before the first computed row.
        ids_hash: hash of the ids that the model's forward pass read, those of shared rows too; of
            cached tokens it reads none.
        checksum: checksum of the bytes that were written; see `layout.sample_checksum`.
        again_rows: shared rows that were computed again and compared with the file's.
        again_distance: largest distance of these (`draftstates.shards.distance`).
        last_state: final state of the last row in the stored dtype, in base64; None where the file
            holds it.
    """

    rid: str
    rows: int
    chunks: int
    cached_tokens: int
    ids_hash: str
    checksum: str
    again_rows: int = 0
    again_distance: float = 0.0
    last_state: str | None = None
    error: str | None = None

    def checked(self) -> "Receipt":
        """Return the receipt, whose fields came out of a file.

        Raises:
            TypeError: a field is of another type.
        """
        for name in ("rid", "ids_hash", "checksum"):
            _checked(name, getattr(self, name), str)
        for name in ("rows", "chunks", "cached_tokens", "again_rows"):
            _checked(name, getattr(self, name), int)
        _checked("again_distance", self.again_distance, float)
        for name in ("error", "last_state"):
            if getattr(self, name) is not None:
                _checked(name, getattr(self, name), str)
        return self

    def line(self) -> bytes:
        return (json.dumps(dataclasses.asdict(self), separators=(",", ":")) + "\n").encode()


def kept_positions(rows: int) -> list[int]:
    """Return the positions of the rows of every layer that a self-test request keeps."""
    return [k for k in range(rows) if k < _KEPT or k >= rows - _KEPT]


def _checked(name: str, value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{name}: expected {kind.__name__}, found {value!r:.60}")
    return value


def synced_line(rows: int) -> bytes:
    """Return the server's line that says that all rows of a shard are written and synced."""
    return (json.dumps({"synced": rows}) + "\n").encode()


def say_copied(shard: Path, rows: int) -> None:
    """Begin the receipts of a shard with the client's line that says how many rows are copied.

    The server counts them too, so that it knows when the file is full.
    """
    growing_receipts(shard).write_bytes((json.dumps({"copied": rows}) + "\n").encode())


def growing_receipts(shard: Path) -> Path:
    """Return the file to which receipts of a shard under construction are appended."""
    return shard.with_name(shard.name + GROWING_RECEIPTS_SUFFIX)


class ReceiptReader:
    """Reader of a growing receipts file, by path or by open descriptor.

    An incomplete line waits for the next call.
    """

    def __init__(self, file: Path | int) -> None:
        self._file, self._at, self._rest = file, 0, b""
        self._lines: deque[bytes] = deque()
        self.synced_rows = 0
        self.copied_rows = 0

    def new(self) -> list[Receipt]:
        """Return the receipts appended since the last call.

        `synced_rows` and `copied_rows` are updated.

        Raises:
            UserError: a line is not a line of this protocol.
        """
        data = self._read()
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._lines.extend(lines)
        found = []
        while self._lines:
            try:
                self._take(json.loads(self._lines[0]), found)
            except (ValueError, TypeError, RecursionError) as error:
                if found:
                    # The lines before the bad one count. The next call names the bad line, and the
                    # call after that continues behind it.
                    break
                line = self._lines.popleft()
                raise UserError(
                    f"receipts {self._file}: {line[:200]!r} is no receipt ({error}); was the disk"
                    " full?"
                ) from error
            self._lines.popleft()
        return found

    def _take(self, entry: object, found: list[Receipt]) -> None:
        if not isinstance(entry, dict):
            raise TypeError(f"expected an object, found {type(entry).__name__}")
        if "synced" in entry:
            self.synced_rows = _checked("synced", entry["synced"], int)
        elif "copied" in entry:
            self.copied_rows = _checked("copied", entry["copied"], int)
        else:
            found.append(Receipt(**entry).checked())

    def _read(self) -> bytes:
        # The offset is explicit: other threads append through the descriptor and move its position.
        if isinstance(self._file, int):
            return os.pread(self._file, max(0, os.fstat(self._file).st_size - self._at), self._at)
        try:
            with open(self._file, "rb") as file:
                file.seek(self._at)
                return file.read()
        except FileNotFoundError:
            return b""

"""What client and server say to each other about one captured sample.

The client tells the server where a sample's rows go by the request's id (`rid`); the server tells the client what it did by
one JSON line per finished sample in a file beside the destination. Neither needs a route of its own in SGLang.
"""

import dataclasses
import json
import os
from collections import deque
from pathlib import Path

from draftstates.errors import UserError

VERSION = "ds1"
ANSWER_KEY = "draftstates"  # in the answer's meta_info: proof that the plug-in saw the request
RECEIPTS_FORMAT, RECEIPTS_VERSION = "draftstates.receipts", 1  # of a shard's file, which extraction makes of the lines
TOP_TOKENS = 5  # most likely next tokens that are asked for with each sample, and held to its last state
RECEIPTS_SUFFIX = ".receipts.jsonl"
PLAIN, PROBE = "c", "p"  # a probe is compared with what forward pre-hooks see


@dataclasses.dataclass(frozen=True, kw_only=True)
class Destination:
    """Where the rows of one request go.

    Attributes:
        file: path of a laid-out shard, relative to the server's root.
        first_row: the sample's first row in that shard.
        rows: tokens of the sample, all of which must be captured.
        ids_hash: `ids.ids_hash` of the ids sent, so that a receipt is bound to them.
        attempt: distinguishes a retry from what came before.
        kind: `PLAIN` or `PROBE`.
    """

    file: str
    first_row: int
    rows: int
    ids_hash: str
    attempt: str
    kind: str = PLAIN

    @property
    def rid(self) -> str:
        return "|".join([VERSION, self.kind, self.file, str(self.first_row), str(self.rows), self.ids_hash, self.attempt])


def parse_rid(rid: str) -> Destination | None:
    """The destination that a request id names, or None where it is not one of ours."""
    parts = str(rid).split("|")
    if len(parts) != 7 or parts[0] != VERSION:
        return None
    _, kind, file, first_row, rows, ids_hash, attempt = parts
    try:
        return Destination(file=file, first_row=int(first_row), rows=int(rows), ids_hash=ids_hash, attempt=attempt, kind=kind)
    except ValueError:
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Receipt:
    """What the server says of one sample that reached its last row.

    Attributes:
        rows: rows written in this attempt; fewer than sent where a cache skipped some.
        chunks: prefill chunks that they came in.
        cached_tokens: tokens before the first row that was computed.
        ids_hash: hash of the ids that the model's forward pass really read for the rows written.
        checksum: as `shards.sample_checksum`, over the bytes that were handed to the file.
    """

    rid: str
    rows: int
    chunks: int
    cached_tokens: int
    ids_hash: str
    checksum: str
    error: str | None = None

    def line(self) -> bytes:
        return (json.dumps(dataclasses.asdict(self), separators=(",", ":")) + "\n").encode()


def synced_line(rows: int) -> bytes:
    """The server's word that all rows of a shard were written and the file's data is on the disk."""
    return (json.dumps({"synced": rows}) + "\n").encode()


def copied_line(rows: int) -> bytes:
    """The client's word, before its first request, that so many rows of the shard are in their place already."""
    return (json.dumps({"copied": rows}) + "\n").encode()


def receipts_path(shard: Path) -> Path:
    """Where the receipts for a shard under construction are appended."""
    return shard.with_name(shard.name + RECEIPTS_SUFFIX)


class ReceiptReader:
    """Follows a growing receipts file, by path or by open descriptor; a line that is not complete yet waits for the next look."""

    def __init__(self, file: Path | int) -> None:
        self._file, self._at, self._rest = file, 0, b""
        self._lines: deque[bytes] = deque()
        self.synced_rows = 0
        self.copied_rows = 0

    def new(self) -> list[Receipt]:
        """Receipts appended since the last call. `synced_rows` and `copied_rows` are updated on the way.

        Raises:
            UserError: a line is none of ours.
        """
        data = self._read()
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._lines.extend(lines)
        found = []
        while self._lines:
            try:
                entry = json.loads(self._lines[0])
                if "synced" in entry:
                    self.synced_rows = entry["synced"]
                elif "copied" in entry:
                    self.copied_rows = entry["copied"]
                else:
                    found.append(Receipt(**entry))
            except (ValueError, TypeError) as error:
                if found:
                    break  # what lies before it counts; it is named at the next look, and what lies behind it then comes after
                line = self._lines.popleft()
                raise UserError(f"receipts {self._file}: {line[:200]!r} is no receipt ({error}); was the disk full?") from error
            self._lines.popleft()
        return found

    def _read(self) -> bytes:
        if isinstance(self._file, int):  # not by its position: other threads append through the same descriptor, which moves it
            return os.pread(self._file, max(0, os.fstat(self._file).st_size - self._at), self._at)
        try:
            with open(self._file, "rb") as file:
                file.seek(self._at)
                return file.read()
        except FileNotFoundError:
            return b""

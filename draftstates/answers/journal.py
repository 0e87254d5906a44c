"""The journal of a chunk: each answer is a line of it on the disk before it counts as finished.

A line is the XXH3-64 of what follows, a blank, and JSON: the answer's key and what was sampled.

A job that is killed leaves its journal, and the next one goes on from there.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from draftstates import ids
from draftstates.answers.chat import Reply
from draftstates.errors import UserError
from draftstates.files import NO_LOCKS, sync
from draftstates.paths import BUILDING
from draftstates.tokens.answered import answered_prompts, read_answers

JOURNAL = "journal.jsonl"
# of an answer: id of the prompt, sample, turn, and hash of the ids that were sent
Key = tuple[str, int, int, str]


def _read(path: Path) -> tuple[dict[Key, Reply], int]:
    """Return the answers in a journal, and the bytes of its whole lines."""
    found: dict[Key, Reply] = {}
    whole = 0
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            # the job was killed in the middle of this line
            break
        try:
            check, said = line.split(b" ", 1)
            if check.decode() != xxhash.xxh3_64_hexdigest(said):
                raise ValueError("it has changed since it was written")
            name, sample, turn, sent, *reply = json.loads(said)
            found[name, sample, turn, sent] = Reply(*reply)
        except (ValueError, TypeError) as error:
            print(
                f"{path}: expected an answer on each line, found {line[:80]!r} ({error}): that one"
                " is answered again",
                file=sys.stderr,
            )
        whole += len(line)
    return found, whole


class Journal:
    """The journal of one chunk, open for appending.

    Attributes:
        answers: the answers that it had when it was opened.
    """

    def __init__(self, path: Path) -> None:
        """Open the journal, and cut off a line that a killed job left unfinished.

        On a file system without locks, no job holds the journal.

        Raises:
            UserError: another job holds the journal.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        # the file, its chunk's folder and `.building` may be new
        for folder in (path.parent, *path.parent.parents[:2]):
            sync(folder)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise UserError(
                f"{path}: another job writes these answers: wait until it ends"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(self._file)
                raise
        self.answers, self._size = _read(path)
        os.ftruncate(self._file, self._size)
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._writing = asyncio.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._file)

    async def add(self, key: Key, reply: Reply) -> None:
        """Write an answer; return when it is on the disk.

        Answers that come while others are written are written together, and fail together.
        """
        said = [reply.output_ids, reply.logprobs, reply.finish, reply.cached_tokens]
        line = json.dumps([*key, *said]).encode() + b"\n"
        line = f"{xxhash.xxh3_64_hexdigest(line)} ".encode() + line
        written = asyncio.get_running_loop().create_future()
        self._waiting.append((line, written))
        async with self._writing:
            if not written.done():
                batch, self._waiting = self._waiting, []
                try:
                    await asyncio.to_thread(self._write, b"".join(line for line, _ in batch))
                except BaseException as error:
                    for _, each in batch:
                        each.set_exception(error)
                else:
                    for _, each in batch:
                        each.set_result(None)
        await written

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._file, left) :]
            os.fsync(self._file)
        except OSError:
            # half a line would swallow the next one
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)


def remove_journals(folder: Path) -> None:
    """Remove the journals of the chunks whose answers are in their files.

    It is for a later step than the jobs that answer: Snakemake has accepted their files by then.

    Args:
        folder: folder of the answers' key.
    """
    building = folder / BUILDING
    for path in building.glob(f"*/{JOURNAL}"):
        if (folder / f"{path.parent.name}.parquet").exists():
            shutil.rmtree(path.parent, ignore_errors=True)
    # a chunk of other prompts may have left its journal there
    with contextlib.suppress(OSError):
        building.rmdir()


def earlier_answers(
    folder: Path, *, wanted: Iterable[str], planned: Iterable[str]
) -> dict[Key, Reply]:
    """Return the answers to prompts that chunks outside the present ones hold.

    Args:
        folder: folder of the answers' key.
        wanted: ids of the prompts.
        planned: ids of the present chunks, which have other prompts.
    """
    wanted, planned = frozenset(wanted), frozenset(planned)
    found: dict[Key, Reply] = {}
    for path in sorted((folder / BUILDING).glob(f"*/{JOURNAL}")):
        if path.parent.name not in planned:
            found |= {key: reply for key, reply in _read(path)[0].items() if key[0] in wanted}
    for path in sorted(folder.glob("*.parquet")):
        # where all chunks are new, each job looks into every earlier one
        if path.stem not in planned and not wanted.isdisjoint(answered_prompts(path)):
            found |= _in_chunk(path, wanted)
    return found


def _in_chunk(path: Path, wanted: frozenset[str]) -> dict[Key, Reply]:
    table = read_answers(path)[0]
    table = table.filter(pc.is_in(table["prompt_id"], pa.array(sorted(wanted), pa.string())))
    return {
        (row["prompt_id"], row["sample"], row["turn"], ids.ids_hash(row["prompt_ids"])): Reply(
            row["output_ids"], row["logprobs"], row["finish"], row["cached_tokens"]
        )
        for row in table.to_pylist()
    }

"""Writer threads: rows from host blocks to their files, checksums on the way, a receipt at a sample's last row.

All chunks of one sample go through the same thread, in order, so that its checksum needs no lock. That thread takes the checksum
while others write: else a long sample's last chunk, half a gigabyte, would wait for one thread after the GPU is done.
"""

import dataclasses
import queue
import threading
import traceback
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import torch
import xxhash

from draftstates import wire
from draftstates.capture.blocks import Block
from draftstates.capture.files import DestinationFile, Destinations
from draftstates.wire import Destination

_MOST_REMEMBERED = 4096  # samples that a thread remembers: unfinished, or finished and perhaps prefilled again
_PIECE_BYTES = 16 << 20  # what one thread writes at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Consecutive rows of one sample in a block.

    Attributes:
        start: position of the first of these rows in the sample.
        chunk_start: True where these rows begin a prefill chunk.
        hidden, final, ids: uint8 views into the block: `hidden_states`, `final_hidden_state` and int32 input ids of the rows.
        ready: waits until the copy into the block is complete.
    """

    destination: Destination
    file: DestinationFile
    start: int
    rows: int
    chunk_start: bool
    hidden: torch.Tensor
    final: torch.Tensor
    ids: torch.Tensor
    block: Block
    ready: torch.cuda.Event | None


class _Progress:
    """How far one sample has come in this attempt."""

    def __init__(self, start: int) -> None:
        self.cached_tokens = start
        self.next = start
        self.rows = 0
        self.chunks = 0
        self.error: str | None = None
        self.hidden, self.final, self.ids = xxhash.xxh3_64(), xxhash.xxh3_64(), xxhash.xxh3_64()

    def receipt(self, rid: str) -> wire.Receipt:
        return wire.Receipt(
            rid=rid,
            rows=self.rows,
            chunks=self.chunks,
            cached_tokens=self.cached_tokens,
            ids_hash=self.ids.hexdigest(),
            checksum=self.hidden.hexdigest() + self.final.hexdigest(),
            error=self.error,
        )


class Writers:
    """A fixed number of threads, each with a queue of its own, and as many to write; what is queued is bounded by its blocks."""

    def __init__(self, destinations: Destinations, *, threads: int) -> None:
        self._destinations = destinations
        self._queues: list[queue.SimpleQueue[Job]] = [queue.SimpleQueue() for _ in range(threads)]
        self._turn: OrderedDict[str, int] = OrderedDict()
        self._next = 0
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="draftstates-piece")
        for number, jobs in enumerate(self._queues):
            threading.Thread(target=self._run, args=(jobs,), name=f"draftstates-writer-{number}", daemon=True).start()

    def put(self, job: Job) -> None:
        """Queue a job; called by the scheduler's thread alone."""
        rid = job.destination.rid
        if rid not in self._turn:
            self._turn[rid] = self._next = (self._next + 1) % len(self._queues)
            while len(self._turn) > _MOST_REMEMBERED * len(self._queues):
                self._turn.popitem(last=False)
        self._queues[self._turn[rid]].put(job)

    def _run(self, jobs: "queue.SimpleQueue[Job]") -> None:
        samples: OrderedDict[str, _Progress] = OrderedDict()
        while True:
            job = jobs.get()
            try:
                self._write(job, samples)
            except Exception as error:  # the sample must fail by name, and the thread must live on for the others
                traceback.print_exc()
                progress = samples.setdefault(job.destination.rid, _Progress(job.start))
                progress.error = f"{type(error).__name__}: {error}"
                job.file.finish_sample(progress.receipt(job.destination.rid))
            finally:
                job.block.release()

    def _write(self, job: Job, samples: OrderedDict[str, _Progress]) -> None:
        if job.ready is not None:
            job.ready.synchronize()
        progress = _advance(job, samples)
        if progress is None:
            return
        hidden, final = memoryview(job.hidden.numpy()), memoryview(job.final.numpy())
        row = job.destination.first_row + job.start
        pieces = [*_pieces("hidden_states", row, hidden, job.rows), *_pieces("final_hidden_state", row, final, job.rows)]
        small = len(hidden) + len(final) <= _PIECE_BYTES  # not worth a thread's waking
        writes = []
        for piece in pieces:
            if small:
                job.file.write(*piece)
            else:
                writes.append(self._pool.submit(job.file.write, *piece))
        try:
            progress.hidden.update(hidden)
            progress.final.update(final)
            progress.ids.update(memoryview(job.ids.numpy()))
        finally:
            wait(writes)  # all of them, also where one fails: the block is used again afterwards
        for write in writes:
            write.result()
        progress.rows += job.rows
        progress.next += job.rows
        if progress.next < job.destination.rows:
            return
        if job.file.finish_sample(progress.receipt(job.destination.rid)):
            self._destinations.sync_later(job.file)


def _pieces(tensor: str, row: int, data: memoryview, rows: int) -> Iterator[tuple[str, int, memoryview]]:
    """`data`, `rows` rows from `row` on, as parts of whole rows."""
    width = len(data) // rows
    step = max(1, _PIECE_BYTES // width)
    for start in range(0, rows, step):
        yield tensor, row + start, data[start * width : (start + step) * width]


def _advance(job: Job, samples: OrderedDict[str, _Progress]) -> _Progress | None:
    """The sample's progress, begun anew where the request was retracted before its last row and starts over.

    None where its last row was written before: retracted while it decoded and prefilled again, its rows and receipt stand.
    """
    rid = job.destination.rid
    progress = samples.get(rid)
    if progress is not None and progress.next == job.destination.rows:
        return None
    if progress is None or (job.start == 0 and progress.next != 0):
        progress = samples[rid] = _Progress(job.start)
        while len(samples) > _MOST_REMEMBERED:
            samples.popitem(last=False)
    if job.start != progress.next:
        raise RuntimeError(f"rows {job.start}.. arrived where row {progress.next} was due")
    progress.chunks += job.chunk_start
    return progress

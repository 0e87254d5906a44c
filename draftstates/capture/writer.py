"""Writer threads: rows go from host blocks to their files, and samples get checksums and receipts.

All chunks of one sample go through the same thread, in order, so its checksum needs no lock. The
thread takes the checksum while a second thread writes: the client waits for a long sample's last
chunk, half a gigabyte, after the GPU is done. A third thread would not help, because the kernel
lets one thread at a time write to a file.
"""

import base64
import dataclasses
import queue
import threading
import traceback
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash

from draftstates.capture.blocks import Block
from draftstates.capture.files import DestinationFile, Destinations
from draftstates.extract import protocol
from draftstates.extract.protocol import Destination
from draftstates.shards.distance import distance
from draftstates.shards.layout import combined_checksum

# Samples that a thread remembers: unfinished, or finished and perhaps prefilled a second time.
_MOST_REMEMBERED = 4096
# Rows of fewer bytes are not worth the waking of a second thread.
_SMALL_BYTES = 16 << 20
# Largest distance of two rows that a receipt names.
_FAR = 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Consecutive rows of one sample in a block.

    Attributes:
        destination: the destination that the request's id names.
        file: the open file of the destination.
        start: position of the first of these rows in the sample; the sample's shared rows are
            not written, and in the block only if they are compared.
        rows: number of rows.
        chunk_start: True if these rows begin a prefill chunk.
        hidden: uint8 view into the block, the rows' `hidden_states`.
        final: uint8 view into the block, the rows' `final_hidden_state`; where that is not
            captured, the final state of the last of these rows alone.
        ids: uint8 view into the block, the rows' int32 `input_ids`.
        block: the block that these views hold.
        ready: the event at which the copy into the block is complete; None on a CPU.
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


class _SampleProgress:
    """Progress of one sample in this attempt."""

    def __init__(self, start: int) -> None:
        self.cached_tokens = start
        self.next = start
        self.rows = 0
        self.chunks = 0
        self.again_rows, self.again_distance = 0, 0.0
        self.error: str | None = None
        # by tensor of the file
        self.states: dict[str, xxhash.xxh3_128] = {}
        self.ids = xxhash.xxh3_64()
        self.last_state: str | None = None

    def receipt(self, rid: str) -> protocol.Receipt:
        return protocol.Receipt(
            rid=rid,
            rows=self.rows,
            chunks=self.chunks,
            cached_tokens=self.cached_tokens,
            ids_hash=self.ids.hexdigest(),
            checksum=combined_checksum(*self.states.values()),
            last_state=self.last_state,
            again_rows=self.again_rows,
            again_distance=self.again_distance,
            error=self.error,
        )


class Writers:
    """Writer threads, fixed in number, each with a queue and a second thread that writes.

    The blocks bound what is queued.
    """

    def __init__(self, destinations: Destinations, *, threads: int) -> None:
        self._destinations = destinations
        self._queues: list[queue.SimpleQueue[Job]] = [queue.SimpleQueue() for _ in range(threads)]
        self._turn: OrderedDict[str, int] = OrderedDict()
        self._next = 0
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="draftstates-write")
        for number, jobs in enumerate(self._queues):
            threading.Thread(
                target=self._run, args=(jobs,), name=f"draftstates-writer-{number}", daemon=True
            ).start()

    def put(self, job: Job) -> None:
        """Queue a job; the scheduler's thread alone calls this."""
        rid = job.destination.rid
        if rid not in self._turn:
            self._turn[rid] = self._next = (self._next + 1) % len(self._queues)
            while len(self._turn) > _MOST_REMEMBERED * len(self._queues):
                self._turn.popitem(last=False)
        self._queues[self._turn[rid]].put(job)

    def _run(self, jobs: "queue.SimpleQueue[Job]") -> None:
        samples: OrderedDict[str, _SampleProgress] = OrderedDict()
        while True:
            job = jobs.get()
            try:
                self._write(job, samples)
            except Exception as error:
                self._fail(job, samples, error)
            finally:
                job.block.release()

    def _fail(self, job: Job, samples: OrderedDict[str, _SampleProgress], error: Exception) -> None:
        """Fail the job's sample by its sample id; the thread lives on for the other samples."""
        traceback.print_exc()
        progress = samples.setdefault(job.destination.rid, _SampleProgress(job.start))
        progress.error = f"{type(error).__name__}: {error}"
        try:
            job.file.finish_sample(progress.receipt(job.destination.rid))
        # The disk has no room for the receipt either: the client misses it.
        except Exception:
            traceback.print_exc()

    def _write(self, job: Job, samples: OrderedDict[str, _SampleProgress]) -> None:
        if job.ready is not None:
            job.ready.synchronize()
        progress = _advance(job, samples)
        if progress is None:
            return
        given = {"hidden_states": job.hidden, "final_hidden_state": job.final}
        captured = {name: given[name] for name in job.file.states}
        if job.destination.kind == protocol.COMPARING and _shared(job):
            _compare(job, captured, progress)
        rows = {name: _own(job, states) for name, states in captured.items()}
        if sum(map(len, rows.values())) <= _SMALL_BYTES:
            _put(job, rows)
            _sum(progress, job, rows)
        else:
            writing = self._pool.submit(_put, job, rows)
            try:
                _sum(progress, job, rows)
            finally:
                # Also where the checksum failed: another job uses the block afterwards.
                writing.result()
        progress.rows += job.rows - _shared(job)
        progress.next += job.rows
        if progress.next < job.destination.rows:
            return
        if "final_hidden_state" not in rows:
            progress.last_state = base64.b64encode(job.final.numpy().tobytes()).decode()
        if job.file.finish_sample(progress.receipt(job.destination.rid)):
            self._destinations.sync_later(job.file)


def _shared(job: Job) -> int:
    """Return how many of a job's rows are shared."""
    return min(max(job.destination.shared - job.start, 0), job.rows)


def _own(job: Job, rows: torch.Tensor) -> memoryview:
    """Return the bytes of a job's rows without the shared ones."""
    return memoryview(rows[_shared(job) * (len(rows) // job.rows) :].numpy())


def _compare(job: Job, states: Mapping[str, torch.Tensor], progress: _SampleProgress) -> None:
    """Hold shared rows that were computed again against those that the file has."""
    rows = _shared(job)
    stored = job.file.shared_rows(job.destination.first_row, job.start, rows)
    for name, others in stored.items():
        again = states[name][: rows * (len(states[name]) // job.rows)]
        found = distance(again.view(others.dtype).reshape(others.shape), others)
        # what is not a number is as far as can be
        largest = found.nan_to_num(_FAR, _FAR).clamp(max=_FAR).max().item()
        progress.again_distance = max(progress.again_distance, largest)
    progress.again_rows += rows


def _put(job: Job, rows: Mapping[str, memoryview]) -> None:
    first = job.destination.first_row + max(job.start - job.destination.shared, 0)
    for name, data in rows.items():
        if len(data):
            job.file.write(name, first, data)


def _sum(progress: _SampleProgress, job: Job, rows: Mapping[str, memoryview]) -> None:
    for name, data in rows.items():
        progress.states.setdefault(name, xxhash.xxh3_128()).update(data)
    progress.ids.update(memoryview(job.ids.numpy()))


def _advance(job: Job, samples: OrderedDict[str, _SampleProgress]) -> _SampleProgress | None:
    """Return the sample's progress.

    The progress starts from zero if the request was retracted before its last row and starts over.
    It is None if the last row is written already: SGLang retracted the request while it decoded and
    prefills it a second time; rows and receipt stand.
    """
    rid = job.destination.rid
    progress = samples.get(rid)
    if progress is not None and progress.next == job.destination.rows:
        return None
    if progress is None or (job.start == 0 and progress.next != 0):
        progress = samples[rid] = _SampleProgress(job.start)
        while len(samples) > _MOST_REMEMBERED:
            samples.popitem(last=False)
    if job.start != progress.next:
        raise RuntimeError(f"expected rows from {progress.next} on, found rows from {job.start} on")
    progress.chunks += job.chunk_start
    return progress

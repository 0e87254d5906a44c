"""A laid-out shard and the writers that fill it, without a server."""

import dataclasses
import time
from pathlib import Path

import numpy as np
import torch
from synthetic import capture_spec

from draftstates import ids
from draftstates.capture.blocks import BlockPool
from draftstates.capture.files import Destinations
from draftstates.capture.settings import CaptureSettings
from draftstates.capture.writer import Job, Writers
from draftstates.extract import protocol
from draftstates.paths import BUILDING
from draftstates.plan.prefixes import Segments, shard_id
from draftstates.shards import layout

SPEC = capture_spec(
    layers=(1, 3), num_layers=4, hidden_size=8, final_norm="post_norm", stored_dtype="float32"
)
IDS = np.arange(12, dtype=np.int32)


class Bench:
    """A laid-out shard of samples of 5 and 7 tokens, and writer threads to fill it."""

    def __init__(self, root: Path, segments: Segments | None = None, **changes: object) -> None:
        self.root = root
        self.name = f"{BUILDING}/shard.safetensors"
        self.path = root / self.name
        self.path.parent.mkdir(exist_ok=True)
        if not self.path.exists():
            layout.create(
                self.path,
                spec=SPEC,
                shard_id=shard_id(["a", "b"], segments) if segments else "s",
                sample_ids=["a", "b"],
                lengths=[5, 7],
                input_ids=IDS,
                loss_mask=np.ones(12),
                segments=segments,
            )
        self.destinations = Destinations(
            CaptureSettings(root=root, spec=dataclasses.replace(SPEC, **changes))
        )
        self.writers = Writers(self.destinations, threads=2)
        self.pool = BlockPool(total_bytes=1 << 20, block_bytes=1 << 16, pinned=False)
        self.rows = torch.randn(12, 3, 8)

    def destination(
        self,
        first: int,
        rows: int,
        attempt: str = "1",
        *,
        shared: int = 0,
        kind: str = protocol.PLAIN,
    ) -> protocol.Destination:
        """Return the destination of a sample whose first rows, `shared` many, are not written."""
        sent = ids.ids_hash(IDS[first - shared : first - shared + rows])
        return protocol.Destination(
            file=self.name,
            first_row=first,
            rows=rows,
            shared=shared,
            ids_hash=sent,
            attempt=attempt,
            kind=kind,
        )

    def put(
        self, destination: protocol.Destination, start: int, rows: int, *, shift: float = 0.0
    ) -> None:
        block = self.pool.take(users=1)
        at = destination.first_row - destination.shared + start
        states = self.rows[at : at + rows] + shift
        self.writers.put(
            Job(
                destination=destination,
                file=self.destinations.open(destination.file),
                start=start,
                rows=rows,
                chunk_start=True,
                hidden=states[:, :2].contiguous().view(torch.uint8).flatten(),
                final=states[:, 2].contiguous().view(torch.uint8).flatten(),
                ids=torch.from_numpy(IDS[at : at + rows].copy()).view(torch.uint8),
                block=block,
                ready=None,
            )
        )

    def receipts(
        self, count: int, *, patience: float = 10.0
    ) -> tuple[list[protocol.Receipt], protocol.ReceiptReader]:
        reader, found = protocol.ReceiptReader(protocol.growing_receipts(self.path)), []
        deadline = time.monotonic() + patience
        while len(found) < count and time.monotonic() < deadline:
            found += reader.new()
            time.sleep(0.01)
        time.sleep(0.1)
        return found + reader.new(), reader

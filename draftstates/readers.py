"""One way to read a sample, whatever kind of shard holds it."""

import mmap
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from draftstates.capture_spec import torch_dtype
from draftstates.shards import Shard
from draftstates.storage import CompactShard


class ShardReader(Protocol):
    """What a kind of shard must offer."""

    path: Path
    metadata: dict[str, str]

    def length(self, index: int) -> int: ...

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]: ...

    def states(self, index: int) -> tuple[torch.Tensor, torch.Tensor]: ...

    def checksum(self, index: int) -> str: ...


class MappedShard:
    """A shard as captured. States are private maps: nothing is read until it is touched, and writing to them reaches nothing else."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._shard = Shard(self.path)
        self.metadata = self._shard.header.metadata

    def length(self, index: int) -> int:
        """Tokens of sample `index`."""
        first, end = self._shard.rows(index)
        return end - first

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """`input_ids` int32 [n] and `loss_mask` uint8 [n] of sample `index`."""
        first, end = self._shard.rows(index)
        return self._shard.input_ids[first:end].copy(), self._shard.loss_mask[first:end].copy()

    def states(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Layers [n, K, H] and final state [n, H] of sample `index`."""
        first, end = self._shard.rows(index)
        return self._map("hidden_states", first, end), self._map("final_hidden_state", first, end)

    def checksum(self, index: int) -> str:
        return self._shard.checksum(index)

    def _map(self, name: str, first: int, end: int) -> torch.Tensor:
        _, shape, begin, _ = self._shard.header.tensors[name]
        width = self._shard.header.states()[name][1]
        start, stop = begin + first * width, begin + end * width
        page = start - start % mmap.ALLOCATIONGRANULARITY
        with open(self.path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), stop - page, access=mmap.ACCESS_COPY, offset=page)
        return torch.frombuffer(mapped, dtype=torch_dtype(self._shard.stored_dtype), offset=start - page).reshape(end - first, *shape[1:])


def open_shard(path: Path, *, compact: bool) -> ShardReader:
    """Open a shard as captured, or a compact one.

    Raises:
        UserError: the file is none of that kind, or not whole.
    """
    return CompactShard(path) if compact else MappedShard(path)

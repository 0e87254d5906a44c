"""A fixed number of host memory blocks that rows pass through: memory is bounded, and a slow disk slows the scheduler."""

import queue
import threading

import torch


class Block:
    """One block of host memory; it returns to its pool when the last of its users has let go."""

    def __init__(self, pool: "BlockPool", memory: torch.Tensor) -> None:
        self.memory = memory  # uint8 [block_bytes], pinned where there is a GPU
        self._pool = pool
        self._users = 0
        self._lock = threading.Lock()

    def hold(self, users: int) -> None:
        self._users = users

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            done = self._users == 0
        if done:
            self._pool.give_back(self)


class BlockPool:
    """Blocks are made on first need, up to `total_bytes`; after that `take` waits for one to come back."""

    def __init__(self, *, total_bytes: int, block_bytes: int, pinned: bool) -> None:
        self.block_bytes = block_bytes
        self._pinned = pinned
        self._left = max(2, total_bytes // block_bytes)
        self._free: queue.SimpleQueue[Block] = queue.SimpleQueue()

    def take(self) -> Block:
        """A block that nobody else uses. Called by the scheduler's thread alone."""
        if self._free.empty() and self._left:
            self._left -= 1
            return Block(self, torch.empty(self.block_bytes, dtype=torch.uint8, pin_memory=self._pinned))
        return self._free.get()

    def give_back(self, block: Block) -> None:
        self._free.put(block)

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
    """`total_bytes` of blocks, all made at once: pinning memory takes time, and the scheduler must not wait for it during a run.

    The block that came back last is taken first, so that ordinary memory, which is real only once it is written to, stays little.
    """

    def __init__(self, *, total_bytes: int, block_bytes: int, pinned: bool) -> None:
        self.block_bytes = block_bytes
        self._free: queue.LifoQueue[Block] = queue.LifoQueue()
        for _ in range(max(2, total_bytes // block_bytes)):
            self.give_back(Block(self, torch.empty(block_bytes, dtype=torch.uint8, pin_memory=pinned)))

    @property
    def free(self) -> int:
        """How many blocks nobody uses at the moment."""
        return self._free.qsize()

    def take(self) -> Block:
        """A block that nobody else uses; waits until there is one."""
        return self._free.get()

    def give_back(self, block: Block) -> None:
        self._free.put(block)

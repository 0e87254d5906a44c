"""Host memory blocks, fixed in number, through which rows pass.

They bound the memory, and let a slow disk slow the scheduler.
"""

import queue
import threading

import torch


class Block:
    """One block of host memory; it returns to its pool when its last user releases it."""

    def __init__(self, pool: "BlockPool", memory: torch.Tensor) -> None:
        # uint8 [block_bytes]; pinned on a machine with a GPU.
        self.memory = memory
        self._pool = pool
        self.users = 0
        self._lock = threading.Lock()

    def release(self) -> None:
        """Release the block for one user."""
        with self._lock:
            self.users -= 1
            done = self.users == 0
        if done:
            self._pool.give_back(self)


class BlockPool:
    """Pool of `total_bytes` of blocks, all made at once.

    Pinning memory takes time, and the scheduler must not wait for it. The most recently returned
    block is taken first: the kernel backs ordinary memory with pages when it is first written, so
    few pages are in use.
    """

    def __init__(self, *, total_bytes: int, block_bytes: int, pinned: bool) -> None:
        self.block_bytes = block_bytes
        self._free: queue.LifoQueue[Block] = queue.LifoQueue()
        for _ in range(max(2, total_bytes // block_bytes)):
            self.give_back(
                Block(self, torch.empty(block_bytes, dtype=torch.uint8, pin_memory=pinned))
            )

    @property
    def free(self) -> int:
        """Return how many blocks have no user at the moment."""
        return self._free.qsize()

    def take(self, users: int) -> Block:
        """Take a block that has no user, for this many; wait until one is free."""
        block = self._free.get()
        block.users = users
        return block

    def give_back(self, block: Block) -> None:
        """Put a block without users back."""
        self._free.put(block)

"""Batch samplers over sample lengths, deterministic in (seed, epoch) and dealt out to data-parallel ranks, and the batch that they make."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Sampler

from draftstates.errors import UserError


class _BatchSampler(Sampler[list[int]]):
    """Batches of an epoch, shuffled, every `world_size`-th one for this rank.

    All ranks get equally many batches; where they do not divide, up to world_size - 1 of them rest for this epoch (other ones in the next).
    """

    def __init__(self, lengths: Sequence[int], *, seed: int, rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise UserError(f"rank must lie in 0..{world_size - 1}, found {rank}")
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.seed, self.epoch = seed, 0
        self.rank, self.world_size = rank, world_size
        self._made: tuple[int, list[list[int]]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Another epoch, another order; the same on every rank."""
        self.epoch = epoch

    def _batches(self, rng: np.random.Generator) -> list[list[int]]:
        raise NotImplementedError

    def _mine(self) -> list[list[int]]:
        if self._made is None or self._made[0] != self.epoch:
            rng = np.random.default_rng([self.seed, self.epoch])
            batches = self._batches(rng)
            batches = [batches[i] for i in rng.permutation(len(batches))]
            even = len(batches) - len(batches) % self.world_size
            self._made = (self.epoch, batches[self.rank : even : self.world_size])
        return self._made[1]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._mine())

    def __len__(self) -> int:
        return len(self._mine())


class LengthBucketedBatchSampler(_BatchSampler):
    """Batches of `batch_size` samples of similar length: shuffle, sort inside buckets of `bucket_batches` batches, cut, shuffle again.

    Args:
        lengths: tokens of every sample.
        batch_size: samples a batch; the last one of an epoch may have fewer.
        bucket_batches: batches a bucket: more means less padding and less randomness.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        batch_size: int,
        bucket_batches: int = 50,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < 1 or bucket_batches < 1:
            raise UserError(f"batch_size and bucket_batches must be at least 1, found {batch_size} and {bucket_batches}")
        super().__init__(lengths, seed=seed, rank=rank, world_size=world_size)
        self.batch_size, self.bucket = batch_size, batch_size * bucket_batches

    def _batches(self, rng: np.random.Generator) -> list[list[int]]:
        order = rng.permutation(len(self.lengths))
        batches = []
        for start in range(0, len(order), self.bucket):
            bucket = order[start : start + self.bucket]
            bucket = bucket[np.argsort(self.lengths[bucket], kind="stable")]
            batches += [bucket[i : i + self.batch_size].tolist() for i in range(0, len(bucket), self.batch_size)]
        return batches


class TokenBudgetBatchSampler(_BatchSampler):
    """Batches of at most `max_tokens` tokens, counted as they will lie in memory.

    Args:
        lengths: tokens of every sample.
        max_tokens: a batch's budget.
        padded: True counts samples x the longest (a padded batch), and sorts by length inside buckets; False counts the sum (packed).
        bucket: samples that are sorted together where `padded`.

    Raises:
        UserError: a sample longer than the budget. It is not cut and not dropped.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        max_tokens: int,
        padded: bool = True,
        bucket: int = 2048,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(lengths, seed=seed, rank=rank, world_size=world_size)
        if len(self.lengths) and self.lengths.max() > max_tokens:
            worst = int(self.lengths.argmax())
            raise UserError(f"sample {worst} has {self.lengths[worst]} tokens, more than the budget of {max_tokens} a batch")
        self.max_tokens, self.padded, self.bucket = max_tokens, padded, bucket

    def _batches(self, rng: np.random.Generator) -> list[list[int]]:
        order = rng.permutation(len(self.lengths))
        if self.padded:
            buckets = [order[i : i + self.bucket] for i in range(0, len(order), self.bucket)]
            order = np.concatenate([b[np.argsort(self.lengths[b], kind="stable")] for b in buckets]) if buckets else order
        batches: list[list[int]] = []
        batch: list[int] = []
        longest = total = 0
        for i in order.tolist():
            length = int(self.lengths[i])
            longest, total = max(longest, length), total + length
            if (longest * (len(batch) + 1) if self.padded else total) > self.max_tokens:
                batches.append(batch)
                batch, longest, total = [], length, length
            batch.append(i)
        return [*batches, batch] if batch else batches


def pad_batch(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate samples of one naming whose tensors all have their tokens in the first dimension.

    Returns:
        each tensor [B, longest, ...], zeros behind a shorter sample, and `lengths` int64 [B], which says where they begin.
    """
    lengths = [len(sample["input_ids"]) for sample in samples]
    batch = {"lengths": torch.tensor(lengths)}
    for name, first in samples[0].items():
        out = first.new_zeros((len(samples), max(lengths), *first.shape[1:]))
        for row, sample in enumerate(samples):
            out[row, : lengths[row]] = sample[name]
        batch[name] = out
    return batch

"""A planned shard's tokens, as the plan wrote them: held to the names that were made of them whenever they are read."""

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from draftstates import ids
from draftstates.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardTokens:
    """A shard's samples as tokens: names, lengths, and all ids (int32 [T]) and mask values (uint8 [T]) one after the other."""

    shard_id: str
    sample_ids: list[str]
    lengths: list[int]
    input_ids: np.ndarray
    loss_mask: np.ndarray


def read_tokens(path: Path, *, shard_id: str) -> ShardTokens:
    """Read a planned shard's tokens.

    Raises:
        UserError: the file is missing, unreadable, or not that shard's.
    """
    again = "delete it and plan again: snakemake --forcerun plan"
    try:
        table = pq.read_table(path, columns=["sample_id", "input_ids", "loss_mask"])
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: tokens of shard {shard_id} cannot be read ({error}); {again}") from error
    names = table["sample_id"].to_pylist()
    if ids.shard_id(names) != shard_id:
        raise UserError(f"{path}: expected the tokens of shard {shard_id}, found those of {ids.shard_id(names)}; {again}")
    for name, sample, mask in zip(names, table["input_ids"], table["loss_mask"], strict=True):
        found = ids.sample_id(sample.values.to_numpy(), mask.values.to_numpy())
        if found != name:
            raise UserError(f"{path}: the tokens of sample {name} are those of {found}: the file is damaged; {again}")
    column = table["input_ids"].combine_chunks()
    lengths = np.diff(column.offsets.to_numpy()).tolist()
    return ShardTokens(
        shard_id=shard_id,
        sample_ids=names,
        lengths=lengths,
        input_ids=column.flatten().to_numpy().astype(np.int32),
        loss_mask=table["loss_mask"].combine_chunks().flatten().to_numpy().astype(np.uint8),
    )

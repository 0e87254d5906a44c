"""The distance of rows from the same rows, captured a second time.

Two rows are compared by the larger of two relative distances: that of their norms, and that of
their median elements. The residual stream has a few huge components that alone make up its norm;
the median sees all the others, where rows and layers differ.
"""

import torch

# Rows that are compared at once.
_CHUNK = 1024


def distance(again: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the relative distance of rows [n, …, H] from others, float32 [n, …].

    It is the larger one of two distances: of norms, and of median elements.
    """
    parts = zip(again.split(_CHUNK), rows.split(_CHUNK), strict=True)
    return torch.cat([_distance(one.float(), other.float()) for one, other in parts])


def _distance(again: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    difference = again - rows
    norms = _ratio(difference.norm(dim=-1), again.norm(dim=-1))
    medians = _ratio(difference.abs().median(dim=-1).values, again.abs().median(dim=-1).values)
    return torch.maximum(norms, medians)


def _ratio(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    # Equal rows have distance 0, even if they are mostly zero.
    return torch.where(part == 0, part, part / whole)

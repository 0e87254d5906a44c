"""The context length of the server, which no sample may reach.

The server refuses a request that is as long as its context, so a longer sample would fail at
capture, after the model is loaded.
"""

from collections.abc import Collection

import numpy as np

from draftstates.errors import UserError
from draftstates.model.context import CONTEXT_FLAG
from draftstates.tokens.files import SourceIndex


def check_lengths(
    index: SourceIndex, context: int | None, *, exclude: Collection[str] = ()
) -> None:
    """Refuse samples that the server would refuse.

    Args:
        index: a source's samples.
        context: the server's context length; None for no limit.
        exclude: ids of samples that are left out.

    Raises:
        UserError: names the first sample and its row, and says what to do.
    """
    if context is None:
        return
    excluded = np.array(sorted(exclude), dtype="S32")
    long = np.flatnonzero((index.lengths >= context) & ~np.isin(index.names, excluded))
    if not len(long):
        return
    first = long[0]
    raise UserError(
        f"source {index.source}: sample {index.names[first].decode()} of row {index.rows[first]}:"
        f" expected fewer tokens than the server's context of {context:,}, found"
        f" {index.lengths[first]:,} (so do {len(long) - 1:,} more samples): set data.max_tokens to"
        f" {context - 1} or less (over_long says whether they are skipped or cut), or, where the"
        f" model can take more, server.args: [{CONTEXT_FLAG}, <tokens>]"
    )

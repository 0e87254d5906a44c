"""Agreement of a drafter's tokens with the target model's own, by draft step."""

from collections.abc import Sequence

import torch


def count_agreement(
    drafted: Sequence[torch.Tensor], own: torch.Tensor, supervised: torch.Tensor
) -> tuple[list[int], list[int]]:
    """Count how many tokens of each draft step are the target model's own, and of how many.

    A draft starts at every supervised position j. Its token of step t is compared with the target
    model's token at j + t, where that position is supervised too.

    Args:
        drafted: for each step, the token of the draft that starts at j, int64 [n].
        own: the target model's most likely token after the conversation up to j, int64 [n].
        supervised: whether that token is supervised, bool [n].

    Returns:
        agreeing tokens of each step, and all tokens of each step.
    """
    agreed, total = [], []
    for step, tokens in enumerate(drafted):
        starts = supervised[: len(supervised) - step] & supervised[step:]
        agreed.append(int((tokens[: len(starts)] == own[step:])[starts].sum()))
        total.append(int(starts.sum()))
    return agreed, total

"""Agreement of a drafter's tokens with the model's own, by draft step."""

from collections.abc import Sequence

import torch


def count_agreement(drafted: Sequence[torch.Tensor], own: torch.Tensor, targets: torch.Tensor) -> tuple[list[int], list[int]]:
    """How many tokens of each draft step are the model's own, and of how many.

    A draft starts at every position j that is a target. Its token of step t is held against the model's at j + t, if that is one too.

    Args:
        drafted: of each step, the token that the draft started at j gives, int64 [n].
        own: the model's most likely token, given the conversation up to it, int64 [n].
        targets: whether that token is one to learn, bool [n].

    Returns:
        Agreeing tokens and all tokens of each step.
    """
    agreed, total = [], []
    for step, tokens in enumerate(drafted):
        starts = targets[: len(targets) - step] & targets[step:]
        agreed.append(int((tokens[: len(starts)] == own[step:])[starts].sum()))
        total.append(int(starts.sum()))
    return agreed, total

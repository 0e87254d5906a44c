"""Lengths of the self-test's prompts."""

from collections.abc import Mapping
from typing import Any

_SHORT = (10, 64, 300)
# Above so many rows SGLang sums over tensor parallel ranks in another way.
_OTHER_SUM = 2048
_BEYOND = 100
# A CPU sums in one way. There a prompt crosses a chunk only where that takes seconds.
_MOST_ON_A_CPU = 1024


def prompt_lengths(info: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens of each prompt: one crosses a chunk of prefill and is summed in two ways.

    Args:
        info: what the server says of itself.
        text: the language model's part of `config.json`.
    """
    chunk = info.get("chunked_prefill_size") or 0
    cpu = info.get("device") == "cpu"
    if cpu and chunk > _MOST_ON_A_CPU:
        return _SHORT
    longest = (max(chunk, 0) if cpu else max(chunk, _OTHER_SUM)) + _BEYOND
    # One token is generated after the prompt.
    room = [info.get("max_total_num_tokens"), info.get("context_length")]
    room.append(text.get("max_position_embeddings"))
    longest = min([longest, *(each - 1 for each in room if isinstance(each, int) and each > 0)])
    return (*_SHORT, longest) if longest > _SHORT[-1] else _SHORT

"""What a row says of an answer beside its text: whether it is learnt, and how it ended."""

from typing import Any

from draftstates.tokens.rows import RowSkipped, shown

FINISH_KEYS = ("finish_reason", "stop_reason", "finishReason")
FLAGS = ("train", "trainable", "supervised", "loss", "weight", "loss_weight", "loss_mask")
# reasons for which an answer ends without an end token of the model
_CUT = frozenset(
    (
        "length",
        "max_tokens",
        "max_output_tokens",
        "max_new_tokens",
        "max_length",
        "model_length",
        "incomplete",
        "content_filter",
        "safety",
        "recitation",
        "refusal",
        "stop_sequence",
        "pause_turn",
        "abort",
        "aborted",
        "cancelled",
        "error",
        "timeout",
        "model_context_window_exceeded",
    )
)
_ENDED = frozenset(
    (
        "stop",
        "end_turn",
        "tool_calls",
        "tool_use",
        "function_call",
        "eos",
        "eos_token",
        "complete",
        "completed",
        "finished",
        "done",
    )
)


def is_excluded(item: dict[str, Any], *, answer: bool, where: str, not_used: set[str]) -> bool:
    """Return whether a message's own keys exclude it from what is learnt.

    Args:
        item: the message.
        answer: whether it is an assistant's.
        where: the message, for messages.
        not_used: names of values that say something else are added.

    Raises:
        RowSkipped: `bad_message`: a value is neither true nor false, nor a number.
    """
    excluded = False
    for key in FLAGS:
        value = item.get(key)
        if value is None:
            continue
        if not isinstance(value, (bool, int, float)):
            raise RowSkipped(
                "bad_message", f"{where}: {key}: expected true or false, found {shown(value)}"
            )
        if not answer:
            if value:
                not_used.add(f"messages[].{key} of a message that is not an answer")
        elif not value:
            excluded = True
        elif value != 1:
            not_used.add(f"messages[].{key} other than 0 and 1")
    return excluded


def was_cut(reason: object) -> bool | None:
    """Return whether a finish reason says that the model gave no end; None for an unknown one."""
    if isinstance(reason, int):
        # vLLM names the stop token that the model gave
        return False
    known = reason.lower() if isinstance(reason, str) else None
    if known in _CUT:
        return True
    return False if known in _ENDED else None

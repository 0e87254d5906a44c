"""What a row says of an answer beside its text: whether it is learnt, and how it ended."""

import math
from collections.abc import Iterator
from typing import Any

from draftstates.tokens.rows import RowSkipped, shown

FINISH_KEYS = (
    "finish_reason",
    "stop_reason",
    "finishReason",
    "done_reason",
    "native_finish_reason",
    "finish_details",
)
# what may hold these keys in an object of its own
HOLDERS = ("meta_info", "metadata", "response_metadata", "generation_info")
# keys that say how an answer ended in another way
ENDING_KEYS = frozenset((*FINISH_KEYS, "truncated", "is_complete", "incomplete_details"))
FLAGS = (
    "train",
    "trainable",
    "training",
    "train_on_turn",
    "learn",
    "supervised",
    "loss",
    "weight",
    "loss_weight",
    "loss_mask",
)
_FAILED = frozenset(("failed", "failure", "error", "cancelled", "canceled"))
# reasons for which an answer ends without an end token of the model
_CUT = frozenset(
    (
        "length",
        "max_tokens",
        "token_limit",
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
    if answer and item.get("mask") is not None:
        raise RowSkipped(
            "bad_message",
            f"{where}: mask: some data sets mask what is learnt, some what is not; say train: true"
            " or false instead",
        )
    excluded = answer and has_failed(item.get("status"))
    for key in FLAGS:
        value = item.get(key)
        if value is None:
            continue
        if not isinstance(value, (bool, int, float)):
            raise RowSkipped(
                "bad_message", f"{where}: {key}: expected true or false, found {shown(value)}"
            )
        if not is_weight(value):
            raise RowSkipped(
                "bad_message", f"{where}: {key}: expected a number from 0, found {value}"
            )
        if not answer:
            if value:
                not_used.add(f"messages[].{key} of a message that is not an answer")
        elif not value:
            excluded = True
        elif value != 1:
            not_used.add(f"messages[].{key} other than 0 and 1")
    return excluded


def is_weight(value: float) -> bool:
    """Return whether a number can be the weight of what is learnt."""
    return math.isfinite(value) and value >= 0


def has_failed(status: object) -> bool:
    """Return whether a status says that there is no answer to learn."""
    return isinstance(status, str) and status.lower() in _FAILED


def endings(item: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield what a message or row says of how its answer ended: key and reason."""
    for key in FINISH_KEYS:
        if item.get(key):
            yield key, item[key]
    for holder in HOLDERS:
        if isinstance(inside := item.get(holder), dict):
            for key in FINISH_KEYS:
                if inside.get(key):
                    yield f"{holder}.{key}", inside[key]
    status = item.get("status")
    if isinstance(status, str) and status.lower() == "incomplete":
        yield "status", "incomplete"
    if item.get("incomplete_details"):
        yield "incomplete_details", "incomplete"
    if item.get("truncated") is True:
        yield "truncated", "length"
    if item.get("is_complete") is False:
        yield "is_complete", "length"


def was_cut(reason: object) -> bool | None:
    """Return whether a finish reason says that the model gave no end; None for an unknown one."""
    if isinstance(reason, dict):
        # SGLang's own
        reason = reason.get("type")
    if isinstance(reason, int):
        # vLLM names the stop token that the model gave
        return False
    known = reason.lower() if isinstance(reason, str) else None
    if known in _CUT:
        return True
    return False if known in _ENDED else None

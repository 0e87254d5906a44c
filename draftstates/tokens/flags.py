"""What a row and its messages say of an answer beside its text: is it learnt, how did it end."""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from draftstates.tokens.rows import RowSkipped, shown
from draftstates.tokens.tools import from_json, is_empty

if TYPE_CHECKING:
    from draftstates.tokens.messages import MessageReader

FINISH_KEYS = (
    "finish_reason",
    "stop_reason",
    "finishReason",
    "done_reason",
    "native_finish_reason",
    "finish_details",
    "generation_finish_reason",
)
# what may hold these keys in an object of its own, or in its JSON text
HOLDERS = (
    "meta_info",
    "metadata",
    "response_metadata",
    "generation_info",
    "additional_kwargs",
)
# keys that say how an answer ended in another way: true where it was cut, or where it was not
_TRUNCATED = (
    *("truncated", "is_truncated", "was_truncated"),
    # beginnings that the request has the model continue
    *("prefix", "partial", "continue_final_message"),
)
_COMPLETE = ("is_complete", "is_finished", "finished")
# the token or text that stopped the answer, where there is a finish reason too
_MATCHED = ("stop_reason", "matched_stop")
ENDING_KEYS = frozenset((*FINISH_KEYS, *_MATCHED, *_TRUNCATED, *_COMPLETE, "incomplete_details"))
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
_TRUTHS = {
    **dict.fromkeys(("true", "yes", "1", "1.0"), True),
    **dict.fromkeys(("false", "no", "0", "0.0"), False),
}
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
_EXCLUDING = ("train", "trainable", "train_on_turn", "learn", "weight")
# a row without these says nothing, as most rows
_SAYING = ENDING_KEYS.union(_EXCLUDING, HOLDERS, ("status", "mask_history", "finish_reasons"))
_ENDED_WELL = ("complete", "completed", "success", "succeeded", "finished", "ok", "done")


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
    for key in (*FINISH_KEYS, "matched_stop"):
        if reason := item.get(key):
            # vLLM and SGLang name a stop text of the request, which was cut off with what followed
            stopped = key in _MATCHED and item.get("finish_reason") and was_cut(reason) is None
            yield key, "stop_sequence" if stopped and isinstance(reason, str) else reason
    for holder in HOLDERS:
        inside = item.get(holder)
        if isinstance(inside, str) and inside.startswith("{"):
            inside = from_json(inside)
        if isinstance(inside, dict):
            for key, reason in endings(inside):
                yield f"{holder}.{key}", reason
    status = item.get("status")
    if isinstance(status, str) and status.lower() == "incomplete":
        yield "status", "incomplete"
    if item.get("incomplete_details"):
        yield "incomplete_details", "incomplete"
    for keys, cut in ((_TRUNCATED, True), (_COMPLETE, False)):
        for key in keys:
            if not is_empty(value := item.get(key)):
                said = _TRUTHS.get(str(value).strip().lower())
                # what is neither true nor false is named as a reason that is not known
                reason = f"{value}" if said is None else "length" if said is cut else "stop"
                yield key, reason


def was_cut(reason: object) -> bool | None:
    """Return whether a finish reason says that the model gave no end; None for an unknown one."""
    if isinstance(reason, dict):
        # SGLang's own; what matched is a token, or a stop text of the request
        if isinstance(reason.get("matched"), str):
            return True
        reason = reason.get("type")
    if isinstance(reason, int):
        # vLLM names the stop token that the model gave
        return False
    # Python names a member by its class too: FinishReason.LENGTH
    known = reason.lower().rpartition(".")[2] if isinstance(reason, str) else None
    if known in _CUT:
        return True
    return False if known in _ENDED else None


class RowFlags:
    """The columns of a row that are flags.

    Args:
        row: the row's object.
        columns: standard name -> the source's name.
        used: names of the columns that are read are added.
    """

    def __init__(self, row: dict[str, Any], columns: Mapping[str, str], used: set[str]) -> None:
        self._row = row
        self._columns = columns
        self._used = used

    def check_wanted(self) -> None:
        """Refuse a row that holds no answer that is wanted.

        Raises:
            RowSkipped: `no_supervised_tokens`: the row is a bad example, or failed.
        """
        if self._row.get("label") is False:
            raise RowSkipped(
                "no_supervised_tokens", "label: false says that the answer is a bad example"
            )
        status = self._row.get("status")
        if has_failed(status):
            raise RowSkipped("no_supervised_tokens", f"status: {status}: there is no answer")
        if isinstance(status, str) and status.lower() in _ENDED_WELL:
            self._used.add("status")

    def learnt(self, count: int) -> list[bool] | None:
        """Return whether each message is learnt, as the row's `loss_mask` or `weights` say.

        Args:
            count: number of the row's messages.

        Raises:
            RowSkipped: `bad_columns`: there is not a number for each message, or a `mask` does not
                say what it masks.
        """
        self._check_mask()
        name = self._columns.get("loss_mask", "loss_mask")
        found = None
        for key, weighs in ((name, False), ("weights", True)):
            mask = self._row.get(key)
            if is_empty(mask) or (weighs and not isinstance(mask, list)):
                continue
            self._used.add(key)
            if (
                not isinstance(mask, list)
                or len(mask) != count
                or any(not isinstance(value, (bool, int, float)) for value in mask)
                or any(value not in (0, 1) and not (weighs and is_weight(value)) for value in mask)
            ):
                kind = "a number from 0" if weighs else "0 or 1"
                raise RowSkipped(
                    "bad_columns",
                    f"column {key}: expected {kind} for each of {count} messages, found"
                    f" {shown(mask)}",
                )
            given = [bool(value) for value in mask]
            if found is not None and found != given:
                raise RowSkipped(
                    "bad_columns", f"column {key}: expected the same as {name}, found {shown(mask)}"
                )
            found = given
        return found

    def _check_mask(self) -> None:
        mask = self._row.get("mask")
        if is_empty(mask):
            return
        if isinstance(mask, str) and mask.lower() in ("user", "human"):
            # the questions are masked, as they are anyway
            self._used.add("mask")
            return
        raise RowSkipped(
            "bad_columns",
            "column mask: some data sets mask what is learnt, some what is not; name it loss_mask"
            f" with 1 for what is learnt, found {shown(mask)}",
        )

    def excludes(self) -> bool:
        """Return whether the row says that none of it is learnt.

        Raises:
            RowSkipped: `bad_columns`: a weight is negative or no number.
        """
        excluded = False
        for name in _EXCLUDING:
            value = self._row.get(name)
            if isinstance(value, str) and value.strip().lower() in ("false", "0", "no"):
                raise RowSkipped(
                    "bad_columns", f"column {name}: expected true or false, found {shown(value)}"
                )
            if not isinstance(value, (bool, int, float)):
                continue
            if not is_weight(value):
                raise RowSkipped(
                    "bad_columns", f"column {name}: expected a number from 0, found {value}"
                )
            if not value:
                self._used.add(name)
                excluded = True
        return excluded

    def apply(self, reader: "MessageReader") -> None:
        """Tell a reader what the row says of the answers that it has read.

        Args:
            reader: the reader of all messages.

        Raises:
            RowSkipped: `bad_columns`: a column holds something else.
        """
        if self._row.keys().isdisjoint(_SAYING):
            return
        if self.excludes():
            reader.unsupervised.update(range(len(reader.messages)))
        self._exclude_history(reader)
        self._used.update(name for name in ENDING_KEYS if name in self._row)
        for name, reason in endings(self._row):
            self._used.update(["status"] if name == "status" else [])
            reader.end_last(reason, name)
        if not is_empty(reasons := self._row.get("finish_reasons")):
            self._used.add("finish_reasons")
            reader.end_last(reasons, "finish_reasons")

    def _exclude_history(self, reader: "MessageReader") -> None:
        masked = self._row.get("mask_history")
        if is_empty(masked):
            return
        if not isinstance(masked, bool):
            raise RowSkipped(
                "bad_columns",
                f"column mask_history: expected true or false, found {shown(masked)}",
            )
        self._used.add("mask_history")
        answers = [
            index for index, message in enumerate(reader.messages) if message["role"] == "assistant"
        ]
        reader.unsupervised.update(answers[:-1] if masked else [])


def without_padding(
    ids: list[Any], mask: list[Any], attention: object
) -> tuple[list[Any], list[Any]]:
    """Return the tokens of a row without its padding.

    Args:
        ids: ids [T].
        mask: loss mask [T].
        attention: 0 for padding, 1 for a token [T].

    Raises:
        RowSkipped: `bad_tokens`: the attention mask is something else, or has zeros between tokens.
    """
    if (
        not isinstance(attention, list)
        or not len(attention) == len(ids) == len(mask)
        or any(value not in (0, 1) for value in attention)
    ):
        raise RowSkipped(
            "bad_tokens",
            f"attention_mask: expected 0 or 1 for each of {len(ids)} ids, found {shown(attention)}",
        )
    places = [index for index, value in enumerate(attention) if value]
    first, end = (places[0], places[-1] + 1) if places else (0, 0)
    if len(places) != end - first:
        raise RowSkipped(
            "bad_tokens", "attention_mask: expected padding at the ends, found it between tokens"
        )
    return ids[first:end], mask[first:end]

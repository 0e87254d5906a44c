"""The pieces of one answer that a row gives as several messages.

Responses has an item for each text and each call, ShareGPT has calls as turns of their own. The
model wrote the pieces in one go, and its end token stands behind the last alone.
"""

from typing import Any

from draftstates.tokens.rows import RowSkipped

Message = dict[str, Any]


class AnswerJoiner:
    """Messages in which adjacent pieces of an answer are one.

    Pieces are joined where they have the order of an answer: reasoning, one text, calls. Between
    two texts the row does not say what the model wrote, so the earlier stays open: its end is not
    learnt.

    Attributes:
        messages: the messages.
        unsupervised: numbers of the messages that the row excludes from what is learnt.
        open_turns: numbers of the messages that the model did not end itself.
    """

    def __init__(
        self, messages: list[Message], unsupervised: set[int], open_turns: set[int]
    ) -> None:
        """Join what can be joined.

        Args:
            messages: the row's messages.
            unsupervised: as the attribute, by the row's numbers.
            open_turns: as the attribute, by the row's numbers.

        Raises:
            RowSkipped: `bad_message`: text or reasoning follows a call that has no result.
        """
        self.messages: list[Message] = []
        self.unsupervised: set[int] = set()
        self.open_turns: set[int] = set()
        for index, message in enumerate(messages):
            self._add(message, index in unsupervised, index in open_turns)

    def _add(self, message: Message, excluded: bool, is_open: bool) -> None:
        last = len(self.messages) - 1
        adjacent = last >= 0 and message["role"] == self.messages[last]["role"] == "assistant"
        if adjacent and last not in self.open_turns:
            earlier = self.messages[last]
            if earlier.get("tool_calls") and _says(message):
                raise RowSkipped(
                    "bad_message",
                    f"message {last}: expected results after its calls, found an answer's text or"
                    " reasoning",
                )
            if (last in self.unsupervised) == excluded and _follows(earlier, message):
                self.messages[last] = _joined(earlier, message)
                self.open_turns.update([last] if is_open else [])
                return
            self.open_turns.add(last)
        self.messages.append(message)
        self.unsupervised.update([last + 1] if excluded else [])
        self.open_turns.update([last + 1] if is_open else [])


def _has_text(message: Message) -> bool:
    return not isinstance(message["content"], str) or bool(message["content"].strip())


def _says(message: Message) -> bool:
    return _has_text(message) or bool(message.get("reasoning_content"))


def _follows(earlier: Message, later: Message) -> bool:
    """Return whether two pieces have an answer's order."""
    if not _has_text(earlier):
        return True
    return not _says(later)


def _joined(earlier: Message, later: Message) -> Message:
    """Return the answer of two pieces; at most one of them has text."""
    message = {**earlier, **later}
    message["content"] = (earlier if _has_text(earlier) else later)["content"]
    thoughts = [piece.get("reasoning_content") for piece in (earlier, later)]
    if thought := "\n".join(filter(None, thoughts)):
        message["reasoning_content"] = thought
    if calls := [call for piece in (earlier, later) for call in piece.get("tool_calls", ())]:
        message["tool_calls"] = calls
    return message

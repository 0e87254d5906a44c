"""The layout of a row: which of its columns hold the conversation."""

from collections.abc import Mapping
from typing import Any

from draftstates.tokens.rows import RowSkipped, shown
from draftstates.tokens.tools import from_json, is_empty

_MESSAGE_COLUMNS = ("messages", "conversations", "conversation")
# the two columns of a layout that holds a question and an answer; the first that a row has
_PAIRS = (("instruction", "output"), ("prompt", "completion"), ("prompt", "response"))
# other names; taken where a row has exactly one of each
QUESTIONS = ("instruction", "prompt", "question", "query", "problem")
ANSWERS = ("output", "completion", "response", "answer", "solution")
# what the question is about; it is part of the question, and the row does not say how
CONTEXTS = ("context", "contexts", "passage", "passages", "document", "documents")


def _two_layouts(one: str, other: str, formats: str) -> RowSkipped:
    return RowSkipped(
        "unknown_format",
        f"{one} and the column {other} hold a conversation each: say which is meant with format:"
        f" {formats}",
    )


class RowLayout:
    """A row's columns, by the names that the source gives them.

    Args:
        row: the row's object.
        columns: standard name -> the source's name.
    """

    def __init__(self, row: dict[str, Any], columns: Mapping[str, str]) -> None:
        self._row = row
        self._columns = columns

    def _name(self, standard: str) -> str:
        return self._columns.get(standard, standard)

    def _has(self, *standard: str) -> bool:
        return all(self._row.get(self._name(name)) is not None for name in standard)

    def layout(self) -> str:
        """Return the layout that the row's columns have.

        Raises:
            RowSkipped: `unknown_format` or `bad_columns`: they fit none, or are null.
        """
        listed = [name for name in self.message_columns() if name in self._row]
        full = [name for name in listed if not is_empty(self._row[name])]
        if self._has("input_ids", "loss_mask"):
            if full:
                raise _two_layouts("input_ids", full[0], "tokens or messages")
            return "tokens"
        if full:
            first = from_json(self._row[full[0]])
            for name in full[1:]:
                if from_json(self._row[name]) != first:
                    raise RowSkipped(
                        "unknown_format",
                        f"the columns {full[0]} and {name} could both be the messages: name one in"
                        " columns",
                    )
            return "messages"
        if isinstance(self._row.get("output"), list) and not is_empty(self._row.get("input")):
            return "responses"
        if self._has("instruction", "output"):
            return "alpaca"
        if self.pair() is not None:
            return "completion"
        if listed:
            # it is there, and null or empty
            return "messages"
        null = [name for name in (*QUESTIONS, *ANSWERS) if name in self._row]
        for name in null:
            if self._row[name] is None:
                raise RowSkipped("bad_columns", f"column {name}: expected text, found None")
        known = self._sides()
        several = " and ".join(
            f"{' or '.join(names)} as {side}"
            for side, names in zip(("question", "answer"), known, strict=True)
            if len(names) > 1
        )
        if several:
            advice = f"it could have {several}: name one in columns"
        else:
            advice = "name those of the messages, or of the question and its answer, in columns"
        columns = shown(sorted(map(str, self._row)), 200)
        raise RowSkipped("unknown_format", f"the columns {columns} fit no known layout; {advice}")

    def message_columns(self) -> tuple[str, ...]:
        """Return the names of columns that may hold the messages, the likeliest first."""
        named = self._columns.get("messages")
        return (named,) if named in self._row else _MESSAGE_COLUMNS

    def check_same(self, messages: list[dict[str, Any]]) -> None:
        """Refuse a row whose question and answer are in columns too, and are others there.

        Args:
            messages: the messages of the row's list.

        Raises:
            RowSkipped: `unknown_format`: the row holds two conversations.
        """
        texts = []
        for message in messages:
            content = message["content"]
            parts = [content] if isinstance(content, str) else [part["text"] for part in content]
            texts += [*parts, "".join(parts)]
        for name in self.pair() or ():
            said = self._row[name]
            if isinstance(said, str) and not any(said.strip() in text for text in texts):
                raise _two_layouts("the messages", name, "messages or completion")

    def answer_column(self) -> str | None:
        """Return the column that holds an answer to the messages; None where it is in doubt."""
        given = [name for name in ANSWERS if not is_empty(self._row.get(name))]
        if len(given) != 1 or not isinstance(self._row[given[0]], (str, list)):
            return None
        return given[0]

    def _sides(self) -> tuple[list[str], list[str]]:
        """Return the columns that may hold the question, and those that may hold the answer."""
        questions, answers = (
            [name for name in names if not is_empty(self._row.get(name))]
            for names in (QUESTIONS, ANSWERS)
        )
        if not questions and not is_empty(self._row.get("input")):
            questions = ["input"]
        return questions, answers

    def pair(self) -> tuple[str, str] | None:
        """Return the columns of question and answer, where they are not in doubt."""
        for question, answer in _PAIRS:
            if self._has(question, answer):
                return self._name(question), self._name(answer)
        questions, answers = self._sides()
        for side, names in ((questions, ("instruction", "prompt")), (answers, ANSWERS[:2])):
            # a column that the configuration names is not in doubt
            if named := [self._columns[name] for name in names if name in self._columns]:
                side[:] = named
        if len(questions) == 1 and len(answers) == 1:
            return questions[0], answers[0]
        return None

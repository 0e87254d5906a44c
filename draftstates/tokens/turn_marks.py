"""The marks by which a template opens turns, and the text of rows that holds them already.

Some data sets hold what a template rendered, or what a model wrote with its marks. Rendered once
more, the marks stand there twice.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from draftstates.tokens.prefill import Prefill
from draftstates.tokens.rows import RowSkipped, shown

_USER = {"role": "user", "content": "Hi"}
_ANSWER = {"role": "assistant", "content": "Yes"}


@dataclasses.dataclass(frozen=True)
class TurnMarks:
    """The marks by which a template opens turns.

    Attributes:
        marks: marks that stand before the text of a turn, and are no tags of a thought.
        prompt: the last line with a mark that stands before an answer; may be empty.
    """

    marks: tuple[str, ...] = ()
    prompt: str = ""

    def check(self, message: dict[str, Any], index: int) -> None:
        """Refuse a message whose text is rendered already.

        Args:
            message: the message.
            index: its number, for messages.

        Raises:
            RowSkipped: `bad_message`: the text begins with one of the marks, an answer holds the
                opening of another, or a question ends in the opening of an answer.
        """
        content, role = message["content"], message["role"]
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        for text in texts:
            if text.lstrip().startswith(self.marks) or (
                self.prompt
                and (
                    self.prompt in text
                    if role == "assistant"
                    else text.rstrip().endswith(self.prompt)
                )
            ):
                raise RowSkipped(
                    "bad_message",
                    f"message {index} ({role}): content: expected text without the template's own"
                    f" turn marks, found {shown(text)}: it is rendered already",
                )


def find_turn_marks(
    render: Callable[..., str], *, marks: Collection[str], prefill: Prefill
) -> TurnMarks:
    """Find the marks by which a template opens turns.

    Args:
        render: `Rendering.text`.
        marks: the vocabulary's marks.
        prefill: what the generation prompt adds and history lacks.
    """
    try:
        prompt = render([_USER], prompt=True).removesuffix(prefill.text)
        turn = render([_USER, _ANSWER])
    except RowSkipped:
        return TurnMarks()
    before, _, after = prompt.partition(_USER["content"])
    opening = turn.removeprefix(prompt).partition(_ANSWER["content"])[0]
    found = {
        mark
        for mark in marks
        # an answer may begin with a thought in tags
        if mark.strip() and "think" not in mark and mark in before + after + opening
    }
    lines = [line.strip() for line in after.splitlines() if any(mark in line for mark in found)]
    return TurnMarks(tuple(sorted(found)), lines[-1] if lines else "")

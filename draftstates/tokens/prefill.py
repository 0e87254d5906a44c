"""The prefill of a generation prompt: text that the prompt adds to a turn and that history lacks.

Gemma 4 opens a turn without thoughts with an empty thought channel, and shows the turn without it
once it is history. The model sees the channel, so its turn begins behind it.
"""

import dataclasses
import os
from collections.abc import Callable, Collection

from draftstates.tokens.rows import RowSkipped
from draftstates.tokens.turn_ends import ANSWERS

_USER = {"role": "user", "content": "Hi"}


@dataclasses.dataclass(frozen=True)
class Prefill:
    """The text at the end of a generation prompt that a rendered turn lacks; usually empty.

    Attributes:
        text: the text.
        opener: its first mark; empty where it does not begin with a mark.
    """

    text: str = ""
    opener: str = ""

    def continuation(self, prompt: str, turn: str) -> str | None:
        """Return the text that the model writes after a prompt, or None if the two differ.

        Args:
            prompt: rendered history with generation prompt.
            turn: rendered history and turn.
        """
        if turn.startswith(prompt):
            return turn[len(prompt) :]
        if not self.text or not prompt.endswith(self.text):
            return None
        history = prompt.removesuffix(self.text)
        if not turn.startswith(history):
            return None
        rest = turn[len(history) :]
        # a turn that opens a thought of its own does not follow the prompt's empty one
        return None if self.opener and rest.startswith(self.opener) else rest


def find_prefill(render: Callable[..., str], *, marks: Collection[str]) -> Prefill:
    """Find the text at the end of a generation prompt that a rendered turn lacks.

    A prompt that opens a thought and leaves it open is no prefill: the model would write the rest
    of the thought, and a turn without it is none that follows the prompt.

    Args:
        render: `Rendering.text`.
        marks: the vocabulary's marks.
    """
    try:
        prompt = render([_USER], prompt=True)
        turns = {
            answer: render([_USER, {"role": "assistant", "content": answer}]) for answer in ANSWERS
        }
    except RowSkipped:
        return Prefill()
    shared = _before_marks(prompt, len(os.path.commonprefix([prompt, *turns.values()])), marks)
    asked = prompt.rfind(_USER["content"]) + len(_USER["content"])
    text = prompt[shared:]
    # what the model writes between the prefill and its answer
    between = {turn[shared:].partition(answer)[0] for answer, turn in turns.items()}
    if shared < asked or len(between) > 1 or not _is_closed(text, marks):
        return Prefill()
    begin = between.pop()
    if any(mark in text and mark in begin for mark in marks):
        # the turn has the same marks: the prompt does not merely add some
        return Prefill()
    openers = (mark for mark in marks if text.startswith(mark))
    return Prefill(text, max(openers, key=len, default=""))


def _before_marks(text: str, place: int, marks: Collection[str]) -> int:
    """Return a place in a text, moved to the beginning of the mark that it lies within."""
    for mark in marks:
        first = text.find(mark, max(place - len(mark) + 1, 0), place + len(mark) - 1)
        if 0 <= first < place:
            return first
    return place


def _is_closed(text: str, marks: Collection[str]) -> bool:
    """Return whether a text ends in a mark that closes something."""
    found = [mark for mark in marks if mark in text]
    last = [mark for mark in found if text.rstrip().endswith(mark)]
    return bool(last) and (len(found) > 1 or last[0].startswith("</"))

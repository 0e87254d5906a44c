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
        render: `ChatTemplate.render`.
        marks: the vocabulary's marks.
    """
    try:
        history, prompt = render([_USER]), render([_USER], prompt=True)
        turns = {
            answer: render([_USER, {"role": "assistant", "content": answer}]) for answer in ANSWERS
        }
    except RowSkipped:
        return Prefill()
    shared = len(os.path.commonprefix([prompt, *turns.values()]))
    begins = all(turn[shared:].startswith(answer) for answer, turn in turns.items())
    text = prompt[shared:]
    if not (begins and prompt[:shared].startswith(history) and _is_closed(text, marks)):
        return Prefill()
    return Prefill(
        text, max((mark for mark in marks if text.startswith(mark)), key=len, default="")
    )


def _is_closed(text: str, marks: Collection[str]) -> bool:
    """Return whether a text ends in a mark that closes something."""
    found = [mark for mark in marks if mark in text]
    last = [mark for mark in found if text.rstrip().endswith(mark)]
    return bool(last) and (len(found) > 1 or last[0].startswith("</"))

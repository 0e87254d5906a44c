"""The marks by which a template opens and ends turns, which the text of a row may not have.

Some data sets hold what a template rendered, or what a model wrote with its marks. Rendered once
more, the marks would stand there twice, so a text that begins with them is refused.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from draftstates.tokens.rows import RowSkipped, shown
from draftstates.tokens.turn_bounds import Prefill

_USER = {"role": "user", "content": "Hi"}
_ANSWER = {"role": "assistant", "content": "Yes"}
# ends of turns and texts of well-known models; an answer keeps one that is not its own model's
_OTHERS_ENDS = (
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>"),
    *("<｜end▁of▁sentence｜>", "<|end|>", "<|return|>", "<|END_OF_TURN_TOKEN|>"),
)


@dataclasses.dataclass(frozen=True)
class TurnMarks:
    """The marks by which a template opens turns.

    Attributes:
        marks: marks that stand before the text of a turn, and are no tags of a thought.
        prompt: the last line with a mark that stands before an answer; may be empty.
        ends: the marks that end a turn.
    """

    marks: tuple[str, ...] = ()
    prompt: str = ""
    ends: tuple[str, ...] = ()

    def check(self, message: dict[str, Any], index: int) -> None:
        """Refuse a message whose text is rendered already.

        Args:
            message: the message.
            index: its number, for messages.

        Raises:
            RowSkipped: `bad_message`: the text begins with one of the marks, an answer holds the
                opening of another or ends in the end token of another model or goes on behind its
                own, or a question ends in the opening of an answer.
        """
        content, role = message["content"], message["role"]
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        if role == "assistant" and texts and texts[-1].rstrip().endswith(_OTHERS_ENDS):
            raise RowSkipped(
                "bad_message",
                f"message {index} ({role}): content: expected no end token but the model's own,"
                f" found one at the end of {shown(texts[-1].rstrip()[-40:])}: leave it out",
            )
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
            if role == "assistant" and any(mark in text for mark in self.ends):
                raise RowSkipped(
                    "bad_message",
                    f"message {index} ({role}): content: expected nothing behind the model's end"
                    f" token, found it within {shown(text)}: leave it out",
                )


def find_turn_marks(
    render: Callable[..., str],
    *,
    marks: Collection[str],
    ends: tuple[str, ...],
    prefill: Prefill,
) -> TurnMarks:
    """Find the marks by which a template opens turns.

    Args:
        render: `Rendering.text`.
        marks: the vocabulary's marks.
        ends: those that end a turn.
        prefill: what the generation prompt adds and history lacks.
    """
    try:
        prompt = render([_USER], prompt=True).removesuffix(prefill.text)
        turn = render([_USER, _ANSWER])
    except RowSkipped:
        return TurnMarks(ends=ends)
    before, _, after = prompt.partition(_USER["content"])
    opening = turn.removeprefix(prompt).partition(_ANSWER["content"])[0]
    found = {
        mark
        for mark in marks
        # an answer may begin with a thought in tags
        if mark.strip() and "think" not in mark and mark in before + after + opening
    }
    lines = [line.strip() for line in after.splitlines() if any(mark in line for mark in found)]
    return TurnMarks(tuple(sorted(found)), lines[-1] if lines else "", ends)

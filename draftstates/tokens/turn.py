"""The ids of one assistant turn: its history as the server sees it, then what the model writes.

The history is rendered up to the generation prompt, the turn up to and including its end token.
Where the turn's rendering does not begin as the prompt, because the template rewrites history or
because tokens merge across the prompt's end, the turn's text follows the prompt's ids. Rendered
text is never searched for an answer, so repeated answers cannot be confused.
"""

import dataclasses
import re
from typing import Any

import numpy as np

from draftstates.tokens.content import ContentCheck
from draftstates.tokens.rendering import Rendered
from draftstates.tokens.rows import RowSkipped
from draftstates.tokens.sources import TokeniseOptions
from draftstates.tokens.template import ChatTemplate
from draftstates.tokens.turn_bounds import closer_of, opened_thought

# most tokens with which a prompt may open a turn, such as the start of a thought
_LONGEST_OPENER = 16
_LAST_TOKENS = 64
_QUESTION = {"role": "user", "content": "Hi"}
_THOUGHT_END = re.compile(r"</[\w:]*think[\w:]*>\s*\Z")
# a thought that is over, and an answer that opens another
_SECOND_THOUGHT = re.compile(r"\s*(?:<[\w:]*think[\w:]*>\s*)?</[\w:]*think[\w:]*>\s*<think>")


@dataclasses.dataclass(slots=True)
class Turn:
    """A turn with its history.

    Attributes:
        ids: ids of history and turn.
        end: end of the turn at generation time, after its end token.
        spans: ascending (first, end) of the supervised tokens.
    """

    ids: np.ndarray
    end: int
    spans: list[tuple[int, int]]


def make_turn(
    messages: list[dict[str, Any]],
    place: int,
    tools: list[dict[str, Any]] | None,
    template: ChatTemplate,
    options: TokeniseOptions,
    check: ContentCheck,
    is_open: bool,
) -> Turn:
    """Return a turn as the model would write it.

    Args:
        messages: messages of the conversation, as `ChatTemplate.prepared` gives them.
        place: number of the turn's message.
        tools: tools of the conversation.
        template: the template.
        options: options of the source.
        check: looks for the turn's content in what is rendered.
        is_open: whether the model did not end the turn itself.

    Raises:
        RowSkipped: the turn does not follow its prompt, has no end, or loses content.
    """
    prompt = template.rendering.rendered(messages[:place], tools=tools, prompt=True)
    turn = template.rendering.rendered(messages[: place + 1], tools=tools)
    turn, thought = _with_thought(prompt, turn, messages[: place + 1], tools, template)
    if is_open:
        text = _without_end(turn.text, messages[place], len(prompt.text), template)
        turn = Rendered(text, template.encode(text))
    ids, start = turn.ids, len(prompt.ids)
    if not begins(ids, prompt.ids):
        ids = np.concatenate(
            [
                prompt.ids,
                _continuation(prompt, turn, messages[: place + 1], tools, template, is_open),
            ]
        )
    moved = len(ids) - len(turn.ids)
    if not is_open:
        ids = template.ends.closed(ids, messages, place)
    calls = bool(messages[place].get("tool_calls"))
    end = len(ids)
    if not is_open:
        end = start + template.ends.end(ids[start:], calls=calls, tokenizer=template.tokenizer)
    if turn.text.startswith(prompt.text):
        answer = turn.text[len(prompt.text) :]
    else:
        # the ids have the last word
        answer = template.tokenizer.decode(ids[start:].tolist())
    opened = opened_thought(prompt.text)
    if opened and not is_open and closer_of(opened) not in answer:
        raise _unlike(prompt)
    over = _THOUGHT_END.search(prompt.text[-_LAST_TOKENS:])
    if _SECOND_THOUGHT.match((over[0] if over else "") + answer):
        raise _unlike(prompt)
    check.see(place, prompt.text, answer)
    if end == start:
        raise RowSkipped("no_supervised_tokens", "the answer was cut before its first token")
    if options.include_reasoning:
        return Turn(ids, end, [(start, end)])
    # an answer that is empty still has its end token as target, unless it was cut
    first = _answer_start(messages, place, tools, template, turn.ids, thought) + moved
    first = max(first, start)
    if first >= end and is_open:
        raise RowSkipped("no_supervised_tokens", "the answer was cut in its reasoning")
    return Turn(ids, end, [(min(first, end - 1), end)])


def _with_thought(
    prompt: Rendered,
    turn: Rendered,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    template: ChatTemplate,
) -> tuple[Rendered, str]:
    """Return a turn with the thought that the prompt opens and the template leaves out.

    Args:
        prompt: the history with generation prompt.
        turn: the history and the turn as the template renders them.
        messages: messages up to the turn's.
        tools: tools of the conversation.
        template: the template.

    Returns:
        The turn, and its text up to the end of the thought; no text where nothing is put in.
    """
    opener, message = template.opener, messages[-1]
    if not opener or not prompt.text.endswith(opener):
        return turn, ""
    tag, closer, content = opener.strip(), closer_of(opener), message["content"]
    if turn.text.startswith(prompt.text) and not turn.text.startswith(prompt.text + closer):
        # the answer's own text has the thought
        return turn, ""
    thought = message.get("reasoning_content")
    if thought:
        # models write as many newlines around the end of a thought as behind its start
        lines = "\n" * opener.count("\n")
        block = f"{thought.strip()}{lines}{closer}{lines * 2}"
    elif isinstance(content, str) and closer in content:
        said, _, after = content.partition(closer)
        answer = after.lstrip("\n")
        said = said.removeprefix(opener if said.startswith(opener) else tag)
        block = said + closer + after[: len(after) - len(answer)]
        bare = {**message, "content": answer}
        turn = template.rendering.rendered([*messages[:-1], bare], tools=tools)
    else:
        return turn, ""
    history = prompt.text.removesuffix(opener)
    if not turn.text.startswith(history):
        return turn, ""
    # some show the end of an empty thought
    rest = turn.text[len(history) :].removeprefix(tag).removeprefix(closer)
    text = prompt.text + block + rest
    return Rendered(text, template.encode(text)), prompt.text + block


def _without_end(text: str, message: dict[str, Any], start: int, template: ChatTemplate) -> str:
    """Return a rendered turn without what the template puts after the answer's text.

    Args:
        text: the rendering.
        message: the turn, which the model did not end itself.
        start: end of the prompt in the text.
        template: the template.
    """
    body = text.removesuffix(template.closing_text)
    if body == text and not template.ends.next_role:
        # a turn of calls may be closed in another way
        places = [text.rfind(mark, start) for mark in template.end_marks]
        if max(places, default=-1) < 0:
            raise RowSkipped("no_turn_end", f"expected an end token, found {text[-40:]!r}")
        body = text[: max(places)]
    reasoning = message.get(template.reasoning_key, "") if template.reasoning_key else ""
    if reasoning and not (message["content"] or "").strip() and not message.get("tool_calls"):
        # cut within the reasoning, so the model did not end that either
        found = body.rfind(reasoning.strip(), start)
        if found < 0:
            raise RowSkipped("no_turn_end", "the answer was cut, and its reasoning is not found")
        body = body[: found + len(reasoning.strip())]
    return body


def begins(ids: np.ndarray, prefix: np.ndarray) -> bool:
    length = len(prefix)
    # where a template rewrites history, the last tokens differ already
    last = max(length - _LAST_TOKENS, 0)
    return np.array_equal(ids[last:length], prefix[last:]) and np.array_equal(
        ids[:last], prefix[:last]
    )


def _continuation(
    prompt: Rendered,
    turn: Rendered,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    template: ChatTemplate,
    is_open: bool,
) -> np.ndarray:
    """Return the ids that the model would generate after the prompt.

    This is for a turn whose ids do not begin with the prompt's ids, such as where tokens merge
    across the prompt's end, or where the prompt holds more than history shows.
    """
    message = messages[-1]
    if (rest := template.prefill.continuation(prompt.text, turn.text)) is not None:
        return template.encode(rest)
    content = message["content"]
    if isinstance(content, str) and not message.get("tool_calls"):
        # The prompt opens the turn (such as with the start of a thought), and the data has the same
        # opener: the template renders it once.
        answer = template.encode(content)
        for shared in range(min(len(prompt.ids), len(answer), _LONGEST_OPENER), 0, -1):
            if begins(answer, prompt.ids[-shared:]) and template.added_ids.intersection(
                answer[:shared].tolist()
            ):
                closing = [] if is_open else template.ends.closing
                return np.concatenate([answer[shared:], np.array(closing, dtype=np.int32)])
    if (rest := _behind_question(prompt, turn, messages, tools, template, is_open)) is not None:
        return template.encode(rest)
    raise _unlike(prompt)


def _behind_question(
    prompt: Rendered,
    turn: Rendered,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    template: ChatTemplate,
    is_open: bool,
) -> str | None:
    """Return the text of a turn that has another history than its prompt, or None.

    gpt-oss leaves out the thought before a call once the final answer is there. The server's prompt
    has the thought, and the answer follows it. It is what follows a lone question too, if the
    rendered conversation ends in the generation prompt and this text.
    """
    text = template.rendering.text
    history = text(messages[:-1], tools=tools)
    opening = prompt.text.removeprefix(history)
    try:
        asked, said = text([_QUESTION], prompt=True), text([_QUESTION, messages[-1]])
    except RowSkipped:
        return None
    if is_open:
        said = _without_end(said, messages[-1], len(asked), template)
    answer = said.removeprefix(asked)
    if not opening or prompt.text == opening or said == answer:
        return None
    return answer if turn.text.endswith(opening + answer) else None


def _unlike(prompt: Rendered) -> RowSkipped:
    return RowSkipped(
        "prompt_not_prefix",
        "expected a rendering that begins as the prompt, which ends in"
        f" {prompt.text[-40:]!r}: where that opens a thought, the answer needs reasoning, or"
        " data.template_arguments that switch thoughts off; where the template closes an empty one,"
        " an answer with a thought needs arguments that switch them on",
    )


def _answer_start(
    messages: list[dict[str, Any]],
    place: int,
    tools: list[dict[str, Any]] | None,
    template: ChatTemplate,
    ids: np.ndarray,
    text: str,
) -> int:
    """Return the place in a turn's rendered ids where its reasoning ends; 0 where it has none.

    The turn's text up to there is `text`. If that is empty, the turn is rendered a second time
    without its answer: both agree up to that place.
    """
    message = messages[place]
    content = message["content"] if isinstance(message["content"], str) else ""
    thought, closer, _ = content.rpartition("</think>")
    key = template.reasoning_key
    if not text and not closer and not (key and message.get(key)):
        return 0
    bare = {key: value for key, value in message.items() if key != "tool_calls"} | {
        "content": thought + closer
    }
    if text:
        other = template.encode(text)
    else:
        other = template.rendering.rendered([*messages[:place], bare], tools=tools).ids
    shorter = min(len(ids), len(other))
    differing = np.flatnonzero(ids[:shorter] != other[:shorter])
    return int(differing[0]) if len(differing) else shorter

"""Loss masks by token prefixes.

An assistant turn's ids are those that the server would see: the history rendered up to the
generation prompt, then the turn as the template renders it, up to and including its end token. The
tokens after the prompt are supervised. A turn shares the sample of a later turn exactly if its ids
are a prefix of the later turn's ids. Where a template rewrites history (Qwen3 drops earlier
thoughts), or where tokens merge across the prompt's end, the turn gets a sample of its own.
Rendered text is never searched, so repeated answers cannot be confused.
"""

import dataclasses
from typing import Any

import numpy as np

from draftstates.tokens.conversations import Conversation
from draftstates.tokens.options import TokeniseOptions
from draftstates.tokens.rows import RowSkipped
from draftstates.tokens.template import ChatTemplate

# most tokens with which a prompt may open a turn, such as the start of a thought
_LONGEST_OPENER = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """A tokenised conversation or turn.

    Attributes:
        input_ids: int32 [T].
        loss_mask: uint8 [T].
        cut: whether turns beyond max_tokens were left out.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    cut: bool = False


@dataclasses.dataclass(slots=True)
class _Turn:
    """A turn with its history.

    Attributes:
        ids: ids of history and turn.
        end: end of the turn at generation time, after its end token.
        spans: ascending (first, end) of the supervised tokens.
    """

    ids: np.ndarray
    end: int
    spans: list[tuple[int, int]]


def tokenise_conversation(
    conversation: Conversation, template: ChatTemplate, options: TokeniseOptions
) -> tuple[list[Sample], list[RowSkipped]]:
    """Return a conversation's samples in turn order, and the reasons of turns without a sample.

    Raises:
        RowSkipped: the conversation has no sample.
    """
    messages = template.prepared(conversation)
    if not messages:
        raise RowSkipped("empty", "expected messages, found none")
    places = [
        index
        for index, message in enumerate(messages)
        if message["role"] == "assistant" and index > 0
    ]
    if not places:
        raise RowSkipped(
            "no_assistant", f"found only {', '.join(message['role'] for message in messages[:8])}"
        )
    if options.train_on == "last":
        places = places[-1:]
    turns, lost = [], []
    for place in places:
        try:
            turns.append(_turn(messages, place, conversation.tools, template, options))
        except RowSkipped as error:
            lost.append(error)
    samples = []
    for turn in _chosen(_grouped(turns), options):
        try:
            samples.append(_sample(turn, template, options))
        except RowSkipped as error:
            lost.append(error)
    if not samples:
        raise lost[0]
    return samples, lost


def _turn(
    messages: list[dict[str, Any]],
    place: int,
    tools: list[dict[str, Any]] | None,
    template: ChatTemplate,
    options: TokeniseOptions,
) -> _Turn:
    prompt_text = template.render(messages[:place], tools=tools, prompt=True)
    text = template.render(messages[: place + 1], tools=tools)
    prompt, ids = template.encode(prompt_text), template.encode(text)
    start = len(prompt)
    if not _begins(ids, prompt):
        ids = np.concatenate(
            [prompt, _continuation(prompt, prompt_text, text, messages[place], template)]
        )
    end = start + template.turn_end(ids[start:])
    if options.include_reasoning:
        return _Turn(ids, end, [(start, end)])
    return _Turn(
        ids, end, [(min(_answer_start(messages, place, tools, template, ids, start), end - 1), end)]
    )


def _begins(ids: np.ndarray, prefix: np.ndarray) -> bool:
    return np.array_equal(ids[: len(prefix)], prefix)


def _continuation(
    prompt: np.ndarray, prompt_text: str, text: str, message: dict[str, Any], template: ChatTemplate
) -> np.ndarray:
    """Return the ids that the model would generate after the prompt.

    This is for a turn whose ids do not begin with the prompt's ids, such as where tokens merge
    across the prompt's end.
    """
    if text.startswith(prompt_text):
        return template.encode(text[len(prompt_text) :])
    content = message["content"]
    if isinstance(content, str) and not message.get("tool_calls"):
        # The prompt opens the turn (such as with the start of a thought), and the data has the same
        # opener: the template renders it once.
        answer = template.encode(content)
        for shared in range(min(len(prompt), len(answer), _LONGEST_OPENER), 0, -1):
            if _begins(answer, prompt[-shared:]) and template.added_ids.intersection(
                answer[:shared].tolist()
            ):
                return np.concatenate([answer[shared:], np.array(template.closing, dtype=np.int32)])
    raise RowSkipped(
        "prompt_not_prefix",
        f"expected a rendering that begins as the prompt, which ends in {prompt_text[-40:]!r}",
    )


def _answer_start(
    messages: list[dict[str, Any]],
    place: int,
    tools: list[dict[str, Any]] | None,
    template: ChatTemplate,
    ids: np.ndarray,
    start: int,
) -> int:
    """Return the place in `ids` where the reasoning ends.

    The turn is rendered a second time without its answer: both agree up to that place.
    """
    message = messages[place]
    content = message["content"] if isinstance(message["content"], str) else ""
    thought, closer, _ = content.rpartition("</think>")
    if not closer and not message.get("reasoning_content"):
        return start
    bare = {key: value for key, value in message.items() if key != "tool_calls"} | {
        "content": thought + closer
    }
    other = template.encode(template.render([*messages[:place], bare], tools=tools))
    shorter = min(len(ids), len(other))
    differing = np.flatnonzero(ids[:shorter] != other[:shorter])
    return max(int(differing[0]) if len(differing) else shorter, start)


def _grouped(turns: list[_Turn]) -> list[_Turn]:
    """Join each turn whose ids are a prefix of a later turn's ids to the later turn.

    The other turns stay alone. The result is in turn order.
    """
    groups: list[_Turn] = []
    for turn in reversed(turns):
        host = next(
            (group for group in reversed(groups) if _begins(group.ids, turn.ids[: turn.end])), None
        )
        if host is None:
            groups.append(turn)
        else:
            host.spans[:0] = turn.spans
    return groups[::-1]


def _chosen(groups: list[_Turn], options: TokeniseOptions) -> list[_Turn]:
    if len(groups) > 1 and options.rewritten_history == "skip":
        raise RowSkipped(
            "rewritten_history", f"{len(groups)} turns would need samples of their own"
        )
    return groups[-1:] if options.rewritten_history == "last" else groups


def _sample(turn: _Turn, template: ChatTemplate, options: TokeniseOptions) -> Sample:
    ids, spans = turn.ids, turn.spans
    too_long = len(ids) > options.max_tokens
    if too_long:
        spans = (
            [span for span in spans if span[1] <= options.max_tokens]
            if options.over_long == "cut"
            else []
        )
        if not spans:
            raise RowSkipped(
                "too_long", f"expected at most {options.max_tokens} tokens, found {len(ids)}"
            )
        ids = ids[: spans[-1][1]]
    bos = template.tokenizer.bos_token_id
    if bos is not None and ids[:2].tolist() == [bos, bos]:
        raise RowSkipped("doubled_bos", f"the first two tokens are both {bos}")
    mask = np.zeros(len(ids), dtype=np.uint8)
    for first, end in spans:
        mask[first:end] = 1
    if not mask.any():
        raise RowSkipped("no_supervised_tokens", f"none of {len(ids)} tokens is supervised")
    return Sample(ids, mask, cut=too_long)

"""Loss masks by token prefixes.

An assistant turn's ids are those that the server would see: the history rendered up to the generation prompt, then the turn as the
template renders it, up to and including its end token. They are the turn's targets from the prompt's end on. A turn shares the sample
of a later one exactly if its ids are a prefix of the later one's; where a template rewrites history (Qwen3 drops earlier thoughts),
or where text merges across the prompt's end, it gets a sample of its own. Nothing is searched for in rendered text, so repeated
answers cannot be confused.
"""

import dataclasses
from typing import Any

import numpy as np

from draftstates.tokens.conversations import Conversation
from draftstates.tokens.options import TokeniseOptions
from draftstates.tokens.reasons import RowSkipped
from draftstates.tokens.template import ChatTemplate

_LONGEST_OPENER = 16  # tokens of what a prompt may open a turn with, such as a thought


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """input_ids int32 [T], loss_mask uint8 [T]; `cut` where turns beyond max_tokens were left off."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    cut: bool = False


@dataclasses.dataclass(slots=True)
class _Turn:
    """ids up to `end` (with the end token) are the turn at generation time; its targets are `spans`, ascending."""

    ids: np.ndarray
    end: int
    spans: list[tuple[int, int]]


def tokenise_conversation(
    conversation: Conversation, template: ChatTemplate, options: TokeniseOptions
) -> tuple[list[Sample], list[RowSkipped]]:
    """Samples of one conversation, in turn order, and why some of its turns are not among them.

    Raises:
        RowSkipped: there is no sample at all.
    """
    messages = template.prepared(conversation)
    if not messages:
        raise RowSkipped("empty", "expected messages, found none")
    places = [index for index, message in enumerate(messages) if message["role"] == "assistant" and index > 0]
    if not places:
        raise RowSkipped("no_assistant", f"found only {', '.join(message['role'] for message in messages[:8])}")
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
    messages: list[dict[str, Any]], place: int, tools: list[dict[str, Any]] | None, template: ChatTemplate, options: TokeniseOptions
) -> _Turn:
    prompt_text = template.render(messages[:place], tools=tools, prompt=True)
    text = template.render(messages[: place + 1], tools=tools)
    prompt, ids = template.encode(prompt_text), template.encode(text)
    start = len(prompt)
    if not _begins(ids, prompt):
        ids = np.concatenate([prompt, _continuation(prompt, prompt_text, text, messages[place], template)])
    end = start + template.turn_end(ids[start:])
    if options.include_reasoning:
        return _Turn(ids, end, [(start, end)])
    return _Turn(ids, end, [(min(_answer_start(messages, place, tools, template, ids, start), end - 1), end)])


def _begins(ids: np.ndarray, prefix: np.ndarray) -> bool:
    return np.array_equal(ids[: len(prefix)], prefix)


def _continuation(prompt: np.ndarray, prompt_text: str, text: str, message: dict[str, Any], template: ChatTemplate) -> np.ndarray:
    """What the model would generate after the prompt, where tokenising both as one merges tokens across the prompt's end."""
    if text.startswith(prompt_text):
        return template.encode(text[len(prompt_text) :])
    content = message["content"]
    if isinstance(content, str) and not message.get("tool_calls"):
        # The prompt opens the turn (a thought's opener), the data has the opener too, the template renders neither twice.
        answer = template.encode(content)
        for shared in range(min(len(prompt), len(answer), _LONGEST_OPENER), 0, -1):
            if _begins(answer, prompt[-shared:]) and template.added_ids.intersection(answer[:shared].tolist()):
                return np.concatenate([answer[shared:], np.array(template.closing, dtype=np.int32)])
    raise RowSkipped("prompt_not_prefix", f"expected a rendering that begins as the prompt, which ends in {prompt_text[-40:]!r}")


def _answer_start(
    messages: list[dict[str, Any]], place: int, tools: list[dict[str, Any]] | None, template: ChatTemplate, ids: np.ndarray, start: int
) -> int:
    """Where the reasoning ends: as far as the turn agrees with itself without its answer."""
    message = messages[place]
    content = message["content"] if isinstance(message["content"], str) else ""
    thought, closer, _ = content.rpartition("</think>")
    if not closer and not message.get("reasoning_content"):
        return start
    bare = {key: value for key, value in message.items() if key != "tool_calls"} | {"content": thought + closer}
    other = template.encode(template.render([*messages[:place], bare], tools=tools))
    shorter = min(len(ids), len(other))
    differing = np.flatnonzero(ids[:shorter] != other[:shorter])
    return max(int(differing[0]) if len(differing) else shorter, start)


def _grouped(turns: list[_Turn]) -> list[_Turn]:
    """Turns whose ids are a prefix of a later turn's join that one; the rest stay alone. In turn order."""
    groups: list[_Turn] = []
    for turn in reversed(turns):
        host = next((group for group in reversed(groups) if _begins(group.ids, turn.ids[: turn.end])), None)
        if host is None:
            groups.append(turn)
        else:
            host.spans[:0] = turn.spans
    return groups[::-1]


def _chosen(groups: list[_Turn], options: TokeniseOptions) -> list[_Turn]:
    if len(groups) > 1 and options.rewritten_history == "skip":
        raise RowSkipped("rewritten_history", f"{len(groups)} turns would need samples of their own")
    return groups[-1:] if options.rewritten_history == "last" else groups


def _sample(turn: _Turn, template: ChatTemplate, options: TokeniseOptions) -> Sample:
    ids, spans = turn.ids, turn.spans
    too_long = len(ids) > options.max_tokens
    if too_long:
        spans = [span for span in spans if span[1] <= options.max_tokens] if options.over_long == "cut" else []
        if not spans:
            raise RowSkipped("too_long", f"expected at most {options.max_tokens} tokens, found {len(ids)}")
        ids = ids[: spans[-1][1]]
    bos = template.tokenizer.bos_token_id
    if bos is not None and ids[:2].tolist() == [bos, bos]:
        raise RowSkipped("doubled_bos", f"the first two tokens are both {bos}")
    mask = np.zeros(len(ids), dtype=np.uint8)
    for first, end in spans:
        mask[first:end] = 1
    if not mask.any():
        raise RowSkipped("no_targets", f"none of {len(ids)} tokens is a target")
    return Sample(ids, mask, cut=too_long)

"""Loss masks by token prefixes.

An assistant turn's ids are those that the server would see (`turn.py`). The tokens after the prompt
are supervised. A turn shares the sample of a later turn exactly if its ids are a prefix of the
later turn's ids. Where a template rewrites history (Qwen3 drops earlier thoughts), or where tokens
merge across the prompt's end, the turn gets a sample of its own.
"""

import dataclasses
from typing import Any

import numpy as np

from draftstates.tokens.content import ContentCheck
from draftstates.tokens.conversations import Conversation
from draftstates.tokens.rows import RowSkipped
from draftstates.tokens.sources import TokeniseOptions
from draftstates.tokens.template import ChatTemplate
from draftstates.tokens.turn import Turn, begins, make_turn


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """A tokenised conversation or turn.

    Attributes:
        input_ids: int32 [T].
        loss_mask: uint8 [T].
        cut: whether turns beyond max_tokens were left out.
        logprobs: of answers by the target model, the log probability of each supervised token as
            the server that sampled it reported it, float32 [n].
        temperature: the temperature of these log probabilities; 0 for none.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    cut: bool = False
    logprobs: np.ndarray | None = None
    temperature: float | None = None


def tokenise_conversation(
    conversation: Conversation,
    template: ChatTemplate,
    options: TokeniseOptions,
    not_used: set[str] | None = None,
) -> tuple[list[Sample], list[RowSkipped]]:
    """Return a conversation's samples in turn order, and the reasons of turns without a sample.

    Args:
        conversation: the conversation.
        template: the template that renders it.
        options: options of the source.
        not_used: names of the content that is in no sample though there are samples are added.

    Raises:
        RowSkipped: the conversation has no sample, or some of its content is not rendered.
    """
    not_used = set() if not_used is None else not_used
    template = template.variant(conversation)
    not_used.update(
        f"chat_template_kwargs: {name}" for name in template.unread(conversation.arguments)
    )
    may_drop = frozenset(options.may_drop)
    messages = template.prepared(conversation, may_drop=may_drop, not_used=not_used)
    places = _places(messages, conversation, options, not_used)
    tools = conversation.tools
    lost: list[RowSkipped] = []
    if (fitting := _fitting(messages, tools, template, options)) < len(messages):
        lost.append(
            RowSkipped(
                "too_long",
                f"expected at most {options.max_tokens} tokens, found so much text in messages 0 to"
                f" {fitting} that it was not tokenised",
            )
        )
        places = [place for place in places if place < fitting]
        if options.over_long == "skip" or not places:
            raise lost[0]
    if tools and not template.shows_tools(messages[: places[0]], tools):
        if "tools" not in may_drop:
            raise RowSkipped("not_rendered", "the chat template ignores the tools", ("tools",))
        tools = None
        not_used.add("tools")
    check = ContentCheck(
        messages,
        tools,
        template.rendering,
        reasoning_key=template.reasoning_key,
        may_drop=may_drop,
        not_used=not_used,
    )
    turns = []
    for place in places:
        try:
            is_open = place in conversation.open_turns
            turns.append(make_turn(messages, place, tools, template, options, check, is_open))
        except RowSkipped as error:
            if error.reason == "not_rendered":
                raise
            lost.append(error)
    samples = []
    for turn in _chosen(_grouped(turns), options, not_used):
        try:
            samples.append(_sample(turn, template, options))
        except RowSkipped as error:
            lost.append(error)
    if not samples:
        raise lost[0]
    not_used.update(f"turns left out: {error.reason}" for error in lost)
    return samples, lost


def _places(
    messages: list[dict[str, Any]],
    conversation: Conversation,
    options: TokeniseOptions,
    not_used: set[str],
) -> list[int]:
    """Return the numbers of the messages that are learnt; name those that are in no sample."""
    if not messages:
        raise RowSkipped("empty", "expected messages, found none")
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    places = [index for index in answers if index > 0]
    if not places:
        raise RowSkipped(
            "no_assistant", f"found only {', '.join(message['role'] for message in messages[:8])}"
        )
    if options.train_on == "last":
        places = places[-1:]
    places = [place for place in places if place not in conversation.unsupervised]
    if not places:
        raise RowSkipped(
            "no_supervised_tokens", "the row says of each answer that it is not to be learnt"
        )
    if answers[0] == 0 and 0 not in conversation.unsupervised:
        not_used.add("messages[0], an answer to nothing: rendered, not supervised")
    if places[-1] < len(messages) - 1:
        not_used.add("messages after the last answer that is learnt")
    return places


def _fitting(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    template: ChatTemplate,
    options: TokeniseOptions,
) -> int:
    """Return how many messages may fit.

    To encode a text that cannot takes minutes and gigabytes.
    """
    room = options.max_tokens * template.most_characters - _characters(tools)
    for index, message in enumerate(messages):
        room -= _characters(message)
        if room < 0:
            return index
    return len(messages)


def _characters(value: object) -> int:
    total, pending = 0, [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, (dict, list)):
            pending += item.values() if isinstance(item, dict) else item
    return total


def _grouped(turns: list[Turn]) -> list[Turn]:
    """Join each turn whose ids are a prefix of a later turn's ids to the later turn.

    The other turns stay alone. The result is in turn order.
    """
    groups: list[Turn] = []
    for turn in reversed(turns):
        host = next(
            (group for group in reversed(groups) if begins(group.ids, turn.ids[: turn.end])), None
        )
        if host is None:
            groups.append(turn)
        else:
            host.spans[:0] = turn.spans
    return groups[::-1]


def _chosen(groups: list[Turn], options: TokeniseOptions, not_used: set[str]) -> list[Turn]:
    if len(groups) > 1 and options.rewritten_history == "skip":
        raise RowSkipped(
            "rewritten_history", f"{len(groups)} turns would need samples of their own"
        )
    if options.rewritten_history == "last" and len(groups) > 1:
        not_used.add("turns before the last, which the template rewrites")
        return groups[-1:]
    return groups


def _sample(turn: Turn, template: ChatTemplate, options: TokeniseOptions) -> Sample:
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

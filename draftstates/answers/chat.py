"""A conversation with the target model: the ids of each prompt, and what an answer says.

The next prompt goes on from the sampled ids where the template leaves the answer as the model wrote
it. Where it rewrites history (Qwen3 drops earlier thoughts), or where the answer's text is not what
the template would write, the prompt is rendered as a server would see it that gets the messages.
"""

import contextlib
import dataclasses
import json
from typing import Any

import numpy as np

from draftstates.answers.parser import Parser
from draftstates.answers.prompts import SPARE, Prompt
from draftstates.config import Answers
from draftstates.tokens.answered import LENGTH
from draftstates.tokens.rows import RowSkipped
from draftstates.tokens.template import ChatTemplate

# an answer repeats itself if it has this many tokens and its last ones are all the same
_FEWEST, _REPEATED = 5, 32


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """What the server sampled.

    Attributes:
        output_ids: sampled ids, the end token included.
        logprobs: log probability of each.
        finish: `stop` or `length`.
        cached_tokens: tokens of the prompt whose rows the server had already.
    """

    output_ids: list[int]
    logprobs: list[float]
    finish: str
    cached_tokens: int


class Chat:
    """One conversation with the target model.

    Attributes:
        prompt_ids: the ids to send next, int32 [T]; None when the conversation is over.
    """

    def __init__(
        self,
        prompt: Prompt,
        template: ChatTemplate,
        parser: Parser,
        options: Answers,
        *,
        max_tokens: int,
    ) -> None:
        """Begin a conversation.

        Args:
            prompt: the row's prompt.
            template: the prompt's template.
            parser: what reads the model's answers.
            options: the source's `answers`.
            max_tokens: most tokens of a sample.
        """
        self._template, self._options, self._most = template, options, max_tokens - SPARE
        self._parser = parser
        self._prompt, self._turn = prompt, 0
        self._messages = prompt.messages[: prompt.places[0]]
        first = template.rendering.rendered(self._messages, tools=prompt.tools, prompt=True)
        self._text = first.text
        self.prompt_ids: np.ndarray | None = first.ids

    @property
    def room(self) -> int:
        """Most tokens that the next answer may have."""
        most = self._options.sampling.max_new_tokens
        return min(most, self._most - len(self.prompt_ids))

    @property
    def stop_ids(self) -> list[int]:
        """Tokens that end the answer; of two templates, the one for tools may have others."""
        return sorted(self._template.ends.ids)

    def add(self, reply: Reply) -> dict[str, Any]:
        """Take the answer to `prompt_ids`, and find the next prompt.

        Returns:
            The answer as a row of `answered.ANSWERS`, without the prompt's id and the sample.
        """
        ids, ended = reply.output_ids, reply.finish != LENGTH
        body = ids[:-1] if ended and ids and ids[-1] in self._template.ends.ids else ids
        said = self._decode(body)
        message, calls = self._read(ids, body, said)
        row = {
            "turn": self._turn,
            "prompt_ids": self.prompt_ids,
            # a job holds all answers of its chunk, and a list takes ten times the room
            "output_ids": np.array(ids, dtype=np.int32),
            "logprobs": np.array(reply.logprobs, dtype=np.float32),
            "temperature": self._options.sampling.temperature,
            "finish": reply.finish,
            "cached_tokens": reply.cached_tokens,
            "text": message["content"],
            "reasoning": message.get("reasoning_content"),
            "calls": json.dumps(calls, ensure_ascii=False) if calls else None,
            "fault": _fault(body, message, calls, is_cut=not ended),
        }
        try:
            self._go_on(ids, body, said, message, calls, is_cut=not ended)
            stopped = None
        except RowSkipped as reason:
            self.prompt_ids, stopped = None, reason.reason
        return row | {"stopped": stopped}

    def _decode(self, ids: list[int]) -> str:
        return self._template.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _read(
        self, ids: list[int], body: list[int], said: str
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return an answer as a message of the chat format, and its calls."""
        asked = {"tools": self._prompt.tools, "prompt": self.prompt_ids}
        found = self._parser.parse(body, **asked)
        if any(call.status.name != "OK" for call in found.tool_calls):
            # the end token may belong to the call, as gpt-oss's <|call|> does
            found = self._parser.parse(ids, **asked)
        calls = [
            {
                "name": call.name,
                "arguments": call.arguments,
                **({} if call.status.name == "OK" else {"raw": call.raw}),
            }
            for call in found.tool_calls
        ]
        message = {"role": "assistant", "content": found.content}
        if found.reasoning_content is not None:
            # as a server hands them to its client: without the blanks between them
            message["content"] = found.content.strip()
            message["reasoning_content"] = found.reasoning_content.strip()
        elif not calls:
            # as the model wrote it, blanks included
            message["content"] = said
        return message, calls

    def _go_on(
        self,
        ids: list[int],
        body: list[int],
        said: str,
        message: dict[str, Any],
        calls: list[dict[str, Any]],
        *,
        is_cut: bool,
    ) -> None:
        """Find the next prompt; the conversation is over where the data has no further turn.

        Raises:
            RowSkipped: the conversation ends before the data's does; the reason says why.
        """
        prompt, places = self._prompt, self._prompt.places
        place, self._turn = places[self._turn], self._turn + 1
        if self._turn == len(places):
            self.prompt_ids = None
            return
        if is_cut and self._options.truncated == "skip":
            raise RowSkipped("truncated", "the turn before was cut")
        following = prompt.messages[place + 1 : places[self._turn]]
        self._check_calls(prompt.messages[place], following, calls)
        if calls:
            message = {**message, "tool_calls": prompt.messages[place]["tool_calls"]}
        history = [*self._messages, self._template.forms.formed(message)]
        self._messages = [*history, *following]
        rendering = self._template.rendering
        next_prompt = rendering.rendered(self._messages, tools=prompt.tools, prompt=True)
        end = self._decode(ids[len(body) :])
        before = self._text + said + end
        self._text = next_prompt.text
        if next_prompt.text.startswith(before):
            # an answer that was cut gets its end here, with what the template puts behind it
            added = self._template.encode(next_prompt.text[len(before) :])
            sampled = np.array(ids, dtype=np.int32)
            self.prompt_ids = np.concatenate([self.prompt_ids, sampled, added])
        else:
            self.prompt_ids = next_prompt.ids
        if len(self.prompt_ids) >= self._most:
            raise RowSkipped("too_long", f"the next prompt has {len(self.prompt_ids)} tokens")

    def _check_calls(
        self,
        answer: dict[str, Any],
        following: list[dict[str, Any]],
        calls: list[dict[str, Any]],
    ) -> None:
        """Refuse to go on where calls have no result in the data, or results no call."""
        results = any(message["role"] == "tool" for message in following)
        if self._prompt.tools and not self._parser.reads_calls:
            raise RowSkipped("unread_calls", "no parser reads this model's calls")
        if bool(calls) != results:
            raise RowSkipped("tool_call", "expected a result for each call, and a call for each")
        if calls and not _same(calls, answer.get("tool_calls") or []):
            raise RowSkipped("tool_call", "the data has the results of other calls")


def _same(calls: list[dict[str, Any]], data: list[dict[str, Any]]) -> bool:
    """Return whether the model made the data's calls, in their order."""

    def plain(name: object, arguments: object) -> str:
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):
                arguments = json.loads(arguments)
        return json.dumps([name, arguments], sort_keys=True)

    functions = [call["function"] for call in data]
    theirs = [plain(each["name"], each["arguments"]) for each in functions]
    ours = [plain(each["name"], each["arguments"]) for each in calls if "raw" not in each]
    return len(ours) == len(calls) and ours == theirs


def _fault(
    body: list[int], message: dict[str, Any], calls: list[dict[str, Any]], *, is_cut: bool
) -> str | None:
    """Return the kind of a degenerate answer.

    Args:
        body: sampled ids without the end token.
        message: the answer.
        calls: its calls.
        is_cut: whether it was cut at its most tokens.
    """
    if not body:
        return "empty"
    if len(set(body[-_REPEATED:])) == 1 and len(body) >= _FEWEST:
        return "one token repeated"
    in_thought = is_cut and message.get("reasoning_content")
    if not calls and not message["content"].strip() and not in_thought:
        return "end without text"
    return None

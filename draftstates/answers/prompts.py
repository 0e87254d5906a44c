"""The prompts of a source: each row's conversation up to what the target model answers.

A prompt's id is a hash of the ids that the server will see, with a stand-in for each answer: one
without a thought, and such with one. So a change of the template, the tokenizer or the row that
changes no id answers nothing a second time.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from draftstates import ids
from draftstates.errors import UserError
from draftstates.files import publishing
from draftstates.plan.boundaries import segment
from draftstates.records import PromptChunk, Prompts
from draftstates.tokens.answered import PROMPTS
from draftstates.tokens.content import ContentCheck
from draftstates.tokens.conversations import Conversation, TokenRow
from draftstates.tokens.rows import Row, RowSkipped
from draftstates.tokens.sources import TokeniseOptions
from draftstates.tokens.template import ChatTemplate
from draftstates.tokens.tokenise import Pipeline, first_and_others, origin_of, results_of

_DOMAIN = b"draftstates.prompt.v1\0"
# what stands for an answer that is not sampled yet
STAND_IN = {"role": "assistant", "content": "Yes"}
# earlier answers with a thought, read by a parser or left in the text, and with blanks around it
_THOUGHTFUL = (
    {"role": "assistant", "content": "Yes", "reasoning_content": "Sure."},
    {"role": "assistant", "content": "<think>\nSure.\n</think>\n\nYes\n"},
)
_GROUP_ROWS = 1024
# tokens of its context that the server keeps free behind a prompt with its answer
SPARE = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """A row's conversation as the target model is asked it.

    Attributes:
        messages: messages as the template takes them.
        places: numbers of the messages that the target model answers, ascending; the message itself
            may be missing at the end.
        tools: tools that are offered to the model.
        arguments: the row's own arguments for the template.
    """

    messages: list[dict[str, Any]]
    places: list[int]
    tools: list[dict[str, Any]] | None
    arguments: dict[str, Any]

    @property
    def conversation(self) -> Conversation:
        """The prompt as a conversation, by which its template is chosen."""
        return Conversation(self.messages, self.tools, arguments=self.arguments)

    def as_text(self) -> str:
        """Return the prompt as JSON."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)

    @classmethod
    def from_text(cls, text: str) -> "Prompt":
        """Return the prompt in a text of `as_text`."""
        return cls(**json.loads(text))


@dataclasses.dataclass(frozen=True, slots=True)
class PromptResult:
    """A row's prompt with its id, or the reason why it has none."""

    number: int
    where: str
    prompt: Prompt | None = None
    prompt_id: str = ""
    skipped: RowSkipped | None = None
    not_used: tuple[str, ...] = ()


class PromptPipeline(Pipeline):
    """The work of one process: from a row to its prompt."""

    def process(self, row: Row) -> PromptResult:
        """Turn a row into its prompt; a bad row raises no error."""
        try:
            parsed = self._parsed(row)
            self._draw(parsed)
            if isinstance(parsed, TokenRow):
                raise RowSkipped("no_prompt", "expected messages, found tokens")
            not_used = set(parsed.not_used)
            template = self.template_for(parsed)
            prompt, name = _prompt(parsed, template, self.options, not_used)
        except RowSkipped as skipped:
            return PromptResult(row.number, row.where, skipped=skipped)
        except Exception as error:
            error.add_note(f"while rendering the prompt of {row.where}")
            raise
        return PromptResult(row.number, row.where, prompt, name, not_used=tuple(sorted(not_used)))


def _prompt(
    parsed: Conversation, template: ChatTemplate, options: TokeniseOptions, not_used: set[str]
) -> tuple[Prompt, str]:
    """Return a conversation's prompt and its id.

    Raises:
        RowSkipped: there is nothing to answer, or the template leaves something out.
    """
    places = _places(parsed.messages)
    if options.answers.turns == "last":
        places = places[-1:]
    kept = parsed.messages[: places[-1]]
    if len(parsed.messages) > places[-1]:
        not_used.add("answers of the data, and what follows the last: the target model answers")
    for place in places[:-1]:
        # a call of the data stays, since its result does
        if not kept[place].get("tool_calls"):
            kept = [*kept[:place], STAND_IN, *kept[place + 1 :]]
    open_turns = parsed.open_turns - set(places)
    may_drop = frozenset(options.may_drop)
    asked = dataclasses.replace(parsed, messages=kept, open_turns=open_turns)
    template = template.variant(asked)
    messages = template.prepared(asked, may_drop=may_drop, not_used=not_used)
    tools = parsed.tools
    if tools and not template.shows_tools(messages[: places[0]], tools):
        if "tools" not in may_drop:
            raise RowSkipped("not_rendered", "the chat template ignores the tools", ("tools",))
        tools = None
        not_used.add("tools")
    check = ContentCheck(
        [*messages, STAND_IN],
        tools,
        template.rendering,
        reasoning_key=template.reasoning_key,
        may_drop=may_drop,
        not_used=not_used,
    )
    digest = hashlib.sha256(_DOMAIN + json.dumps(sorted(template.ends.ids)).encode())
    for place in places:
        prompt = template.rendering.rendered(messages[:place], tools=tools, prompt=True)
        turn = [*messages, STAND_IN][: place + 1]
        check.see(place, prompt.text, template.rendering.text(turn, tools=tools))
        if place == places[0]:
            _check_ids(prompt.ids, template.tokenizer.bos_token_id, options.max_tokens - SPARE)
        digest.update(len(prompt.ids).to_bytes(8, "little") + prompt.ids.astype("<i4").tobytes())
    for history in _thoughtful(template, messages, places):
        for place in places[1:]:
            try:
                seen = template.rendering.rendered(history[:place], tools=tools, prompt=True).ids
            except RowSkipped as skipped:
                # the conversation would end there
                digest.update(skipped.detail.encode(errors="replace"))
            else:
                digest.update(len(seen).to_bytes(8, "little") + seen.astype("<i4").tobytes())
    return Prompt(messages, places, tools, parsed.arguments), digest.hexdigest()[:32]


def _thoughtful(
    template: ChatTemplate, messages: list[dict[str, Any]], places: list[int]
) -> Iterator[list[dict[str, Any]]]:
    """Yield the messages with thoughts in earlier answers: a template may change these alone."""
    for stand_in in _THOUGHTFUL if len(places) > 1 else ():
        history = list(messages)
        for place in places[:-1]:
            calls = messages[place].get("tool_calls")
            answer = {**stand_in, "tool_calls": calls} if calls else stand_in
            history[place] = template.forms.formed(answer)
        yield history


def _places(messages: list[dict[str, Any]]) -> list[int]:
    """Return the numbers of the messages that the target model answers."""
    asking = ("user", "tool")
    places = [
        index + 1
        for index, message in enumerate(messages)
        if message["role"] in asking
        and (index + 1 == len(messages) or messages[index + 1]["role"] == "assistant")
    ]
    if not places:
        found = ", ".join(message["role"] for message in messages[:8]) or "no messages"
        raise RowSkipped("no_prompt", f"expected a user's message to answer, found {found}")
    return places


def _check_ids(prompt: np.ndarray, bos: int | None, room: int) -> None:
    if len(prompt) >= room:
        raise RowSkipped(
            "too_long", f"expected a prompt of less than {room} tokens, found {len(prompt)}"
        )
    if bos is not None and prompt[:2].tolist() == [bos, bos]:
        raise RowSkipped("doubled_bos", f"the first two tokens are both {bos}")


def write_prompts(
    *,
    source: str,
    paths: list[Path],
    tokenizer_path: Path,
    options: TokeniseOptions,
    output: Path,
    workers: int = 1,
) -> Prompts:
    """Write a source's prompts and cut them into chunks.

    Args:
        source: the source's name.
        paths: the source's files, in order.
        tokenizer_path: folder with tokenizer and chat template.
        options: options of the source, with `answers`.
        output: Parquet file to write, see `answered.PROMPTS`; the document `Prompts` appears beside
            it.
        workers: number of processes; the result does not depend on it.

    Raises:
        UserError: a file cannot be read, the template cannot be used, or there is no prompt.
    """
    if options.answers is None:
        raise UserError(f"data.sources: source {source} has no key answers")
    pipeline = PromptPipeline(tokenizer_path, options)
    template = pipeline.template
    results = results_of(pipeline, *first_and_others(paths, limit=options.limit), workers)
    seen: dict[str, int] = {}
    names: list[str] = []
    with (
        publishing(output) as partial,
        pq.ParquetWriter(partial, PROMPTS, compression="zstd", write_page_checksum=True) as writer,
    ):
        group: list[dict[str, Any]] = []
        for result in results:
            row = _row(result, seen, deduplicate=options.deduplicate)
            names.append(row["prompt_id"] or "")
            group.append(row)
            if len(group) == _GROUP_ROWS:
                writer.write_table(pa.Table.from_pylist(group, schema=PROMPTS))
                group = []
        writer.write_table(pa.Table.from_pylist(group, schema=PROMPTS))
        if not seen:
            why = f"{row['where']}: {row['reason']}: {row['detail']}" if names else "no rows"
            raise UserError(f"source {source}: not one of {len(names)} rows has a prompt: {why}")
    prompts = Prompts(
        source=source,
        rows=len(names),
        renderer=template.name,
        chunks=tuple(_chunks(names, about=options.answers.chunk)),
        data=origin_of(paths),
    )
    prompts.publish(output.with_suffix(".json"))
    return prompts


def _row(result: PromptResult, seen: dict[str, int], *, deduplicate: bool) -> dict[str, Any]:
    """Return a row of the file, with an id that no earlier prompt has."""
    skipped, name = result.skipped, result.prompt_id
    if skipped is None and name in seen:
        if deduplicate:
            skipped = RowSkipped("duplicate", f"the same prompt as row {seen[name]}")
        while name in seen:
            # the same prompt is answered once more
            name = hashlib.sha256(f"{name}\0again".encode()).hexdigest()[:32]
    if skipped is not None:
        found = {"reason": skipped.reason, "detail": skipped.detail[:500], "kinds": skipped.kinds}
        return {"row": result.number, "where": result.where, "prompt_id": None, **found}
    seen[name] = result.number
    return {
        "row": result.number,
        "where": result.where,
        "prompt_id": name,
        "not_used": result.not_used,
        "conversation": result.prompt.as_text(),
    }


def _chunks(names: list[str], *, about: int) -> Iterator[PromptChunk]:
    """Cut rows into chunks by the ids of their prompts: a change moves only the cuts beside it.

    Args:
        names: the prompt's id of each row; empty for a row without one.
        about: mean number of prompts of a chunk.
    """
    places = [place for place, name in enumerate(names) if name]
    found = [names[place] for place in places]
    least = max(about // 2, 1)
    cuts = segment(found, np.ones(len(found), np.int64), min_bytes=least, max_bytes=4 * least)
    for first, end in cuts:
        yield PromptChunk(
            chunk_id=ids.shard_id(found[first:end]),
            # rows without a prompt belong to the chunk before them
            first=places[first] if first else 0,
            end=places[end] if end < len(places) else len(names),
            prompts=end - first,
        )

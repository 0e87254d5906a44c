"""The answers to one chunk of prompts, from the server into one file."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from draftstates import ids
from draftstates.answers.chat import Chat, Reply
from draftstates.answers.client import AnswerClient, NoAnswer
from draftstates.answers.journal import JOURNAL, Journal, Key, earlier_answers
from draftstates.answers.parser import Parser
from draftstates.answers.prompts import Prompt
from draftstates.errors import UserError
from draftstates.extract.progress import ProgressFile
from draftstates.paths import BUILDING
from draftstates.records import PromptChunk, Prompts
from draftstates.tokens.answered import read_prompts, write_answers
from draftstates.tokens.sources import TokeniseOptions
from draftstates.tokens.tokenise import Pipeline

_SHOWN = 20
_WATCH_SECONDS = 2.0


def answer_chunk(
    chunk_id: str,
    *,
    prompts: Path,
    tokenizer_path: Path,
    options: TokeniseOptions,
    url: str | None,
    api_key: str | None = None,
    failed: Path | None = None,
    output: Path,
) -> dict[str, float] | None:
    """Have a server answer a chunk's prompts.

    Args:
        chunk_id: the chunk.
        prompts: the source's file of prompts; the document `Prompts` lies beside it.
        tokenizer_path: folder with tokenizer and chat template.
        options: options of the source, with `answers`.
        url: address of the server; None takes all answers from the disk.
        api_key: its key, if it has one.
        failed: file that exists once the server has failed; None where nobody watches it.
        output: Parquet file to write, see `answered.ANSWERS`, in the folder of the answers' key;
            its journal is in `.building` in that folder, and stays there: Snakemake removes the
            output of a job that is killed at its end.

    Returns:
        Figures: answers, those that were there already, sampled tokens and seconds; None if an
        answer is missing on the disk and `url` is None.

    Raises:
        UserError: the chunk is not in the document, or the server has failed; or names the
            prompts that got no answer.
    """
    plan, chunk = _find_chunk(prompts, chunk_id)
    rows = [row for row in read_prompts(prompts, chunk.first, chunk.end) if row["prompt_id"]]
    asked = {row["prompt_id"]: Prompt.from_text(row["conversation"]) for row in rows}
    building = output.parent / BUILDING / chunk_id
    with Journal(building / JOURNAL) as journal:
        known = journal.answers
        known |= earlier_answers(
            output.parent, wanted=asked, planned=[each.chunk_id for each in plan.chunks]
        )
        begun = {(name, sample) for name, sample, *_ in known}
        conversations = len(asked) * options.answers.samples
        if url is None and len(begun) < conversations:
            return None
        work = _Work(Pipeline(tokenizer_path, options))
        progress = ProgressFile(
            building, shard_id=chunk_id, total=conversations, server=url or "none"
        )
        began, begin = time.time(), time.monotonic()
        asking = work.all(asked, known, journal, progress, url, api_key)
        try:
            answers = asyncio.run(_unless_failed(asking, failed, progress))
        except _Unasked:
            progress.remove()
            return None
        facts = {
            "began": began,
            "seconds": round(time.monotonic() - begin, 3) if work.sampled else 0.0,
            "answers": len(answers),
            "sampled_tokens": work.sampled,
        }
        write_answers(answers, facts, output)
    progress.remove()
    return facts


def _find_chunk(prompts: Path, chunk_id: str) -> tuple[Prompts, PromptChunk]:
    """Return what a source's prompts are, and one chunk of them.

    Args:
        prompts: the source's file of prompts.
        chunk_id: the chunk.

    Raises:
        UserError: the document is missing or damaged, or has no such chunk.
    """
    plan = Prompts.read(prompts.with_suffix(".json"))
    for chunk in plan.chunks:
        if chunk.chunk_id == chunk_id:
            return plan, chunk
    raise UserError(
        f"{prompts}: chunk {chunk_id} is not among its {len(plan.chunks)}: other prompts have"
        " replaced them; run snakemake --cores all"
    )


async def _unless_failed(
    work: Coroutine[Any, Any, list[dict[str, Any]]], failed: Path | None, progress: ProgressFile
) -> list[dict[str, Any]]:
    """Return what `work` returns, unless the server fails meanwhile.

    A server whose node has lost its power closes no connection. Meanwhile the progress says that
    the job lives, since an answer may take long.

    Raises:
        UserError: it has failed.
    """
    working = asyncio.create_task(work)
    try:
        while not working.done():
            if failed is not None and failed.exists():
                raise UserError("the server has failed; the answers that it gave are kept")
            progress.add(0)
            await asyncio.wait({working}, timeout=_WATCH_SECONDS)
        return working.result()
    finally:
        working.cancel()


class _Unasked(Exception):
    """The end of a job that has to ask a server, and has none."""


class _Work:
    """The conversations of one chunk.

    Attributes:
        sampled: tokens that were sampled in this job.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._options, self._pipeline = pipeline.options, pipeline
        self._parser = Parser(pipeline.template)
        self.sampled = 0

    async def all(
        self,
        asked: Mapping[str, Prompt],
        known: dict[Key, Reply],
        journal: Journal,
        progress: ProgressFile,
        url: str | None,
        api_key: str | None,
    ) -> list[dict[str, Any]]:
        """Return the answers to all prompts, in the order of prompts, samples and turns.

        A prompt that gets no answer keeps no other one waiting: the others are finished first.
        """
        wanted = self._options.answers
        room = asyncio.Semaphore(wanted.in_flight)
        failed: dict[str, str] = {}

        async def converse(name: str, sample: int) -> list[dict[str, Any]]:
            async with room:
                try:
                    return await self._converse(client, asked[name], name, sample, known, journal)
                except NoAnswer as error:
                    failed.setdefault(name, str(error))
                    return []
                finally:
                    progress.add(1)

        asker = (
            AnswerClient(url, api_key=api_key, sampling=wanted.sampling)
            if url
            else contextlib.nullcontext()
        )
        async with asker as client:
            each = itertools.product(asked, range(wanted.samples))
            found = await asyncio.gather(*(converse(*which) for which in each))
        if failed:
            lines = [f"  prompt {name}: {why}" for name, why in list(failed.items())[:_SHOWN]]
            raise UserError(
                "\n".join(
                    [
                        f"{len(failed)} of {len(asked)} prompts got no answer; the other answers"
                        " are kept, and the next run asks for these alone:",
                        *lines,
                    ]
                )
            )
        return list(itertools.chain.from_iterable(found))

    async def _converse(
        self,
        client: AnswerClient | None,
        prompt: Prompt,
        name: str,
        sample: int,
        known: dict[Key, Reply],
        journal: Journal,
    ) -> list[dict[str, Any]]:
        """Return the answers of one conversation, each on the disk before the next is asked for."""
        options = self._options
        asked = prompt.conversation
        template = self._pipeline.template_for(asked).variant(asked)
        chat = Chat(prompt, template, self._parser, options.answers, max_tokens=options.max_tokens)
        answers: list[dict[str, Any]] = []
        while chat.prompt_ids is not None:
            key = (name, sample, len(answers), ids.ids_hash(chat.prompt_ids))
            reply = known.pop(key, None)
            if reply is None and client is None:
                raise _Unasked
            if reply is None:
                reply = await client.answer(chat.prompt_ids, room=chat.room, stop_ids=chat.stop_ids)
                await journal.add(key, reply)
                self.sampled += len(reply.output_ids)
            answers.append({"prompt_id": name, "sample": sample, **chat.add(reply)})
        return answers

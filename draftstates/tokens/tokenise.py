"""The tokeniser: from a source's rows to a Parquet file of samples and the accounting of each row.

`tokenise_source` is the whole way. `Pipeline` is the work on one row, which worker processes share.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from draftstates.errors import UserError
from draftstates.ids import keyed_fraction, sample_id
from draftstates.model.folder import ModelFolder
from draftstates.tokens.accounting import RowCounter, RowResult
from draftstates.tokens.answered import AnsweredRows
from draftstates.tokens.conversations import Conversation, TokenRow, parse_row
from draftstates.tokens.encoder import load_tokenizer
from draftstates.tokens.files import SampleWriter, publish_accounting
from draftstates.tokens.hub_data import is_record, read_record
from draftstates.tokens.rows import Row, RowSkipped, read_rows, shown
from draftstates.tokens.sources import TokeniseOptions
from draftstates.tokens.template import ChatTemplate
from draftstates.tokens.turns import Sample, tokenise_conversation

_CHUNK_ROWS = 128
# a few chunks are in memory for each process
_CHUNK_BYTES = 4 << 20
# what renders a source of tokens
NO_RENDERER = "none, the rows are tokens"
_PROGRESS_SECONDS = 5.0
# most sets of rows' own arguments whose templates are kept
_VARIANTS = 64
# a worker process inherits it from its parent, tokenizer included
_pipeline: "Pipeline | None" = None


def tokenise_source(
    *,
    name: str,
    paths: list[Path],
    tokenizer_path: Path,
    options: TokeniseOptions,
    output: Path,
    accounting: Path,
    workers: int = 1,
) -> dict[str, Any]:
    """Tokenise one source.

    Args:
        name: the source's name, for messages and the accounting.
        paths: the source's files, in order; of a source with `answers`, the folder of these.
        tokenizer_path: folder with tokenizer and chat template.
        options: options of the source.
        output: Parquet file to write, one row a sample in the source's order: `row` int64, `part`
            int32, `sample_id` string, `input_ids` list<int32>, `loss_mask` list<uint8>; `logprobs`
            list<float32> and `temperature` float32 of answers by the target model.
        accounting: JSON file to write, see `RowCounter.as_dict`.
        workers: number of processes; the result does not depend on it.

    Returns:
        The accounting, with `rows_in == kept + sum(skipped)`.

    Raises:
        UserError: a file cannot be read, the template cannot be used, too many rows are bad, or
            no row is kept. Then no file has its final name.
    """
    answered = AnsweredRows(paths[0], options) if options.answers else None
    if answered:
        renderer, data = answered.prompts.renderer, answered.prompts.data
        results = answered.results()
    else:
        pipeline, data = Pipeline(tokenizer_path, options), origin_of(paths)
        first, chunks = first_and_others(paths, limit=options.limit)
        # a wrong tokenizer is reported before rows are tokenised; rows of tokens need none
        rendered = pipeline.needs_template(first)
        renderer = pipeline.template.name if rendered else NO_RENDERER
        if rendered and pipeline.template.why:
            print(f"{name}: rendered by {renderer}, since {pipeline.template.why}", file=sys.stderr)
        results = results_of(pipeline, first, chunks, workers)
    counts = RowCounter(name, deduplicate=options.deduplicate)
    progress = _ProgressLines(name)
    with SampleWriter(output) as writer:
        for result in results:
            for part, sample_name, sample in counts.add(result):
                writer.add(row=result.number, part=part, sample_id=sample_name, sample=sample)
            progress.show(counts)
        counts.check(options.max_skipped_fraction)
        writer.finish(renderer)
    document = {**counts.as_dict(), "renderer": renderer, "data": data}
    if answered:
        document["answers"] = answered.account()
    publish_accounting(document, accounting, tokens=output)
    progress.show(counts, last=True)
    return document


def origin_of(paths: list[Path]) -> str:
    """Return the data set and commit of a source from the hub; empty for files."""
    record = read_record(paths[0]) if len(paths) == 1 and is_record(paths[0]) else None
    return f"{record['id']}@{record['revision']}" if record else ""


def first_and_others(
    paths: list[Path], *, limit: int | None
) -> tuple[list[Row], Iterator[list[Row]]]:
    """Return the first rows of the files, and an iterator over the others, in chunks."""
    chunks = _chunked(read_rows(paths, limit=limit))
    return next(chunks, []), chunks


def results_of(
    pipeline: "Pipeline", first: list[Row], chunks: Iterator[list[Row]], workers: int
) -> Iterator[RowResult]:
    """Yield the results in the rows' order; of several processes, few chunks are pending."""
    global _pipeline
    second = next(chunks, [])
    # a small source is done before a second process has started
    if workers < 2 or not second:
        for chunk in itertools.chain([first, second], chunks):
            yield from map(pipeline.process, chunk)
        return
    _pipeline = pipeline
    # each process has one thread, and the library must have no threads when this process forks
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        pending = collections.deque([pool.submit(_work, first), pool.submit(_work, second)])
        try:
            for chunk in chunks:
                pending.append(pool.submit(_work, chunk))
                if len(pending) > 3 * workers:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        except BrokenProcessPool:
            raise UserError(
                "a tokenising process ended abruptly; was it killed for want of memory?"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _chunked(rows: Iterator[Row]) -> Iterator[list[Row]]:
    chunk: list[Row] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += len(row.value) if isinstance(row.value, bytes) else 0
        if len(chunk) == _CHUNK_ROWS or size > _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _work(rows: list[Row]) -> list[RowResult]:
    assert _pipeline is not None
    return [_pipeline.process(row) for row in rows]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The tokenizer and the options by which a worker turns rows into samples."""

    tokenizer_path: Path
    options: TokeniseOptions
    _variants: dict[str, ChatTemplate] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @functools.cached_property
    def template(self) -> ChatTemplate:
        """The chat template, loaded when it is first used.

        Raises:
            UserError: the tokenizer or its template cannot be used.
        """
        options = self.options
        return ChatTemplate(
            self.tokenizer_path,
            chat_template=options.chat_template,
            renderer=options.renderer,
            arguments=options.template_arguments,
            end_tokens=options.end_tokens,
            today=options.template_date,
            trust_remote_code=options.trust_remote_code,
        )

    @functools.cached_property
    def vocabulary(self) -> tuple[int, int | None]:
        """The number of token ids of the model, and its beginning-of-sequence token.

        A row of tokens needs no template, and its ids may be any that the model has. Only a folder
        without a model asks the tokenizer.

        Raises:
            UserError: the tokenizer is needed and cannot be loaded.
        """
        model = ModelFolder(self.tokenizer_path)
        if model.exists() and "vocab_size" in model.text:
            begin = model.text.get("bos_token_id", model.config.get("bos_token_id"))
            return model.vocab_size, begin if isinstance(begin, int) else None
        tokenizer = load_tokenizer(
            self.tokenizer_path, trust_remote_code=self.options.trust_remote_code
        )
        return len(tokenizer), tokenizer.bos_token_id

    def needs_template(self, rows: Sequence[Row]) -> bool:
        """Return whether a source that begins with these rows holds anything but tokens."""
        holds_tokens = False
        for row in rows:
            with contextlib.suppress(RowSkipped):
                if isinstance(self._parsed(row), Conversation):
                    return True
                holds_tokens = True
        return not holds_tokens

    def _parsed(self, row: Row) -> Conversation | TokenRow:
        return parse_row(
            row.value,
            layout=self.options.format,
            columns=self.options.columns,
            roles=self.options.roles,
        )

    def template_for(self, conversation: Conversation) -> ChatTemplate:
        """Return the template, with the row's own arguments where it has some."""
        if not conversation.arguments:
            return self.template
        key = json.dumps(conversation.arguments, sort_keys=True, default=str)
        if key not in self._variants:
            if len(self._variants) >= _VARIANTS:
                self._variants.clear()
            self._variants[key] = self.template.with_arguments(conversation.arguments)
        return self._variants[key]

    def process(self, row: Row) -> RowResult:
        """Turn a row into its samples.

        A bad row raises no error: the reason is in `skipped` of the result.
        """
        try:
            parsed = self._parsed(row)
            self._draw(parsed)
            not_used = set(parsed.not_used)
            if isinstance(parsed, TokenRow):
                samples, lost = [self._checked(parsed)], []
            else:
                samples, lost = tokenise_conversation(
                    parsed, self.template_for(parsed), self.options, not_used
                )
        except RowSkipped as skipped:
            return RowResult(row.number, row.where, [], skipped)
        except Exception as error:
            error.add_note(f"while tokenising {row.where}")
            raise
        named = [(sample_id(sample.input_ids, sample.loss_mask), sample) for sample in samples]
        return RowResult(
            row.number,
            row.where,
            named,
            lost_turns=tuple(error.reason for error in lost),
            not_used=tuple(sorted(not_used)),
            kinds=parsed.kinds if isinstance(parsed, Conversation) else (),
        )

    def _draw(self, parsed: Conversation | TokenRow) -> None:
        if self.options.weight < 1:
            # what is chosen depends on the content alone, and not on the row's other columns
            fields = ("messages", "tools", "input_ids", "loss_mask")
            content = json.dumps(
                {name: getattr(parsed, name) for name in fields if hasattr(parsed, name)},
                sort_keys=True,
                default=str,
            )
            if keyed_fraction(content, key="draftstates.weight") >= self.options.weight:
                raise RowSkipped("not_sampled", f"outside the share of {self.options.weight}")

    def _checked(self, row: TokenRow) -> Sample:
        """Check a row that came as tokens: ids in range, a mask value for each, max_tokens."""
        ids, mask = row.input_ids, row.loss_mask
        size, bos = self.vocabulary
        if len(ids) != len(mask):
            raise RowSkipped("bad_tokens", f"{len(ids)} ids but {len(mask)} mask values")
        if not ids:
            raise RowSkipped("empty", "expected tokens, found none")
        for name, values, kinds, limit in (
            ("input_ids", ids, (int,), size),
            ("loss_mask", mask, (int, bool), 2),
        ):
            wrong = [
                value for value in values if type(value) not in kinds or not 0 <= value < limit
            ]
            if wrong:
                raise RowSkipped(
                    "bad_tokens",
                    f"{name}: expected whole numbers from 0 to {limit - 1}, found"
                    f" {shown(wrong[0])}",
                )
        if len(ids) > self.options.max_tokens:
            raise RowSkipped(
                "too_long", f"expected at most {self.options.max_tokens} tokens, found {len(ids)}"
            )
        if bos is not None and ids[:2] == [bos, bos]:
            raise RowSkipped("doubled_bos", f"the first two tokens are both {bos}")
        if not any(mask[1:]):
            raise RowSkipped(
                "no_supervised_tokens",
                f"none of {len(ids)} tokens after the first is supervised",
            )
        return Sample(np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=np.uint8))


class _ProgressLines:
    """Progress on stderr: rows and rate every few seconds, the accounting at the end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.start = self.shown = time.monotonic()

    def show(self, counts: RowCounter, *, last: bool = False) -> None:
        now = time.monotonic()
        if last:
            rate = counts.counts["rows_in"] / max(now - self.start, 1e-9)
            lines = [f"{counts.summary()}; {rate:,.0f} rows/s", *counts.not_used_lines()]
            print("\n".join(lines), file=sys.stderr)
        elif now - self.shown > _PROGRESS_SECONDS:
            self.shown = now
            rows = counts.counts["rows_in"]
            print(
                f"{self.name}: {rows:,} rows, {rows / (now - self.start):,.0f} rows/s",
                file=sys.stderr,
                flush=True,
            )

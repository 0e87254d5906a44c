"""The tokeniser: from a source to a Parquet file of samples and the accounting of every row."""

import collections
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from draftstates.errors import UserError
from draftstates.tokens.accounting import RowCounter
from draftstates.tokens.files import SampleWriter, publish_accounting
from draftstates.tokens.hub_data import is_record, read_record
from draftstates.tokens.pipeline import Pipeline, RowResult
from draftstates.tokens.rows import Row, read_rows
from draftstates.tokens.sources import TokeniseOptions

_CHUNK_ROWS = 128
# what renders a source of tokens
NO_RENDERER = "none, the rows are tokens"
_PROGRESS_SECONDS = 5.0
# a worker process inherits it from its parent, tokenizer included
_pipeline: Pipeline | None = None


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
        paths: the source's files, in order.
        tokenizer_path: folder with tokenizer and chat template.
        options: options of the source.
        output: Parquet file to write, one row a sample in the source's order: `row` int64, `part`
            int32, `sample_id` string, `input_ids` list<int32>, `loss_mask` list<uint8>.
        accounting: JSON file to write, see `RowCounter.as_dict`.
        workers: number of processes; the result does not depend on it.

    Returns:
        The accounting, with `rows_in == kept + sum(skipped)`.

    Raises:
        UserError: a file cannot be read, the template cannot be used, too many rows are bad, or
            no row is kept. Then no file has its final name.
    """
    pipeline = Pipeline(tokenizer_path, options)
    chunks = _chunked(read_rows(paths, limit=options.limit))
    first = next(chunks, [])
    # a wrong tokenizer is reported before rows are tokenised; rows of tokens need none
    rendered = pipeline.needs_template(first)
    renderer = pipeline.template.name if rendered else NO_RENDERER
    if rendered and pipeline.template.why:
        print(f"{name}: rendered by {renderer}, since {pipeline.template.why}", file=sys.stderr)
    counts = RowCounter(name, deduplicate=options.deduplicate)
    progress = _ProgressLines(name)
    with SampleWriter(output) as writer:
        for result in _results(pipeline, first, chunks, workers):
            for part, sample_id, sample in counts.add(result):
                writer.add(row=result.number, part=part, sample_id=sample_id, sample=sample)
            progress.show(counts)
        counts.check(options.max_skipped_fraction)
        writer.finish(renderer)
    document = {**counts.as_dict(), "renderer": renderer, "data": _origin(paths)}
    publish_accounting(document, accounting, tokens=output)
    progress.show(counts, last=True)
    return document


def _origin(paths: list[Path]) -> str:
    """Return the data set and commit of a source from the hub; empty for files."""
    if len(paths) == 1 and is_record(paths[0]):
        record = read_record(paths[0])
        return f"{record['id']}@{record['revision']}"
    return ""


def _results(
    pipeline: Pipeline, first: list[Row], chunks: Iterator[list[Row]], workers: int
) -> Iterator[RowResult]:
    """Yield the results in the rows' order; of several processes, few chunks are pending."""
    global _pipeline
    # a small source is done before a second process has started
    if workers < 2 or len(first) < _CHUNK_ROWS:
        for chunk in itertools.chain([first], chunks):
            yield from map(pipeline.process, chunk)
        return
    _pipeline = pipeline
    # each process has one thread, and the library must have no threads when this process forks
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        pending = collections.deque([pool.submit(_work, first)])
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
    for row in rows:
        chunk.append(row)
        if len(chunk) == _CHUNK_ROWS:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _work(rows: list[Row]) -> list[RowResult]:
    assert _pipeline is not None
    return [_pipeline.process(row) for row in rows]


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

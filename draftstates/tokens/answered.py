"""Answers by the target model as the rows of a source: their files, and the samples in them.

The stage `answers` writes the files. A sample is the ids that were sent and the ids that were
sampled, as they are: nothing is decoded and encoded a second time. The supervised tokens are
exactly the sampled ones. A turn whose prompt goes on from the earlier ids shares their sample.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from draftstates import ids
from draftstates.errors import UserError, make_again
from draftstates.files import publishing
from draftstates.records import Prompts
from draftstates.tokens.accounting import RowResult
from draftstates.tokens.rows import RowSkipped
from draftstates.tokens.sources import TokeniseOptions
from draftstates.tokens.turns import Sample

# a row of the source: its prompt, or why it has none
PROMPTS = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("where", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("detail", pa.string()),
        pa.field("kinds", pa.list_(pa.string())),
        pa.field("not_used", pa.list_(pa.string())),
        pa.field("conversation", pa.string()),
    ]
)
# an answer: the ids that were sent, those that were sampled, and the same for people to read
ANSWERS = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("turn", pa.int32(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("output_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("temperature", pa.float32(), nullable=False),
        pa.field("finish", pa.string(), nullable=False),
        pa.field("cached_tokens", pa.int32(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("reasoning", pa.string()),
        pa.field("calls", pa.string()),
        pa.field("fault", pa.string()),
        pa.field("stopped", pa.string()),
    ]
)
# the finish reason of an answer that was cut at its most tokens
LENGTH = "length"
# a chunk's own facts, in the metadata of its file
FACTS = b"draftstates.answers"
_EXAMPLES = 5
_SHOWN = 2000


class AnsweredRows:
    """The rows of a source with the target model's answers.

    Attributes:
        prompts: the source's prompts.
    """

    def __init__(self, folder: Path, options: TokeniseOptions) -> None:
        """Read which prompts there are.

        Args:
            folder: folder of the answers; the prompts lie beside it.
            options: options of the source, with `answers`.

        Raises:
            UserError: the document of the prompts is missing or damaged.
        """
        self._path, self._folder = folder.parent / "prompts.parquet", folder
        self._options = options
        self.prompts = Prompts.read(self._path.with_suffix(".json"))
        self._count: Counter[str] = Counter()
        self._finish: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._lengths: list[int] = []
        self._jobs: list[dict[str, Any]] = []
        self._examples: list[dict[str, Any]] = []

    def results(self) -> Iterator[RowResult]:
        """Yield the result of each row, in order.

        Raises:
            UserError: a chunk's file is missing or damaged, or lacks the answer to a prompt.
        """
        for chunk in self.prompts.chunks:
            answers = self._read(self._folder / f"{chunk.chunk_id}.parquet")
            for row in read_prompts(self._path, chunk.first, chunk.end):
                yield self._result(row, answers)

    def _read(self, file: Path) -> dict[str, list[dict[str, Any]]]:
        table, facts = read_answers(file)
        self._jobs.append(facts)
        found: dict[str, list[dict[str, Any]]] = {}
        for row in _rows(table):
            found.setdefault(row["prompt_id"], []).append(row)
        return found

    def _result(self, row: dict[str, Any], answers: dict[str, list[dict[str, Any]]]) -> RowResult:
        number, where = row["row"], row["where"]
        if row["reason"] is not None:
            skipped = RowSkipped(row["reason"], row["detail"], tuple(row["kinds"]))
            return RowResult(number, where, [], skipped)
        self._count["prompts"] += 1
        turns = answers.get(row["prompt_id"], [])
        for turn in turns:
            self._see(turn, number)
        samples: list[Sample] = []
        lost: list[RowSkipped] = []
        for sample in range(self._options.answers.samples):
            said = [turn for turn in turns if turn["sample"] == sample]
            if [turn["turn"] for turn in said] != list(range(len(said))) or not said:
                raise UserError(
                    f"{self._path}: row {number} ({where}): expected the turns of sample {sample}"
                    f" of prompt {row['prompt_id']} in order, found {len(said)}: remove the file of"
                    " its chunk, and run again"
                )
            try:
                samples += self._samples(said, lost)
            except RowSkipped as skipped:
                lost.append(skipped)
        named = [(ids.sample_id(each.input_ids, each.loss_mask), each) for each in samples]
        reasons = tuple(error.reason for error in lost)
        if not named:
            self._skipped[lost[0].reason] += 1
            return RowResult(number, where, [], lost[0])
        self._count["answered"] += 1
        used = tuple(row["not_used"])
        return RowResult(number, where, named, lost_turns=reasons, not_used=used)

    def _samples(self, turns: list[dict[str, Any]], lost: list[RowSkipped]) -> list[Sample]:
        """Return the samples of one conversation; add why turns of it are missing to `lost`."""
        options = self._options
        parts: list[tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]] = []
        for turn in turns:
            prompt, output = turn["prompt_ids"], turn["output_ids"]
            if reason := self._left_out(turn):
                lost.append(RowSkipped(reason, f"turn {turn['turn']}: {turn['fault'] or 'cut'}"))
                break
            earlier = np.concatenate(parts[-1][0]) if parts else prompt[:0]
            if not parts or not np.array_equal(prompt[: len(earlier)], earlier):
                parts.append(([], [], []))
                earlier = prompt[:0]
            added, masks, logprobs = parts[-1]
            new = prompt[len(earlier) :]
            added += [new, output]
            masks += [np.zeros(len(new), np.uint8), np.ones(len(output), np.uint8)]
            logprobs.append(turn["logprobs"])
            if turn["stopped"]:
                lost.append(RowSkipped(turn["stopped"], f"after turn {turn['turn']}"))
        if len(parts) > 1 and options.rewritten_history == "skip":
            raise RowSkipped("rewritten_history", f"{len(parts)} turns need samples of their own")
        if options.rewritten_history == "last":
            parts = parts[-1:]
        temperature = turns[0]["temperature"]
        return [
            Sample(
                np.concatenate(added),
                np.concatenate(masks),
                logprobs=np.concatenate(logprobs),
                temperature=temperature,
            )
            for added, masks, logprobs in parts
        ]

    def _left_out(self, turn: dict[str, Any]) -> str | None:
        """Return why an answer, and what follows it, is left out."""
        wanted = self._options.answers
        if turn["finish"] == LENGTH and wanted.truncated == "skip":
            return "truncated"
        # an empty answer has nothing to learn
        if turn["fault"] and (wanted.skip_degenerate or not len(turn["output_ids"])):
            return "degenerate"
        return None

    def _see(self, turn: dict[str, Any], row: int) -> None:
        """Count an answer."""
        self._finish[turn["finish"]] += 1
        self._faults.update([turn["fault"]] if turn["fault"] else [])
        self._lengths.append(len(turn["output_ids"]))
        self._count["prompt_tokens"] += len(turn["prompt_ids"])
        self._count["cached_tokens"] += turn["cached_tokens"]
        if len(self._examples) < _EXAMPLES:
            shown = {name: turn[name] for name in ("sample", "turn", "finish", "fault", "calls")}
            texts = {name: (turn[name] or "")[:_SHOWN] for name in ("text", "reasoning")}
            self._examples.append({"row": row, **shown, **texts})

    def account(self) -> dict[str, Any]:
        """Return what became of the prompts, and figures of the answers, for the accounting.

        Raises:
            UserError: the prompts are not answered + skipped.
        """
        prompts, answered = self._count["prompts"], self._count["answered"]
        skipped = dict(sorted(self._skipped.items()))
        if prompts != answered + sum(skipped.values()):
            raise UserError(
                f"source {self.prompts.source}: unexplained prompts: {prompts:,} in, but"
                f" {answered:,} answered + {sum(skipped.values()):,} skipped"
            )
        lengths = np.array(self._lengths or [0])
        sampled = int(lengths.sum())
        marks = {"least": 0.0, "median": 0.5, "p90": 0.9, "greatest": 1.0}
        return {
            "prompts": prompts,
            "answered": answered,
            "skipped": skipped,
            "answers": len(self._lengths),
            "finish": dict(sorted(self._finish.items())),
            "degenerate": dict(sorted(self._faults.items())),
            "lengths": {
                name: int(np.quantile(lengths, share, method="lower"))
                for name, share in marks.items()
            },
            "sampled_tokens": sampled,
            "prompt_tokens": self._count["prompt_tokens"],
            "cached_tokens": self._count["cached_tokens"],
            "seconds": round(_union(self._jobs), 1),
            "timed_tokens": sum(job["sampled_tokens"] for job in self._jobs),
            "folder": self._folder.name,
            "examples": self._examples,
        }


def _union(jobs: list[dict[str, Any]]) -> float:
    """Return the seconds in which at least one of some jobs was answering."""
    total, until = 0.0, 0.0
    for begin, seconds in sorted((job["began"], job["seconds"]) for job in jobs):
        total += max(begin + seconds - max(begin, until), 0.0)
        until = max(until, begin + seconds)
    return total


def read_prompts(path: Path, first: int, end: int) -> Iterator[dict[str, Any]]:
    """Yield the rows `first` to `end` of a source's file of prompts.

    Raises:
        UserError: the file cannot be read.
    """
    again = Prompts.remedy(path)
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            begin = 0
            for group in range(file.num_row_groups):
                stop = begin + file.metadata.row_group(group).num_rows
                if begin < end and first < stop:
                    part = slice(max(first - begin, 0), end - begin)
                    yield from file.read_row_group(group).to_pylist()[part]
                begin = stop
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: expected prompts: {error}; {again}") from error


def write_answers(rows: list[dict[str, Any]], facts: dict[str, Any], file: Path) -> None:
    """Write a chunk's answers and its facts.

    Args:
        rows: the answers, see `ANSWERS`.
        facts: `began`, when the job began in Unix time, its `seconds`, its `sampled_tokens`.
        file: file to write.
    """
    table = pa.Table.from_pylist(rows, schema=ANSWERS)
    said = json.dumps({**facts, "digest": _digest(table)})
    with publishing(file) as partial:
        pq.write_table(table.replace_schema_metadata({FACTS: said}), partial, compression="zstd")


def read_answers(file: Path) -> tuple[pa.Table, dict[str, Any]]:
    """Return the answers in a chunk's file, and its facts.

    Raises:
        UserError: the file cannot be read, is damaged, or is of another kind.
    """
    try:
        table = pq.read_table(file)
        facts, table = json.loads(table.schema.metadata[FACTS]), table.select(ANSWERS.names)
        if facts["digest"] != (found := _digest(table)):
            raise ValueError(f"the digest {facts['digest']}, found {found}")
        return table, facts
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(file, error) from error


def _digest(table: pa.Table) -> str:
    """Return the XXH3-128 of answers, 32 hex digits: Parquet's own checksums leave gaps."""
    digest = xxhash.xxh3_128()
    for field in ANSWERS:
        column = table[field.name]
        if pa.types.is_list(field.type):
            digest.update(pc.list_value_length(column).to_numpy().tobytes())
            digest.update(pc.list_flatten(column).to_numpy().tobytes())
        else:
            digest.update(json.dumps(column.to_pylist()).encode())
    return digest.hexdigest()


def _damaged(file: Path, error: Exception) -> UserError:
    return UserError(
        f"{file}: expected a chunk's answers as they were written: {type(error).__name__}: {error};"
        f" {make_again('to answer again', file)}"
    )


def answered_prompts(file: Path) -> set[str]:
    """Return the ids of the prompts whose answers a chunk's file has.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        return set(pq.read_table(file, columns=["prompt_id"])["prompt_id"].to_pylist())
    except (OSError, ValueError, KeyError) as error:
        raise _damaged(file, error) from error


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield the rows of answers, with ids and log probabilities as arrays."""
    lists = ("prompt_ids", "output_ids", "logprobs")
    others = table.drop_columns(list(lists)).to_pylist()
    columns = {name: table[name].combine_chunks() for name in lists}
    for number, row in enumerate(others):
        yield row | {name: columns[name][number].values.to_numpy() for name in lists}

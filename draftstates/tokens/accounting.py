"""The accounting of a source: rows in = kept + skipped, by reason."""

import dataclasses
import itertools
from collections import Counter
from typing import Any

from draftstates.containers import present_image
from draftstates.errors import UserError
from draftstates.tokens.rows import BENIGN, REASONS, RowSkipped
from draftstates.tokens.turns import Sample

_EXAMPLES = 20
# a data set whose keys are data must not make the accounting as large as itself
_NAMES = 200
_LONGEST = 200
_OTHER_NAMES = "other names"


@dataclasses.dataclass(frozen=True, slots=True)
class RowResult:
    """The result of a row: its samples, or the reason why it has no sample.

    Attributes:
        number: number of the row in its source.
        where: file and line (or row), for messages.
        samples: pairs (sample id, sample).
        skipped: reason why the row has no sample; None for a kept row.
        lost_turns: reasons why turns of a kept row are not in its samples.
        not_used: names of the columns, keys and content of a kept row that are in none of its
            samples.
        kinds: what a kept row counts as, see `Conversation.kinds`; none for a row of tokens.
    """

    number: int
    where: str
    samples: list[tuple[str, Sample]]
    skipped: RowSkipped | None = None
    lost_turns: tuple[str, ...] = ()
    not_used: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()


class RowCounter:
    """Counts of one source, and the sample ids that it has had so far."""

    def __init__(self, source: str, *, deduplicate: bool) -> None:
        self.source = source
        self.counts: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.lost_turns: Counter[str] = Counter()
        self.not_used: Counter[str] = Counter()
        self.not_rendered: Counter[str] = Counter()
        self._examples: list[dict[str, Any]] = []
        self._seen: dict[bytes, int] | None = {} if deduplicate else None

    def add(self, result: RowResult) -> list[tuple[int, str, Sample]]:
        """Count a row and return its kept samples: part, sample id, sample."""
        self.counts["rows_in"] += 1
        kept, skipped = [], result.skipped
        for name, sample in result.samples:
            if self._seen is not None:
                key = bytes.fromhex(name)
                if key in self._seen:
                    why = f"the same tokens and mask as row {self._seen[key]}"
                    skipped = skipped or RowSkipped("duplicate", why)
                    continue
                self._seen[key] = result.number
            kept.append((len(kept), name, sample))
        self.counts["duplicate_samples"] += len(result.samples) - len(kept)
        if kept:
            self._count_kept(kept, result)
        else:
            self._count_skipped(skipped or RowSkipped("duplicate", "no new sample"), result)
        return kept

    def _count_kept(self, kept: list[tuple[int, str, Sample]], result: RowResult) -> None:
        self.counts["kept"] += 1
        self.counts.update(result.kinds)
        self.lost_turns.update(result.lost_turns)
        for name in result.not_used:
            known = name in self.not_used or len(self.not_used) < _NAMES
            self.not_used[name[:_LONGEST] if known else _OTHER_NAMES] += 1
        for _, _, sample in kept:
            self.counts["samples"] += 1
            self.counts["cut_samples"] += sample.cut
            self.counts["tokens"] += len(sample.input_ids)
            self.counts["supervised_tokens"] += int(sample.loss_mask.sum())
        for (_, _, earlier), (_, _, later) in itertools.pairwise(kept):
            shorter = min(len(earlier.input_ids), len(later.input_ids))
            differing = earlier.input_ids[:shorter] != later.input_ids[:shorter]
            self.counts["repeated_tokens"] += (
                int(differing.argmax()) if differing.any() else shorter
            )

    def _count_skipped(self, skipped: RowSkipped, result: RowResult) -> None:
        self.skipped[skipped.reason] += 1
        self.not_rendered.update(skipped.kinds)
        if self.skipped[skipped.reason] <= _EXAMPLES:
            example = {
                "row": result.number,
                "where": result.where,
                "reason": skipped.reason,
                "detail": skipped.detail[:500],
            }
            self._examples.append(example)

    def check(self, max_skipped_fraction: float) -> None:
        """Refuse too many bad rows, a source without kept rows, and a sum that does not close."""
        rows, kept = self.counts["rows_in"], self.counts["kept"]
        if rows != kept + sum(self.skipped.values()):
            raise AssertionError(
                f"{self.source}: {rows} rows in, but {kept} kept and {dict(self.skipped)}"
            )
        # skipped for their content, not by choice
        bad = sum(count for reason, count in self.skipped.items() if reason not in BENIGN)
        if bad > max_skipped_fraction * rows:
            allowed = f"more than max_skipped_fraction {max_skipped_fraction} allows"
            raise UserError(
                f"source {self.source}: {bad} of {rows} rows are bad, {allowed}: {self._why()}"
            )
        if kept == 0:
            raise UserError(f"source {self.source}: not one of {rows} rows is kept: {self._why()}")

    def _why(self) -> str:
        lines = []
        for reason, count in self.skipped.most_common():
            example = next(entry for entry in self._examples if entry["reason"] == reason)
            lines.append(
                f"\n  {count} {reason} ({REASONS[reason]}), first at {example['where']}:"
                f" {example['detail']}"
            )
        return "".join(lines) or "there are no rows"

    def summary(self) -> str:
        """Return the accounting as one line for people."""
        parts = [f"{self.counts['rows_in']:,} rows in, {self.counts['kept']:,} kept"]
        parts += [f"{count:,} {reason}" for reason, count in sorted(self.skipped.items())]
        if self.not_rendered:
            kinds = ", ".join(
                f"{kind} {count:,}" for kind, count in sorted(self.not_rendered.items())
            )
            parts.append(f"not rendered: {kinds}")
        tokens, supervised = self.counts["tokens"], self.counts["supervised_tokens"]
        text = (
            f"{self.source}: {', '.join(parts)}; {self.counts['samples']:,} samples, {tokens:,}"
            f" tokens, {supervised:,} supervised tokens"
        )
        if self.lost_turns:
            lost = [f"{count:,} {reason}" for reason, count in sorted(self.lost_turns.items())]
            text += f"; turns of kept rows left out: {', '.join(lost)}"
        if self.counts["repeated_tokens"]:
            share = self.counts["repeated_tokens"] / tokens
            text += f"; {share:.0%} of the tokens are history that the row's sample before has too"
        if self.counts["cut_samples"]:
            text += f"; {self.counts['cut_samples']:,} samples cut"
        return text

    def not_used_lines(self) -> list[str]:
        """Return a line for each column, key or kind of content that kept rows lost."""
        return [
            f"{self.source}: {name}: {count:,} rows, not used"
            for name, count in sorted(self.not_used.items())
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the accounting file."""
        numbers = (
            "rows_in",
            "kept",
            "samples",
            "tokens",
            "supervised_tokens",
            "duplicate_samples",
            "cut_samples",
            # what the splitting of rows costs: tokens with which the row's sample before begins too
            "repeated_tokens",
            # kept rows that are conversations, and those of them that hold reasoning or tools
            "conversations",
            "with_reasoning",
            "with_tools",
        )
        return {
            "source": self.source,
            **{name: self.counts[name] for name in numbers},
            "skipped": dict(sorted(self.skipped.items())),
            "failed": {},
            "lost_turns": dict(sorted(self.lost_turns.items())),
            "not_rendered": dict(sorted(self.not_rendered.items())),
            "not_used": dict(sorted(self.not_used.items())),
            "examples": self._examples,
            "image": present_image(),
        }

"""Accounting as text: kept, skipped and failed rows of every source, and the reasons."""

from pathlib import Path

from draftstates.errors import counted, visible
from draftstates.plan.words import of_bytes
from draftstates.records import AnswersAccount, Manifest, SourceAccount

_COLUMNS = (
    "source",
    "rows in",
    "kept",
    "skipped",
    "failed",
    "samples",
    "tokens",
    "supervised tokens",
)


def table(manifest: Manifest, *, path: Path) -> str:
    """Return the accounting in a manifest as text.

    The text has one line per source and one for all sources. The numbers of rows for each reason,
    the number of shards, the bytes and the path of the manifest follow.

    Args:
        manifest: the manifest.
        path: path of its file, for the last line.
    """
    accounts = {**manifest.sources, "all sources": manifest.totals}
    rows = [_COLUMNS, *(_row(name, account) for name, account in accounts.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    for kind in ("skipped", "failed"):
        lines += [
            f"{kind}, {reason}: {count:,}" for reason, count in vars(manifest.totals)[kind].items()
        ]
    lines += [
        f"not used, {name}: {count:,} rows" for name, count in manifest.totals.not_used.items()
    ]
    for name, account in manifest.sources.items():
        if account.renderer not in ("", "template"):
            lines.append(f"{name}: rendered by {account.renderer}")
        if account.data:
            lines.append(f"{name}: {account.data}")
        if account.answers:
            lines.append(f"{name}: {answers_line(account.answers)}")
    lines.append(f"{counted(len(manifest.shards), 'shard')}, {of_bytes(manifest.totals.bytes)}")
    lines.append(f"manifest: {path}")
    return visible("\n".join(lines))


def answers_line(said: AnswersAccount) -> str:
    """Return figures of the target model's answers as one line."""
    skipped = "".join(f", {count:,} {reason}" for reason, count in said.skipped.items())
    degenerate = "".join(f", {count:,} {kind}" for kind, count in said.degenerate.items())
    rate = f" at {said.timed_tokens / said.seconds:,.0f} a second" if said.timed_tokens else ""
    return (
        f"answers by the target model: {said.prompts:,} prompts, {said.answered:,} answered"
        f"{skipped}; {said.answers:,} answers, {said.truncated:.1%} cut{degenerate}; median"
        f" {said.lengths['median']:,} tokens, {said.sampled_tokens:,} sampled{rate};"
        f" {said.cached_tokens:,} of {said.prompt_tokens:,} prompt tokens came from the cache"
    )


def _row(name: str, account: SourceAccount) -> tuple[str, ...]:
    numbers = (
        account.rows_in,
        account.kept,
        sum(account.skipped.values()),
        sum(account.failed.values()),
        account.samples,
        account.tokens,
        account.supervised_tokens,
    )
    return (name, *(f"{number:,}" for number in numbers))

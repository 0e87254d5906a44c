"""Statistics of each source before a capture, and the bytes and hours that the capture takes.

They cover lengths, supervised tokens, skipped rows and duplicates.
"""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftstates.plan.room import forecast, hours
from draftstates.records import Plan
from draftstates.tokens.files import read_index

_SHARES = (0.5, 0.9, 0.99)
_STYLE = (
    "<style>body{font:14px sans-serif}td,th{padding:.2em"
    " .8em;text-align:right}td:first-child,td:last-child{text-align:left}</style>"
)
_EDGES = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def statistics(
    plan: Plan, *, tokens_folder: Path, tokens_per_second: float | None = None
) -> dict[str, Any]:
    """Return the statistics of a plan.

    Args:
        plan: the plan.
        tokens_folder: folder of `<source>.parquet` and `<source>.json` of each source.
        tokens_per_second: assumed rate of the capture, for the hours that it will take; None leaves
            them out.

    Returns:
        `sources`: for each, `lengths` and `supervised` of its samples (see `_spread`),
            `supervised_share`, `skipped`, `not_used` and `duplicate_samples`;
        `tokens`, `shards`, `bytes_needed`, `bytes_present`, `disk_free`, `hours`; and these as a
        `summary` for people.

    Raises:
        UserError: a source's files are missing or disagree.
    """
    sources = {}
    for name, counts in plan.accounting.sources.items():
        index = read_index(tokens_folder / f"{name}.parquet")
        sources[name] = {
            "rows_in": counts.rows_in,
            "kept": counts.kept,
            "skipped": counts.skipped,
            "not_used": counts.not_used,
            "duplicate_samples": index.accounting.get("duplicate_samples", 0),
            "samples": len(index.lengths),
            "tokens": int(index.lengths.sum()),
            "lengths": _spread(index.lengths),
            "supervised": _spread(index.supervised),
            "supervised_share": round(
                float(index.supervised.sum() / max(index.lengths.sum(), 1)), 4
            ),
        }
    room = {name: getattr(plan, name) for name in ("bytes_needed", "bytes_present", "disk_free")}
    tokens = plan.accounting.totals.tokens
    return {
        "sources": sources,
        "tokens": tokens,
        "shards": len(plan.shards),
        **room,
        "hours": hours(plan, tokens_per_second),
        "summary": forecast(plan, tokens_per_second),
    }


def _spread(values: np.ndarray) -> dict[str, Any]:
    """Return least, quantiles, greatest and mean value, and a histogram.

    The histogram has the number of values in each range, by the number that the range begins with.
    """
    if not len(values):
        return {}
    quantiles = {
        f"p{share * 100:.0f}": int(np.quantile(values, share, method="lower")) for share in _SHARES
    }
    counts, _ = np.histogram(values, bins=[*_EDGES, max(int(values.max()), _EDGES[-1]) + 1])
    histogram = {str(edge): int(count) for edge, count in zip(_EDGES, counts, strict=True) if count}
    return {
        "least": int(values.min()),
        **quantiles,
        "greatest": int(values.max()),
        "mean": round(float(values.mean()), 1),
        "histogram": histogram,
    }


def as_text(found: Mapping[str, Any]) -> str:
    """Return the statistics as text."""
    lines = []
    for name, source in found["sources"].items():
        skipped = sum(source["skipped"].values())
        lines.append(
            f"{name}: {source['rows_in']:,} rows in, {source['kept']:,} kept, {skipped:,} skipped;"
            f" {source['samples']:,} samples"
        )
        lines += [
            f"  skipped, {reason}: {count:,}" for reason, count in sorted(source["skipped"].items())
        ]
        lines += [
            f"  not used, {name}: {count:,} rows" for name, count in source["not_used"].items()
        ]
        lines.append(f"  duplicate samples left out: {source['duplicate_samples']:,}")
        for what, spread in (
            ("tokens", source["lengths"]),
            ("supervised tokens", source["supervised"]),
        ):
            figures = ", ".join(
                f"{key} {value:,}" for key, value in spread.items() if key != "histogram"
            )
            lines.append(f"  {what} a sample: {figures}")
        lines.append(f"  share of supervised tokens: {source['supervised_share']:.1%}")
    return "\n".join([*lines, found["summary"]])


def as_html(found: Mapping[str, Any]) -> str:
    """Return the statistics as a page: a table of the sources, and the lengths of their samples."""
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Tokens</title>{_STYLE}'
    columns = (
        "source",
        "rows in",
        "kept",
        "samples",
        "duplicates left out",
        "tokens",
        "supervised",
        "skipped",
    )
    rows = [_table_row(name, source) for name, source in found["sources"].items()]
    parts = [head, f"<p>{html.escape(found['summary'])}</p>", _table(columns, rows)]
    for name, source in found["sources"].items():
        if source["not_used"]:
            unused = ", ".join(
                f"{key} ({count:,} rows)" for key, count in source["not_used"].items()
            )
            parts.append(f"<p>{html.escape(f'{name}: not used: {unused}')}</p>")
        for what, spread in (
            ("Tokens", source["lengths"]),
            ("Supervised tokens", source["supervised"]),
        ):
            parts.append(
                f"<h3>{html.escape(name)}: {what.lower()} a sample</h3>{_spread_table(spread)}"
            )
    return "\n".join([*parts, "</html>\n"])


def _table_row(name: str, source: Mapping[str, Any]) -> list[str]:
    skipped = (
        ", ".join(f"{count:,} {reason}" for reason, count in sorted(source["skipped"].items()))
        or "none"
    )
    numbers = [
        f"{source[field]:,}"
        for field in ("rows_in", "kept", "samples", "duplicate_samples", "tokens")
    ]
    return [name, *numbers, f"{source['supervised_share']:.1%}", skipped]


def _spread_table(spread: Mapping[str, Any]) -> str:
    """Return quantiles in words and the histogram as bars."""
    figures = ", ".join(f"{key} {value:,}" for key, value in spread.items() if key != "histogram")
    histogram = spread.get("histogram", {})
    most = max(histogram.values(), default=1)
    rows = [
        [f"from {int(edge):,}", f"{count:,}", "█" * max(1, round(40 * count / most))]
        for edge, count in histogram.items()
    ]
    return f"<p>{figures}</p>{_table(('length', 'samples', ''), rows)}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{html.escape(column)}</th>" for column in columns)]
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"

"""What is known of a run before it starts: lengths, targets, skipped rows and duplicates of each source, bytes and hours."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftstates.forecast import forecast, hours
from draftstates.token_files import read_index

_SHARES = (0.5, 0.9, 0.99)
_STYLE = "<style>body{font:14px sans-serif}td,th{padding:.2em .8em;text-align:right}td:first-child,td:last-child{text-align:left}</style>"
_EDGES = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def statistics(plan: Mapping[str, Any], *, tokens_folder: Path, tokens_per_second: float | None = None) -> dict[str, Any]:
    """Statistics of a plan.

    Args:
        plan: content of `plan.json`. tokens_folder: holds `<source>.parquet` and `<source>.json` of each source.
        tokens_per_second: assumed rate of the capture, for the hours that it will take; None leaves them out.

    Returns:
        `sources`: for each, `lengths` and `targets` of its samples (see `_spread`), `target_share`, `skipped` and `duplicate_samples`;
        `tokens`, `shards`, `bytes_needed`, `bytes_present`, `disk_free`, `hours`; and these as a `summary` for people.

    Raises:
        UserError: a source's files are missing or disagree.
    """
    sources = {}
    for name, counts in plan["accounting"]["sources"].items():
        index = read_index(tokens_folder / f"{name}.parquet")
        sources[name] = {
            "rows_in": counts["rows_in"],
            "kept": counts["kept"],
            "skipped": counts["skipped"],
            "duplicate_samples": index.accounting.get("duplicate_samples", 0),
            "samples": len(index.lengths),
            "tokens": int(index.lengths.sum()),
            "lengths": _spread(index.lengths),
            "targets": _spread(index.supervised),
            "target_share": round(float(index.supervised.sum() / max(index.lengths.sum(), 1)), 4),
        }
    room = {name: plan[name] for name in ("bytes_needed", "bytes_present", "disk_free")}
    tokens = plan["accounting"]["totals"]["tokens"]
    return {
        "sources": sources,
        "tokens": tokens,
        "shards": len(plan["shards"]),
        **room,
        "hours": hours(plan, tokens_per_second),
        "summary": forecast(plan, tokens_per_second),
    }


def _spread(values: np.ndarray) -> dict[str, Any]:
    """Least, quantiles, greatest, mean, and how many lie in each range that begins at the named number."""
    if not len(values):
        return {}
    quantiles = {f"p{share * 100:.0f}": int(np.quantile(values, share, method="lower")) for share in _SHARES}
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
    """The statistics for people."""
    lines = []
    for name, source in found["sources"].items():
        skipped = sum(source["skipped"].values())
        lines.append(f"{name}: {source['rows_in']:,} rows in, {source['kept']:,} kept, {skipped:,} skipped; {source['samples']:,} samples")
        lines += [f"  skipped, {reason}: {count:,}" for reason, count in sorted(source["skipped"].items())]
        lines.append(f"  duplicate samples left out: {source['duplicate_samples']:,}")
        for what, spread in (("tokens", source["lengths"]), ("targets", source["targets"])):
            figures = ", ".join(f"{key} {value:,}" for key, value in spread.items() if key != "histogram")
            lines.append(f"  {what} a sample: {figures}")
        lines.append(f"  share of targets: {source['target_share']:.1%}")
    return "\n".join([*lines, found["summary"]])


def as_html(found: Mapping[str, Any]) -> str:
    """The statistics as a page: a table of the sources, and for each how long its samples are."""
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Tokens</title>{_STYLE}'
    columns = ("source", "rows in", "kept", "samples", "duplicates left out", "tokens", "targets", "skipped")
    rows = [_table_row(name, source) for name, source in found["sources"].items()]
    parts = [head, f"<p>{html.escape(found['summary'])}</p>", _table(columns, rows)]
    for name, source in found["sources"].items():
        for what, spread in (("Tokens", source["lengths"]), ("Targets", source["targets"])):
            parts.append(f"<h3>{html.escape(name)}: {what.lower()} a sample</h3>{_spread_table(spread)}")
    return "\n".join([*parts, "</html>\n"])


def _table_row(name: str, source: Mapping[str, Any]) -> list[str]:
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(source["skipped"].items())) or "none"
    numbers = [f"{source[field]:,}" for field in ("rows_in", "kept", "samples", "duplicate_samples", "tokens")]
    return [name, *numbers, f"{source['target_share']:.1%}", skipped]


def _spread_table(spread: Mapping[str, Any]) -> str:
    """Quantiles in words, the histogram as bars."""
    figures = ", ".join(f"{key} {value:,}" for key, value in spread.items() if key != "histogram")
    histogram = spread.get("histogram", {})
    most = max(histogram.values(), default=1)
    rows = [[f"from {int(edge):,}", f"{count:,}", "█" * max(1, round(40 * count / most))] for edge, count in histogram.items()]
    return f"<p>{figures}</p>{_table(('length', 'samples', ''), rows)}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{html.escape(column)}</th>" for column in columns)]
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"

"""What is known of a run before it starts: lengths, targets, skipped rows and duplicates of each source, bytes and hours."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from draftstates.token_files import read_index

_SHARES = (0.5, 0.9, 0.99)
_EDGES = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def statistics(plan: Mapping[str, Any], *, tokens_folder: Path, tokens_per_second: float | None = None) -> dict[str, Any]:
    """Statistics of a plan.

    Args:
        plan: content of `plan.json`. tokens_folder: holds `<source>.parquet` and `<source>.json` of each source.
        tokens_per_second: rate of the capture, for the hours that it will take; None leaves them out.

    Returns:
        `sources`: for each, `lengths` and `targets` of its samples (see `_spread`), `target_share`, `skipped` and `duplicate_samples`;
        `tokens`, `shards`, `bytes_needed`, `bytes_present`, `disk_free`, `hours`.

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
    tokens = plan["accounting"]["totals"]["tokens"]
    room = {name: plan[name] for name in ("bytes_needed", "bytes_present", "disk_free")}
    hours = None if tokens_per_second is None else tokens / tokens_per_second / 3600
    return {"sources": sources, "tokens": tokens, "shards": len(plan["shards"]), **room, "hours": hours}


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
    lines.append(f"{found['tokens']:,} tokens in {found['shards']:,} shards")
    lines.append(f"{found['bytes_needed']:,} bytes to capture, {found['bytes_present']:,} there, {found['disk_free']:,} free")
    if found["hours"] is not None:
        lines.append(f"{found['hours']:,.2f} hours at the rate given")
    return "\n".join(lines)

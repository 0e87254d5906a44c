"""The accounting of a run as text: every row of every source is kept, skipped or failed, and why."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_COLUMNS = ("source", "rows in", "kept", "skipped", "failed", "samples", "tokens", "targets")


def table(manifest: Mapping[str, Any], *, path: Path) -> str:
    """The accounting in a manifest, a line a source and one for all, then shards, bytes and the manifest's path."""
    accounts = {**manifest["sources"], "all sources": manifest["totals"]}
    rows = [_COLUMNS, *(_row(name, account) for name, account in accounts.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    for kind in ("skipped", "failed"):
        lines += [f"{kind}, {reason}: {count:,}" for reason, count in manifest["totals"][kind].items()]
    lines.append(f"{len(manifest['shards']):,} shards, {manifest['totals']['bytes']:,} bytes")
    lines.append(f"manifest: {path}")
    return "\n".join(lines)


def _row(name: str, account: Mapping[str, Any]) -> tuple[str, ...]:
    skipped, failed = sum(account["skipped"].values()), sum(account["failed"].values())
    numbers = (account["rows_in"], account["kept"], skipped, failed, account["samples"], account["tokens"], account["supervised_tokens"])
    return (name, *(f"{number:,}" for number in numbers))

"""The plan: which samples are captured, in which shards, and whether the disk has room for them. No server is needed for any of it."""

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftstates import ids, shards
from draftstates.boundaries import segment
from draftstates.capture_spec import CaptureSpec
from draftstates.containers import distinct, present_image
from draftstates.errors import UserError
from draftstates.plan_file import FORMAT, FORMAT_VERSION, check_accounting
from draftstates.probes import choose_probes
from draftstates.room import check_room
from draftstates.token_files import SourceIndex, read_index, write_shard_tokens

_BYTES_PER_SAMPLE = 1024  # name in the header, receipt, verification's and manifest's entry
_BYTES_PER_SHARD = 16384  # page-aligned headers of shard and probe file


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The configuration's part in a plan.

    Attributes:
        min_bytes, max_bytes: size of a shard.
        budget: bytes that all shards may take together, None for what the disk has.
        exclude: sample ids to leave out, each of some source.
        deduplicate: whether a sample that an earlier source has is skipped.
        probe_fraction, probe_minimum: see `probes.choose_probes`.
    """

    min_bytes: int
    max_bytes: int
    budget: int | None = None
    exclude: Collection[str] = ()
    deduplicate: bool = True
    probe_fraction: float = 0.01
    probe_minimum: int = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cut:
    """One source, cut: its index, the shard of each sample (-1: dropped), its shards as the plan lists them, and their bytes in all."""

    index: SourceIndex
    shard_of: np.ndarray  # int32 [S]
    entries: list[dict[str, Any]]
    sizes: list[int]
    accounting: dict[str, Any]


def make_plan(token_files: Sequence[Path], *, spec: CaptureSpec, results: Path, options: PlanOptions) -> dict[str, Any]:
    """Cut all sources into shards, see that there is room, and write the tokens of each shard that has none yet.

    Args:
        token_files: `<source>.parquet` of each source, its accounting `<source>.json` beside it; their order does not matter.
        results: holds `tokens/shards/<shard id>.parquet` and the shards that are there already.

    Returns:
        the content of `plan.json`.

    Raises:
        UserError: rows that are not accounted for, nothing kept, an id in `exclude` that no sample has, or too little room: nothing is
            written then.
    """
    cuts = _cut_sources(sorted(token_files, key=lambda path: path.stem), spec, options)
    entries = [entry for cut in cuts for entry in cut.entries]
    accounting = {"sources": {cut.index.source: cut.accounting for cut in cuts}, "totals": _totals([cut.accounting for cut in cuts])}
    if not entries:
        raise UserError(f"not one sample is kept of {accounting['totals']['rows_in']:,} rows: {_reasons(accounting['totals'])}")
    _check_names(entries)
    names = [entry["shard_id"] for entry in entries]
    sizes = [size for cut in cuts for size in cut.sizes]
    run = run_folder(results, spec)
    room = check_room(names, sizes, run=results / run, budget=options.budget)
    for cut in cuts:
        write_shard_tokens(cut.index, cut.shard_of, [entry["shard_id"] for entry in cut.entries], folder=results / "tokens" / "shards")
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "run": run,
        "capture": {**dataclasses.asdict(spec), "key": spec.key},
        "checks": {"probe_fraction": options.probe_fraction, "probe_minimum": options.probe_minimum},
        "shards": entries,
        "accounting": accounting,
        "images": {"tokenise": distinct(cut.index.accounting.get("image") for cut in cuts), "plan": [present_image()]},
        **room,
    }


def run_folder(results: Path, spec: CaptureSpec) -> str:
    """Name of the capture's folder: the one that has its key already, whatever its model was called or wherever it lay then."""
    if (results / spec.run_name).exists():
        return spec.run_name
    present = sorted(path.name for path in results.glob(f"*-{spec.key[:8]}") if path.is_dir())
    return present[0] if present else spec.run_name


def _cut_sources(token_files: list[Path], spec: CaptureSpec, options: PlanOptions) -> list[_Cut]:
    seen, cuts = np.empty(0, dtype="S32"), []
    unknown = excluded = np.array(sorted(options.exclude), dtype="S32")
    for path in token_files:
        index = read_index(path)
        reasons = np.zeros(len(index.names), dtype=object)
        if options.deduplicate:
            reasons[np.isin(index.names, seen)] = "duplicate"
            seen = np.union1d(seen, index.names)
        reasons[np.isin(index.names, excluded)] = "excluded"
        unknown = unknown[~np.isin(unknown, index.names)]
        cuts.append(_cut(index, reasons, spec, options))
    if len(unknown):
        names = ", ".join(name.decode() for name in unknown.tolist())
        raise UserError(f"exclude: no sample of any source has the id {names}: correct it, or take it out")
    return cuts


def _cut(index: SourceIndex, reasons: np.ndarray, spec: CaptureSpec, options: PlanOptions) -> _Cut:
    kept = np.flatnonzero(reasons == 0)
    names = [name.decode() for name in index.names[kept].tolist()]
    sizes = index.lengths[kept] * (spec.row_bytes + 5) + 8
    shard_of = np.full(len(index.names), -1, dtype=np.int32)
    entries, all_bytes = [], []
    for first, end in segment(names, sizes, min_bytes=options.min_bytes, max_bytes=options.max_bytes):
        chosen = kept[first:end]
        shard_of[chosen] = len(entries)
        tokens = int(index.lengths[chosen].sum())
        entries.append(
            {
                "shard_id": ids.shard_id(names[first:end]),
                "source": index.source,
                "samples": end - first,
                "tokens": tokens,
                "supervised_tokens": int(index.supervised[chosen].sum()),
                "bytes": shards.shard_bytes(spec=spec, samples=end - first, tokens=tokens),
            }
        )
        extra = _extra_bytes(names[first:end], index.lengths[chosen], shard_id=entries[-1]["shard_id"], spec=spec, options=options)
        all_bytes.append(entries[-1]["bytes"] + extra)
    return _Cut(index=index, shard_of=shard_of, entries=entries, sizes=all_bytes, accounting=_account(index, reasons))


def _account(index: SourceIndex, reasons: np.ndarray) -> dict[str, Any]:
    """The source's accounting with what the plan dropped moved from kept to skipped: a row counts as kept while one of its samples is."""
    kept = reasons == 0
    rows, first, row_of = np.unique(index.rows, return_index=True, return_inverse=True)
    lost = np.bincount(row_of, weights=kept, minlength=len(rows)) == 0
    dropped = Counter(reasons[first[lost]].tolist())
    skipped = Counter(index.accounting["skipped"]) + dropped
    account = {
        "rows_in": index.accounting["rows_in"],
        "kept": int(len(rows) - lost.sum()),
        "samples": int(kept.sum()),
        "skipped": dict(sorted(skipped.items())),
        "failed": dict(sorted(index.accounting["failed"].items())),
        "tokens": int(index.lengths[kept].sum()),
        "supervised_tokens": int(index.supervised[kept].sum()),
    }
    check_accounting(f"source {index.source}", account)
    return account


def _extra_bytes(names: list[str], lengths: np.ndarray, *, shard_id: str, spec: CaptureSpec, options: PlanOptions) -> int:
    """What a shard takes beside its states: its prefix recaptures, headers and receipts."""
    probes = choose_probes(names, lengths.tolist(), shard_id=shard_id, fraction=options.probe_fraction, minimum=options.probe_minimum)
    probe_bytes = shards.shard_bytes(spec=spec, samples=len(probes), tokens=sum(rows for _, rows in probes))
    return probe_bytes + len(names) * _BYTES_PER_SAMPLE + _BYTES_PER_SHARD


def _totals(accounts: list[dict[str, Any]]) -> dict[str, Any]:
    totals: dict[str, Any] = {name: sum(account[name] for account in accounts) for name in ("rows_in", "kept", "samples")}
    for name in ("skipped", "failed"):
        totals[name] = dict(sorted(sum((Counter(account[name]) for account in accounts), Counter()).items()))
    for name in ("tokens", "supervised_tokens"):
        totals[name] = sum(account[name] for account in accounts)
    check_accounting("all sources", totals)
    return totals


def _reasons(account: dict[str, Any]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in account["skipped"].items()) or "the sources are empty"


def _check_names(entries: list[dict[str, Any]]) -> None:
    """Two shards of the same samples would be one file: possible only where duplicates are kept."""
    first: dict[str, str] = {}
    for entry in entries:
        if entry["shard_id"] in first:
            raise UserError(
                f"sources {first[entry['shard_id']]} and {entry['source']} hold the same {entry['samples']} samples in a row "
                f"(shard {entry['shard_id']}): list them once, or set data.deduplicate"
            )
        first[entry["shard_id"]] = entry["source"]

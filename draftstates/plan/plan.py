"""The plan: the samples of each shard, the accounting of every row, and the room on the disk.

Planning needs no server.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from draftstates.config import Checks, Shards
from draftstates.containers import distinct, present_image
from draftstates.engine.flags import CONTEXT_FLAG
from draftstates.errors import UserError, counted
from draftstates.paths import Results
from draftstates.plan.boundaries import segment
from draftstates.plan.prefixes import Segments, shard_id, share_prefixes
from draftstates.plan.recaptures import choose_recaptures
from draftstates.plan.room import check_room, kept_bytes, work_bytes
from draftstates.plan.shard_tokens import shard_input_ids, write_shard_tokens
from draftstates.records import (
    Accounting,
    AnswersAccount,
    Plan,
    PlannedChecks,
    PlannedShard,
    SourceAccount,
)
from draftstates.spec import OFFSET_BYTES, CaptureSpec
from draftstates.tokens.files import SourceIndex, read_index

# a sample's id in the header, its receipt, its entries in verified/ and the manifest
_BYTES_PER_SAMPLE = 1024
# page-aligned headers of the shard and of the file of its prefix recaptures
_BYTES_PER_SHARD = 16384


class PlanOptions(Shards, Checks):
    """Settings of a plan, from the configuration.

    Attributes:
        budget: bytes that all shards may take together; None for no limit but the disk.
        exclude: sample ids to leave out; some source must have each.
        deduplicate: whether a sample that an earlier source has is skipped.
        context_length: tokens that the server takes; None for no limit.
        form: name of the form in which shards stay on the disk; None for as captured.
    """

    budget: int | None
    exclude: list[str]
    deduplicate: bool
    context_length: int | None = None
    form: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cut:
    """One source, cut into shards.

    Attributes:
        shard_of: number of each sample's shard, int32 [S]; -1 for a dropped sample.
        entries: the source's shards as the plan lists them.
        segments: of each shard, the places of its samples' rows; None where nothing is shared.
        sizes: bytes of each shard with all that belongs to it, as captured.
        kept: bytes of each shard with all that belongs to it, in the form in which it stays.
    """

    index: SourceIndex
    shard_of: np.ndarray
    entries: list[PlannedShard]
    segments: list[Segments | None]
    sizes: list[int]
    kept: list[int]
    account: SourceAccount


def make_plan(
    token_files: Sequence[Path], *, spec: CaptureSpec, results: Path, options: PlanOptions
) -> Plan:
    """Cut all sources into shards, check the room on the disk, and write the tokens of each shard.

    Args:
        token_files: `<source>.parquet` of each source, with its accounting `<source>.json` beside
            it. The order of the files does not matter.
        spec: spec of the capture.
        results: folder that holds `tokens/shards/<shard id>.parquet` and the captured shards.
        options: settings of the plan.

    Raises:
        UserError: the accounting does not close, no row is kept, `exclude` has an id that no sample
            has, a sample is as long as the server's context, or the room is too small. Then no file
            is written.
    """
    cuts = _cut_sources(sorted(token_files, key=lambda path: path.stem), spec, options)
    entries = [entry for cut in cuts for entry in cut.entries]
    accounting = Accounting(
        sources={cut.index.source: cut.account for cut in cuts},
        totals=_totals([cut.account for cut in cuts]),
    )
    if not entries:
        raise UserError(
            f"not one sample is kept of {accounting.totals.rows_in:,} rows:"
            f" {_reasons(accounting.totals)}"
        )
    _check_distinct(entries)
    names = [entry.shard_id for entry in entries]
    sizes = [size for cut in cuts for size in cut.sizes]
    folder = capture_folder(results, spec)
    room = check_room(
        names,
        [size for cut in cuts for size in cut.kept],
        capture_folder=results / folder,
        budget=options.budget,
        form=options.form,
        work=work_bytes(sizes, form=options.form),
    )
    for cut in cuts:
        write_shard_tokens(
            cut.index,
            cut.shard_of,
            [entry.shard_id for entry in cut.entries],
            cut.segments,
            folder=Results(results).shard_tokens_folder,
        )
    return Plan(
        capture_folder=folder,
        capture=spec,
        checks=PlannedChecks(
            recapture_fraction=options.recapture_fraction,
            recapture_minimum=options.recapture_minimum,
            answers=options.answers,
        ),
        shards=tuple(entries),
        accounting=accounting,
        images={
            "tokenise": tuple(distinct(cut.index.accounting.get("image") for cut in cuts)),
            "plan": (present_image(),),
        },
        bytes_needed=room.needed,
        bytes_present=room.present,
        disk_free=room.free,
    )


def capture_folder(results: Path, spec: CaptureSpec) -> str:
    """Return the name of the capture folder.

    A present folder with the capture key keeps its name, even where the model had another name or
    place when the folder was made.
    """
    if (results / spec.folder_name).exists():
        return spec.folder_name
    present = sorted(path.name for path in results.glob(f"*-{spec.key[:8]}") if path.is_dir())
    return present[0] if present else spec.folder_name


def _cut_sources(token_files: list[Path], spec: CaptureSpec, options: PlanOptions) -> list[_Cut]:
    """Cut each source, without duplicates of earlier sources and without excluded samples."""
    seen, cuts = np.empty(0, dtype="S32"), []
    unknown = excluded = np.array(sorted(options.exclude), dtype="S32")
    for path in token_files:
        index = read_index(path)
        check_lengths(index, options.context_length, exclude=options.exclude)
        reasons = np.zeros(len(index.names), dtype=object)
        if options.deduplicate:
            reasons[np.isin(index.names, seen)] = "duplicate"
            seen = np.union1d(seen, index.names)
        reasons[np.isin(index.names, excluded)] = "excluded"
        unknown = unknown[~np.isin(unknown, index.names)]
        cuts.append(_cut(index, reasons, spec, options))
    if len(unknown):
        names = ", ".join(name.decode() for name in unknown.tolist())
        raise UserError(
            f"exclude: no sample of any source has the id {names}: correct it, or take it out"
        )
    return cuts


def check_lengths(
    index: SourceIndex, context: int | None, *, exclude: Collection[str] = ()
) -> None:
    """Refuse samples that the server would refuse: those as long as its context, or longer.

    They would fail at capture, after the model is loaded.

    Args:
        index: a source's samples.
        context: the server's context length; None for no limit.
        exclude: ids of samples that are left out.

    Raises:
        UserError: names the first sample and its row, and says what to do.
    """
    if context is None:
        return
    excluded = np.array(sorted(exclude), dtype="S32")
    long = np.flatnonzero((index.lengths >= context) & ~np.isin(index.names, excluded))
    if not len(long):
        return
    first = long[0]
    more = f" (and so in {counted(len(long) - 1, 'more sample')})" if len(long) > 1 else ""
    raise UserError(
        f"source {index.source}: sample {index.names[first].decode()} of row {index.rows[first]}:"
        f" expected fewer tokens than the server's context of {context:,}, found"
        f" {index.lengths[first]:,}{more}: set data.max_tokens to"
        f" {context - 1} or less (over_long says whether they are skipped or cut), or, where the"
        f" model can take more, server.args: [{CONTEXT_FLAG}, <tokens>]"
    )


def _cut(index: SourceIndex, reasons: np.ndarray, spec: CaptureSpec, options: PlanOptions) -> _Cut:
    """Cut one source into shards; `reasons` holds 0 for a sample that is kept."""
    kept = np.flatnonzero(reasons == 0)
    names = [name.decode() for name in index.names[kept].tolist()]
    sizes = index.lengths[kept] * spec.token_bytes + OFFSET_BYTES
    shard_of = np.full(len(index.names), -1, dtype=np.int32)
    pieces = segment(names, sizes, min_bytes=options.min_bytes, max_bytes=options.max_bytes)
    for number, (first, end) in enumerate(pieces):
        shard_of[kept[first:end]] = number
    lengths = [index.lengths[kept[first:end]] for first, end in pieces]
    segments = _segments(index, shard_of, lengths, options)
    entries, all_bytes, kept_sizes = [], [], []
    for (first, end), shared in zip(pieces, segments, strict=True):
        chosen = kept[first:end]
        tokens = int(index.lengths[chosen].sum())
        rows = shared.rows if shared else tokens
        entry = PlannedShard(
            shard_id=shard_id(names[first:end], shared),
            source=index.source,
            samples=end - first,
            tokens=tokens,
            supervised_tokens=int(index.supervised[chosen].sum()),
            shared_tokens=tokens - rows,
            bytes=spec.shard_bytes(
                samples=end - first,
                tokens=tokens,
                rows=rows,
                segments=len(shared.places) if shared else 0,
            ),
            answered=index.is_answered,
        )
        entries.append(entry)
        extra = _extra_bytes(
            names[first:end],
            index.lengths[chosen],
            shared,
            shard_id=entry.shard_id,
            spec=spec,
            options=options,
        )
        all_bytes.append(entry.bytes + extra)
        records = (end - first) * _BYTES_PER_SAMPLE + _BYTES_PER_SHARD
        beside = extra if options.form is None else records
        kept_sizes.append(kept_bytes(entry, spec=spec, form=options.form) + beside)
    return _Cut(
        index=index,
        shard_of=shard_of,
        entries=entries,
        segments=segments,
        sizes=all_bytes,
        kept=kept_sizes,
        account=_account(index, reasons),
    )


def _segments(
    index: SourceIndex, shard_of: np.ndarray, lengths: list[np.ndarray], options: PlanOptions
) -> list[Segments | None]:
    """Return the places of the rows of each shard whose samples share rows, None for the others."""
    if not options.share_prefixes:
        return [None] * len(lengths)
    return [
        share_prefixes(input_ids, of_shard, minimum=options.min_shared_tokens)
        for input_ids, of_shard in zip(shard_input_ids(index, shard_of), lengths, strict=True)
    ]


def _account(index: SourceIndex, reasons: np.ndarray) -> SourceAccount:
    """Return the source's accounting, with the rows that the plan drops counted as skipped.

    A row counts as kept while one of its samples is kept.
    """
    kept = reasons == 0
    rows, first, row_of = np.unique(index.rows, return_index=True, return_inverse=True)
    lost = np.bincount(row_of, weights=kept, minlength=len(rows)) == 0
    dropped = Counter(reasons[first[lost]].tolist())
    skipped = Counter(index.accounting["skipped"]) + dropped
    account = SourceAccount(
        rows_in=index.accounting["rows_in"],
        kept=int(len(rows) - lost.sum()),
        samples=int(kept.sum()),
        skipped=dict(sorted(skipped.items())),
        failed=dict(sorted(index.accounting["failed"].items())),
        tokens=int(index.lengths[kept].sum()),
        supervised_tokens=int(index.supervised[kept].sum()),
        not_used=dict(index.accounting.get("not_used", {})),
        renderer=index.accounting.get("renderer", ""),
        data=index.accounting.get("data", ""),
        answers=_answers(index),
    )
    account.check(f"source {index.source}")
    return account


def _answers(index: SourceIndex) -> AnswersAccount | None:
    """Return the account of the target model's answers, without the examples for people."""
    if not index.is_answered:
        return None
    said = index.accounting["answers"]
    names = [field.name for field in dataclasses.fields(AnswersAccount)]
    return AnswersAccount(**{name: said[name] for name in names})


def _extra_bytes(
    names: list[str],
    lengths: np.ndarray,
    segments: Segments | None,
    *,
    shard_id: str,
    spec: CaptureSpec,
    options: PlanOptions,
) -> int:
    """Return a shard's bytes beside its states: prefix recaptures, headers, receipts."""
    recaptures = choose_recaptures(
        names,
        lengths.tolist(),
        shard_id=shard_id,
        fraction=options.recapture_fraction,
        minimum=options.recapture_minimum,
        segments=segments,
    )
    recapture_bytes = spec.shard_bytes(
        samples=len(recaptures), tokens=sum(rows for _, rows in recaptures)
    )
    return recapture_bytes + len(names) * _BYTES_PER_SAMPLE + _BYTES_PER_SHARD


def _totals(accounts: list[SourceAccount]) -> SourceAccount:
    """Return the account of all sources together, which must close."""
    numbers = ("rows_in", "kept", "samples", "tokens", "supervised_tokens")
    reasons = {
        name: sum((Counter(getattr(account, name)) for account in accounts), Counter())
        for name in ("skipped", "failed", "not_used")
    }
    totals = SourceAccount(
        **{name: sum(getattr(account, name) for account in accounts) for name in numbers},
        **{name: dict(sorted(counts.items())) for name, counts in reasons.items()},
    )
    totals.check("all sources")
    return totals


def _reasons(account: SourceAccount) -> str:
    return (
        ", ".join(f"{count:,} {reason}" for reason, count in account.skipped.items())
        or "the sources are empty"
    )


def _check_distinct(entries: list[PlannedShard]) -> None:
    """Refuse two shards of the same samples, which would be one file.

    Two such shards are possible only where duplicates are kept.
    """
    first: dict[str, str] = {}
    for entry in entries:
        if entry.shard_id in first:
            raise UserError(
                f"sources {first[entry.shard_id]} and {entry.source} hold the same"
                f" {entry.samples} samples in a row (shard {entry.shard_id}): list them once,"
                " or set data.deduplicate"
            )
        first[entry.shard_id] = entry.source

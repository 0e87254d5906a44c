"""Statistics of the tokenised sources: lengths, turns, shared prefixes, and vocabulary.

All distributions are counts in fixed ranges, so their size does not depend on the number of
samples, and those of several sources can be compared.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from draftstates.plan.room import hours
from draftstates.records import Plan
from draftstates.tokens.files import SourceIndex, open_tokens, read_index

_SHARES = (0.5, 0.9, 0.99)
# two ranges for each doubling of the length
EDGES = tuple(int(round(2 ** (step / 2))) for step in range(4, 45))
MOST_TURNS = 20
_EXAMPLES = 2
# of the accounting; the last three are of kept rows that are no tokens
_COUNTED = (
    "duplicate_samples",
    "cut_samples",
    "conversations",
    "with_reasoning",
    "with_tools",
)
# a prefix is counted once for each step of tokens; more tokens need wider steps to fit into memory
_STEP, _WIDE_STEP, _MOST_TOKENS = 16, 128, 1 << 28
_MOST_PARTS = 2048
_CURVE_POINTS = 80
_BATCH = 1024


def statistics(
    plan: Plan, *, tokens_folder: Path, tokens_per_second: float | None = None
) -> dict[str, Any]:
    """Return the statistics of a plan's sources.

    Args:
        plan: the plan.
        tokens_folder: folder of `<source>.parquet` and `<source>.json` of each source.
        tokens_per_second: assumed rate of the capture, for the hours that it will take; None leaves
            them out.

    Returns:
        `sources`: the statistics of each (see `_of_source`);
        `edges`: the ranges of `lengths` and `supervised`: bin i begins with edge i;
        `prefixes`: all tokens, and those whose prefix an earlier sample has (see `Prefixes`);
        `coverage`: pairs of a vocabulary's size and the share of supervised tokens that its most
            frequent tokens cover, and the number of distinct supervised tokens;
        `tokens`, `shards`, `bytes_needed`, `bytes_present`, `disk_free`, `hours`.

    Raises:
        UserError: a source's files are missing or disagree.
    """
    total = plan.accounting.totals.tokens
    prefixes = Prefixes(_STEP if total <= _MOST_TOKENS else _WIDE_STEP)
    counts = np.zeros(0, np.int64)
    sources = {}
    for name, account in plan.accounting.sources.items():
        path = tokens_folder / f"{name}.parquet"
        index = read_index(path)
        turns = np.zeros(MOST_TURNS + 1, np.int64)
        for ids, mask, offsets in _batches(path):
            prefixes.add(ids, offsets)
            turns += _turns(mask, offsets)
            counts = _added(counts, np.bincount(ids[mask]))
        sources[name] = {
            "rows_in": account.rows_in,
            "kept": account.kept,
            "skipped": account.skipped,
            "failed": account.failed,
            **_of_source(index),
            "turns": turns.tolist(),
        }
    room = {name: getattr(plan, name) for name in ("bytes_needed", "bytes_present", "disk_free")}
    return {
        "sources": sources,
        "edges": list(EDGES),
        "prefixes": prefixes.summary(total),
        "coverage": _coverage(counts),
        "tokens": total,
        "shards": len(plan.shards),
        **room,
        "hours": hours(plan, tokens_per_second),
    }


def _of_source(index: SourceIndex) -> dict[str, Any]:
    """Return what a source's lengths and its accounting say.

    Returns:
        `samples`, `tokens`, `supervised_tokens`, `supervised_share`; `lengths` and `supervised`
        (see `_spread`); the accounting's counts of what is not in the samples; and for each reason
        of skipping at most two rows as `examples`.
    """
    said = index.accounting
    examples: dict[str, list[Mapping[str, Any]]] = {}
    for example in said.get("examples", []):
        found = examples.setdefault(example["reason"], [])
        if len(found) < _EXAMPLES:
            found.append(example)
    tokens, supervised = int(index.lengths.sum()), int(index.supervised.sum())
    return {
        "samples": len(index.lengths),
        "tokens": tokens,
        "supervised_tokens": supervised,
        "supervised_share": round(supervised / max(tokens, 1), 4),
        "lengths": _spread(index.lengths),
        "supervised": _spread(index.supervised),
        **{name: said.get(name, 0) for name in _COUNTED},
        **{name: said.get(name, {}) for name in ("lost_turns", "not_rendered", "not_used")},
        "examples": examples,
        "answers": said.get("answers"),
    }


def _batches(path: Path) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Give ids [T], mask as bool [T] and offsets [S+1] of each batch of a source's samples."""
    with open_tokens(path) as file:
        for batch in file.iter_batches(batch_size=_BATCH, columns=["input_ids", "loss_mask"]):
            ids, mask = batch.column("input_ids"), batch.column("loss_mask")
            offsets = ids.offsets.to_numpy().astype(np.int64)
            yield (
                ids.flatten().to_numpy(),
                mask.flatten().to_numpy().astype(bool),
                offsets - offsets[0],
            )


def _turns(mask: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the number of samples with n supervised turns, [MOST_TURNS + 1].

    A supervised turn is a run of supervised tokens. The last entry counts all longer samples.
    """
    begins = mask.copy()
    begins[1:] &= ~mask[:-1]
    starts = offsets[:-1]
    begins[starts] = mask[starts]
    found = np.add.reduceat(begins.astype(np.int64), starts)
    return np.bincount(np.minimum(found, MOST_TURNS), minlength=MOST_TURNS + 1)


def _spread(values: np.ndarray) -> dict[str, Any]:
    """Return least, quantiles, greatest and mean value, and the counts by range of `EDGES`."""
    if not len(values):
        return {}
    quantiles = {
        f"p{share * 100:.0f}": int(np.quantile(values, share, method="lower")) for share in _SHARES
    }
    bins = np.searchsorted(EDGES, values, side="right") - 1
    return {
        "least": int(values.min()),
        **quantiles,
        "greatest": int(values.max()),
        "mean": round(float(values.mean()), 1),
        "counts": np.bincount(np.clip(bins, 0, None), minlength=len(EDGES)).tolist(),
    }


def _added(counts: np.ndarray, more: np.ndarray) -> np.ndarray:
    if len(more) > len(counts):
        counts, more = more, counts
    counts[: len(more)] += more
    return counts


def _coverage(counts: np.ndarray) -> dict[str, Any]:
    """Return for several n the share of supervised tokens that the n most frequent make up."""
    used = np.sort(counts[counts > 0])[::-1]
    if not len(used):
        return {"distinct": 0, "curve": []}
    sizes = np.unique(np.geomspace(1, len(used), _CURVE_POINTS).round().astype(np.int64))
    shares = np.cumsum(used)[sizes - 1] / used.sum()
    return {
        "distinct": len(used),
        "curve": [
            [int(size), round(float(share), 6)] for size, share in zip(sizes, shares, strict=True)
        ],
    }


class Prefixes:
    """A count of the tokens whose prefix an earlier sample has too.

    A prefix is looked at at every `step` tokens, by a hash of 64 bits, so the count of repeated
    tokens is low by less than `step` for each sample.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._seen: list[np.ndarray] = []
        self._blocks = 0
        self._powers = np.ones(1, np.uint64)

    def add(self, ids: np.ndarray, offsets: np.ndarray) -> None:
        """Add samples: ids [T] and offsets [S+1]."""
        lengths = np.diff(offsets)
        place = np.arange(len(ids)) - np.repeat(offsets[:-1], lengths)
        with np.errstate(over="ignore"):
            self._grow(int(lengths.max(initial=1)))
            terms = _mixed(ids.astype(np.uint64)) * self._powers[place]
            sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
            ends = np.flatnonzero((place + 1) % self._step == 0)
            before = sums[np.repeat(offsets[:-1], lengths)[ends]]
            self._seen.append(_mixed(sums[ends + 1] - before + self._powers[place[ends]]))
        self._blocks += len(ends)
        if len(self._seen) > _MOST_PARTS:
            self._seen = [np.unique(np.concatenate(self._seen))]

    def _grow(self, length: int) -> None:
        """Have powers of an odd number for samples of this length."""
        if length > len(self._powers):
            factors = np.full(2 * length, 0x9E3779B97F4A7C15, np.uint64)
            factors[0] = 1
            self._powers = np.multiply.accumulate(factors)

    def summary(self, tokens: int) -> dict[str, int]:
        """Return all tokens, those whose prefix an earlier sample has, and the step of the count.

        Args:
            tokens: tokens of all samples.
        """
        distinct = len(np.unique(np.concatenate([np.zeros(0, np.uint64), *self._seen])))
        repeated = (self._blocks - distinct) * self._step
        return {"tokens": tokens, "repeated": repeated, "step": self._step}


def _mixed(values: np.ndarray) -> np.ndarray:
    """Return numbers of 64 bits whose bits all depend on all bits of `values` (splitmix64)."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))

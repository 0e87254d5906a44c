"""A drafter's vocabulary from a plan's tokens, as speculators and SpecForge read it.

It needs the tokens alone, so it is made before the capture.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from draftstates.errors import UserError
from draftstates.files import publish_folder
from draftstates.plan.shard_tokens import read_tokens
from draftstates.records import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class VocabularyMap:
    """Mappings between draft ids and target ids, as EAGLE-3's trainers and servers hold them.

    Attributes:
        d2t: int64 [D]: target id = draft id + d2t[draft id].
        t2d: bool [V]: whether a target id is in the draft vocabulary.
    """

    d2t: np.ndarray
    t2d: np.ndarray


class TokenCounts:
    """Counts of each token among the supervised tokens."""

    def __init__(self, vocab_size: int | None = None) -> None:
        self.vocab_size = vocab_size
        self.counts = np.zeros(vocab_size or 0, dtype=np.int64)

    def add(self, name: str, input_ids: np.ndarray, loss_mask: np.ndarray) -> None:
        """Count the tokens, int [n], of a sample where its mask, 0 or 1 [n], is 1.

        Raises:
            UserError: an id outside the vocabulary.
        """
        if self.vocab_size is not None and len(input_ids) and input_ids.max() >= self.vocab_size:
            raise UserError(
                f"sample {name}: token id {input_ids.max()} in a vocabulary of {self.vocab_size}"
            )
        found = np.bincount(input_ids[loss_mask.astype(bool)], minlength=len(self.counts))
        found[: len(self.counts)] += self.counts
        self.counts = found

    def nonzero(self) -> dict[int, int]:
        """Return the count of each token that occurs, by token id."""
        return {int(token): int(self.counts[token]) for token in np.flatnonzero(self.counts)}


def check_draft_size(draft_size: int, *, target_size: int) -> None:
    """Compare the configuration's `draft_vocab_size` with the model's vocabulary.

    Raises:
        UserError: it is larger.
    """
    if draft_size > target_size:
        raise UserError(
            f"draft_vocab_size: expected at most the model's {target_size:,}, found {draft_size:,}"
        )


def vocabulary_key(plan: Plan, *, draft_size: int, target_size: int) -> str:
    """Return 16 hex digits that depend on the samples of a plan and the two sizes alone."""
    named = {
        "shards": sorted(shard.shard_id for shard in plan.shards),
        "draft": draft_size,
        "target": target_size,
    }
    return hashlib.sha256(
        b"draftstates.vocabulary.v1\0" + json.dumps(named, sort_keys=True).encode()
    ).hexdigest()[:16]


def draft_vocabulary(counts: np.ndarray, *, draft_size: int) -> VocabularyMap:
    """Choose the `draft_size` most frequent tokens; among equal counts the lowest ids come first.

    Args:
        counts: int64 [V].

    Raises:
        UserError: `draft_size` does not lie in 1..V.
    """
    if not 1 <= draft_size <= len(counts):
        raise UserError(f"draft vocabulary size must lie in 1..{len(counts)}, found {draft_size}")
    chosen = np.sort(np.argsort(-counts, kind="stable")[:draft_size])
    t2d = np.zeros(len(counts), dtype=bool)
    t2d[chosen] = True
    return VocabularyMap(d2t=chosen - np.arange(draft_size), t2d=t2d)


def write_vocabulary(
    plan: Plan, *, shard_tokens: Path, draft_size: int, target_size: int, output: Path
) -> Path:
    """Write the vocabulary of a plan into a folder of its own below `output`.

    A folder that exists already is left unchanged. The tokens that are supervised most often are
    chosen; among equal counts the lowest ids come first. If fewer than `draft_size` tokens occur,
    the lowest other ids fill the vocabulary. The files for speculators are `token_freq.pt`,
    `d2t.npy` and `t2d.npy`; the file for SpecForge is `vocab_mapping.pt`; `vocabulary.json`
    describes them.

    Args:
        plan: the plan.
        shard_tokens: folder of `<shard_id>.parquet`.
        draft_size: tokens of the drafter's vocabulary.
        target_size: tokens of the target model's vocabulary.

    Returns:
        the folder, named by the content (see `vocabulary_key`).

    Raises:
        UserError: a shard's tokens are missing, an id lies outside the model's vocabulary, or the
            sizes do not fit.
    """
    key = vocabulary_key(plan, draft_size=draft_size, target_size=target_size)
    folder = output / key
    if folder.exists():
        return folder
    counts = TokenCounts(target_size)
    for shard in plan.shards:
        path = shard_tokens / f"{shard.shard_id}.parquet"
        tokens = read_tokens(path, shard_id=shard.shard_id)
        counts.add(f"in {path}", tokens.input_ids, tokens.loss_mask)
    mapping = draft_vocabulary(counts.counts, draft_size=draft_size)
    chosen = int(counts.counts[mapping.t2d].sum())
    about = {
        "format": "draftstates.vocabulary",
        "format_version": 1,
        "key": key,
        "draft_size": draft_size,
        "target_size": target_size,
        "distinct_supervised_tokens": int(np.count_nonzero(counts.counts)),
        "supervised_tokens": int(counts.counts.sum()),
        "covered_share": chosen / max(int(counts.counts.sum()), 1),
    }
    partial = output / f".{key}.{os.getpid()}.partial"
    partial.mkdir(parents=True)
    try:
        _write(partial, counts, mapping.d2t, mapping.t2d, about)
        publish_folder(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _write(
    folder: Path, counts: TokenCounts, d2t: np.ndarray, t2d: np.ndarray, about: dict[str, Any]
) -> None:
    """Write the files for speculators and SpecForge, and their description."""
    import torch

    from draftstates.exports.common import check_torch, save_torch

    np.save(folder / "d2t.npy", d2t)
    np.save(folder / "t2d.npy", t2d)
    for name, values in {
        "token_freq.pt": counts.nonzero(),
        "vocab_mapping.pt": {"d2t": torch.from_numpy(d2t), "t2d": torch.from_numpy(t2d)},
    }.items():
        save_torch(folder / name, values)
        check_torch(folder / name, values)
    (folder / "vocabulary.json").write_text(json.dumps(about, indent=1) + "\n")

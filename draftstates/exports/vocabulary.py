"""The smaller vocabulary of a drafter: the tokens that are learned most often."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from draftstates.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class VocabularyMap:
    """Draft ids to target ids and back, as EAGLE-3's trainers and servers hold them.

    Attributes:
        d2t: int64 [D]: target id = draft id + d2t[draft id].
        t2d: bool [V]: whether a target id is in the draft vocabulary.
    """

    d2t: np.ndarray
    t2d: np.ndarray


class TokenCounts:
    """How often each token is a target to learn."""

    def __init__(self, vocab_size: int | None = None) -> None:
        self.vocab_size = vocab_size
        self.counts = np.zeros(vocab_size or 0, dtype=np.int64)

    def add(self, name: str, input_ids: np.ndarray, loss_mask: np.ndarray) -> None:
        """Count a sample's tokens, int [n], where its mask, 0 or 1 [n], is set.

        Raises:
            UserError: an id outside the vocabulary.
        """
        if self.vocab_size is not None and len(input_ids) and input_ids.max() >= self.vocab_size:
            raise UserError(f"sample {name}: token id {input_ids.max()} in a vocabulary of {self.vocab_size}")
        found = np.bincount(input_ids[loss_mask.astype(bool)], minlength=len(self.counts))
        found[: len(self.counts)] += self.counts
        self.counts = found

    def nonzero(self) -> dict[int, int]:
        """Token id to count, for the tokens that occur."""
        return {int(token): int(self.counts[token]) for token in np.flatnonzero(self.counts)}


def check_draft_size(draft_size: int, *, target_size: int) -> None:
    """Hold the configuration's `draft_vocab_size` to the model's vocabulary.

    Raises:
        UserError: it is larger.
    """
    if draft_size > target_size:
        raise UserError(f"draft_vocab_size: expected at most the model's {target_size:,}, found {draft_size:,}")


def vocabulary_key(plan: Mapping[str, Any], *, draft_size: int, target_size: int) -> str:
    """16 hex digits that change with the samples of a plan and the two sizes, and with nothing else."""
    named = {"shards": sorted(shard["shard_id"] for shard in plan["shards"]), "draft": draft_size, "target": target_size}
    return hashlib.sha256(b"draftstates.vocabulary.v1\0" + json.dumps(named, sort_keys=True).encode()).hexdigest()[:16]


def draft_vocabulary(counts: np.ndarray, *, draft_size: int) -> VocabularyMap:
    """The `draft_size` most frequent tokens, ties and unseen ones by lower id.

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


def model_vocab_size(folder: Path) -> int:
    """The vocabulary size in a model folder's config.json (the text model's, where it wraps one).

    Raises:
        UserError: no config.json, or none in it.
    """
    try:
        config = json.loads((Path(folder) / "config.json").read_text())
        return int(config.get("text_config", config)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}: expected config.json with a vocab_size, found {type(error).__name__}: {error}") from error

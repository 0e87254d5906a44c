"""A drafter's vocabulary out of a plan's tokens alone, before anything is captured, as speculators and SpecForge want it."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from draftstates.building import sync_folder
from draftstates.exports.common import check_torch, save_torch
from draftstates.shard_tokens import read_tokens
from draftstates.vocab import TokenCounts, draft_vocabulary, vocabulary_key


def write_vocabulary(plan: Mapping[str, Any], *, shard_tokens: Path, draft_size: int, target_size: int, output: Path) -> Path:
    """Write the vocabulary of a plan into a folder of its own below `output`; one that is there already is left as it is.

    The tokens most often targets are chosen, ties by the lower id; where fewer than `draft_size` occur, the lowest other ids fill up.
    speculators' files are `token_freq.pt`, `d2t.npy` and `t2d.npy`, SpecForge's is `vocab_mapping.pt`; `vocabulary.json` tells of what.

    Args:
        plan: content of `plan.json`. shard_tokens: folder of `<shard_id>.parquet`.
        draft_size, target_size: tokens of the drafter's vocabulary and of the model's.

    Returns:
        the folder, named by the content (see `vocabulary_key`).

    Raises:
        UserError: a shard's tokens are missing, an id lies outside the model's vocabulary, or the sizes do not fit.
    """
    key = vocabulary_key(plan, draft_size=draft_size, target_size=target_size)
    folder = output / key
    if folder.exists():
        return folder
    counts = TokenCounts(target_size)
    for shard in plan["shards"]:
        path = shard_tokens / f"{shard['shard_id']}.parquet"
        tokens = read_tokens(path, shard_id=shard["shard_id"])
        counts.add(f"in {path}", tokens.input_ids, tokens.loss_mask)
    mapping = draft_vocabulary(counts.counts, draft_size=draft_size)
    chosen = int(counts.counts[mapping.t2d].sum())
    about = {
        "format": "draftstates.vocabulary",
        "format_version": 1,
        "key": key,
        "draft_size": draft_size,
        "target_size": target_size,
        "distinct_targets": int(np.count_nonzero(counts.counts)),
        "targets": int(counts.counts.sum()),
        "covered_share": chosen / max(int(counts.counts.sum()), 1),
    }
    partial = output / f".{key}.{os.getpid()}.partial"
    partial.mkdir(parents=True)
    try:
        _write(partial, counts, mapping.d2t, mapping.t2d, about)
        os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    sync_folder(output)
    return folder


def _write(folder: Path, counts: TokenCounts, d2t: np.ndarray, t2d: np.ndarray, about: dict[str, Any]) -> None:
    import torch

    np.save(folder / "d2t.npy", d2t)
    np.save(folder / "t2d.npy", t2d)
    for name, values in {
        "token_freq.pt": counts.nonzero(),
        "vocab_mapping.pt": {"d2t": torch.from_numpy(d2t), "t2d": torch.from_numpy(t2d)},
    }.items():
        save_torch(folder / name, values)
        check_torch(folder / name, values)
    (folder / "vocabulary.json").write_text(json.dumps(about, indent=1) + "\n")
    for file in folder.iterdir():
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
    sync_folder(folder)

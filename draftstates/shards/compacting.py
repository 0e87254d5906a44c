"""Making of a compact shard: the source is held to its checksums, the result is read back.

`draftstates compact` makes compact copies of whole manifests, and the workflow's rule `compact` one
shard at a time; both do it here.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from draftstates.errors import UserError, capture_again
from draftstates.files import file_checksum, first_difference
from draftstates.model.digest import check_content
from draftstates.model.folder import ModelFolder
from draftstates.model.head import read_head
from draftstates.records import Stored, Verified
from draftstates.shards.compact import (
    CompactShard,
    Storage,
    TopToken,
    compact_sample,
    needed_finals,
    write_compact,
)
from draftstates.shards.layout import Shard
from draftstates.spec import CaptureSpec

# Rows whose logits are computed at a time.
_ROWS = 1024


def top_token_of(folder: Path | None, capture: CaptureSpec) -> TopToken:
    """Return a function that gives the most likely token of final states.

    Args:
        folder: folder of the captured model.
        capture: the capture whose final states they are.

    Raises:
        UserError: there is no folder, or it holds another model.
    """
    if folder is None:
        raise UserError("keep_top_token needs the captured model's folder")
    model = ModelFolder(folder)
    check_content(model, expected=capture.model_digest)
    head = read_head(model, final_norm=capture.final_norm)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = head.weight.float().to(device)

    def top_token(rows: torch.Tensor) -> torch.Tensor:
        rows = head.norm(rows) if head.norm else rows
        blocks = rows.float().to(device).split(_ROWS)
        return (
            torch.cat([(block @ weight.T).argmax(-1).cpu() for block in blocks])
            if len(rows)
            else torch.zeros(0, dtype=torch.int64)
        )

    return top_token


def check_source(source: Shard, checksums: Sequence[str]) -> None:
    """Refuse a shard whose states, tokens or masks are not those that were verified.

    Args:
        checksums: of each sample's states, in order, as verification found them.

    Raises:
        UserError: names the sample that differs.
    """
    for index, (sample_id, checksum) in enumerate(
        zip(source.header.sample_ids, checksums, strict=True)
    ):
        if source.checksum(index) != checksum:
            raise UserError(
                f"{source.path}: sample {sample_id} does not have the checksum that the manifest"
                f" or its verification says; {capture_again(source.path)}"
            )
        if source.content_id(index) != sample_id:
            raise UserError(
                f"{source.path}: sample {sample_id} has other tokens or another mask than its id"
                f" says; {capture_again(source.path)}"
            )


def check_compact(
    path: Path, source: Shard, storage: Storage, top_token: TopToken | None
) -> CompactShard:
    """Read a compact shard back, compare it with what was to be written, and return it.

    Raises:
        UserError: names the sample that differs.
    """
    compact = CompactShard(path)
    needed = needed_finals(source.loss_mask, source.offsets, source.segments, storage)
    for index, sample_id in enumerate(source.header.sample_ids):
        expected = compact_sample(source, index, storage, top_token, needed)
        found = compact.stored(index)
        tokens = all(
            np.array_equal(a, b)
            for a, b in zip(compact.tokens(index), source.tokens(index), strict=True)
        )
        same = found.keys() == expected.keys() and all(
            found[name].dtype == value.dtype and torch.equal(_raw(found[name]), _raw(value))
            for name, value in expected.items()
        )
        if not tokens or not same:
            raise UserError(
                f"{path}: sample {sample_id} reads back as something else than was written"
            )
    return compact


def store_compact(
    shard: Path,
    path: Path,
    *,
    storage: Storage,
    verified: Verified,
    capture: CaptureSpec,
    model: Path,
) -> Stored:
    """Write the compact form of a verified shard, read it back, and return its record.

    Args:
        shard: the captured file.
        path: file to write; the caller gives it its final name.
        storage: form in which to store the states.
        verified: what verification found of the captured file.
        capture: the shard's capture.
        model: folder of the target model.

    Raises:
        UserError: the captured file is not the verified one, or the form differs when it is read
            back.
    """
    top_token = top_token_of(model, capture) if storage.keep_top_token else None
    source = Shard(shard)
    expected = {"samples": list(verified.samples.sample_id), "bytes": verified.bytes}
    found = {"samples": source.header.sample_ids, "bytes": source.header.size}
    if difference := first_difference(expected, found):
        raise UserError(
            f"{shard}: changed since verification: {difference.name} differ; {capture_again(shard)}"
        )
    check_source(source, verified.samples.checksum)
    write_compact(source, path, storage, top_token)
    compact = check_compact(path, source, storage, top_token)
    return Stored(
        shard_id=verified.shard_id,
        capture_key=verified.capture_key,
        storage=json.loads(storage.text),
        captured_checksum=verified.checksum,
        bytes=path.stat().st_size,
        checksum=file_checksum(path),
        samples=tuple(compact.checksum(index) for index in range(len(source))),
    )


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    # torch does not compare e4m3 numbers.
    return tensor.contiguous().view(torch.uint8)

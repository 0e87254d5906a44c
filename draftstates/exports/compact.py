"""A run's manifest and shards made compact, in a folder beside it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from draftstates import model
from draftstates.building import publish, publish_text
from draftstates.dataset import read_manifest
from draftstates.errors import UserError
from draftstates.shards import Shard
from draftstates.storage import CompactShard, Storage, TopToken, compact_sample, write_compact
from draftstates.verify import file_checksum

_ROWS = 1024  # logits of so many rows at a time


def compact_manifest(manifest: Path, output: Path, storage: Storage, model_folder: Path | None = None) -> dict:
    """Write `output/shards/*.safetensors`, `samples.parquet` and, when all is there and read back, `manifest.json`.

    A shard that `output` has already, of the same capture, samples and storage, is kept. Returns the manifest.

    Args:
        model_folder: the captured model's; needed for `keep_top_token` alone.

    Raises:
        UserError: the manifest is compact already, a shard is damaged, or the result reads back as something else.
    """
    document = read_manifest(manifest)
    if "storage" in document:
        raise UserError(f"{manifest}: compact already: {document['storage']}")
    if not (storage.fp8 or storage.supervised_rows):
        raise UserError("nothing to do: ask for fp8 or supervised_rows")
    top_token = _top_token(model_folder, document["capture"]) if storage.keep_top_token else None
    folder = Path(output) / "shards"
    folder.mkdir(parents=True, exist_ok=True)
    table = pq.read_table(manifest.with_name("samples.parquet"))
    checksums = dict(zip(_places(table), table["checksum"].to_pylist(), strict=True))
    shards = []
    for entry in document["shards"]:
        path = folder / f"{entry['shard_id']}.safetensors"
        source = Shard(manifest.parent / entry["path"])
        for index, sample_id in enumerate(source.header.sample_ids):
            _check_source(source, index, sample_id, checksums[entry["shard_id"], index])
        if not _is_there(path, source, storage):
            part = path.with_name(f"{path.name}.part")
            write_compact(source, part, storage, top_token)
            publish(part, path)
        compact = CompactShard(path)
        for index in range(len(source)):
            _check_sample(compact, source, index, storage, top_token)
            checksums[entry["shard_id"], index] = compact.checksum(index)
        shards.append({**entry, "path": f"shards/{path.name}", "bytes": path.stat().st_size, "checksum": file_checksum(path)})
    _write_table(table, checksums, Path(output) / "samples.parquet")
    document = {**document, "storage": json.loads(storage.text), "shards": shards}
    if "totals" in document:
        document["totals"] = {**document["totals"], "bytes": sum(shard["bytes"] for shard in shards)}
    publish_text(json.dumps(document, indent=1) + "\n", Path(output) / "manifest.json")
    return document


def _check_source(source: Shard, index: int, sample_id: str, checksum: str) -> None:
    if source.checksum(index) != checksum:
        raise UserError(f"{source.path}: sample {sample_id} does not have the checksum that the manifest says")
    if source.content_id(index) != sample_id:
        raise UserError(f"{source.path}: sample {sample_id} has other tokens or another mask than its id says")


def _top_token(folder: Path | None, capture: dict) -> TopToken:
    if folder is None:
        raise UserError("keep_top_token needs the captured model's folder")
    if capture.get("model_digest", found := model.digest(folder)) != found:
        raise UserError(f"{folder}: not the captured model: expected content {capture['model_digest'][:16]}, found {found[:16]}")
    head = model.read_head(folder, final_norm=capture["final_norm"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = head.weight.float().to(device)

    def top_token(rows: torch.Tensor) -> torch.Tensor:
        rows = head.norm(rows) if head.norm else rows
        blocks = rows.float().to(device).split(_ROWS)
        return torch.cat([(block @ weight.T).argmax(-1).cpu() for block in blocks]) if len(rows) else torch.zeros(0, dtype=torch.int64)

    return top_token


def _is_there(path: Path, source: Shard, storage: Storage) -> bool:
    if not path.exists():
        return False
    found = CompactShard(path).metadata
    return found["storage"] == storage.text and all(found[name] == source.header.metadata[name] for name in ("shard_id", "capture_key"))


def _check_sample(compact: CompactShard, source: Shard, index: int, storage: Storage, top_token: TopToken | None) -> None:
    expected, found = compact_sample(source, index, storage, top_token), compact.stored(index)
    tokens = all((a == b).all() for a, b in zip(compact.tokens(index), _tokens(source, index), strict=True))
    same = all(found[name].dtype == value.dtype and torch.equal(_raw(found[name]), _raw(value)) for name, value in expected.items())
    if not tokens or not same:
        raise UserError(f"{compact.path}: sample {source.header.sample_ids[index]} reads back as something else: delete the file")


def _tokens(shard: Shard, index: int) -> tuple:
    first, end = shard.rows(index)
    return shard.input_ids[first:end], shard.loss_mask[first:end]


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)  # e4m3 has no comparison of its own


def _places(table: pa.Table) -> Iterator[tuple[str, int]]:
    """Shard and position of each row: where nothing is deduplicated, a sample's id may be there several times."""
    return zip(table["shard_id"].to_pylist(), table["position"].to_pylist(), strict=True)


def _write_table(table: pa.Table, checksums: dict[tuple[str, int], str], path: Path) -> None:
    column = pa.array([checksums[place] for place in _places(table)])
    part = path.with_name(f"{path.name}.part")
    pq.write_table(table.set_column(table.schema.get_field_index("checksum"), "checksum", column), part)
    publish(part, path)

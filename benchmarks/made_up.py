"""A run of any size: the workflow in a folder of its own, without a model or a server.

Tokens and states are random or zero. `benchmarks/scale.py` measures in this folder.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers
import yaml
from safetensors.numpy import save_file

from draftstates import ids
from draftstates.files import file_checksum
from draftstates.records import Engine, Figures, Plan, Verified, VerifiedSamples
from draftstates.shards.layout import Shard, create
from draftstates.tokens.files import SCHEMA, publish_accounting

REPOSITORY = Path(__file__).resolve().parents[1]
HIDDEN, VOCABULARY, LONGEST = 8, 64, 30
LINKED = ("Snakefile", "rules", "draftstates", "schemas", "profiles")
MOVE = """
import os, sys
option = dict(zip(sys.argv[1::2], sys.argv[2::2]))
for suffix in {suffixes}:
    path = option["--output"].rsplit("/", 1)[0] + "/" + option["--shard-id"] + suffix
    os.rename("made/" + os.path.basename(path), path)
    os.utime(path)
"""
STAND_INS = {
    "extract.py": MOVE.format(
        suffixes=(".recaptures.safetensors", ".receipts.json", ".safetensors")
    ),
    "verify.py": MOVE.format(suffixes=(".json",)),
    "server.py": "import sys; open(sys.argv[-1], 'w').write('{}')",
    "check_parity.py": (
        REPOSITORY / "tests" / "workflow" / "standins" / "check_parity.py"
    ).read_text(),
}
# of the stand-in's parity
SELFTEST = "none"


def make_folder(folder: Path, *, shards: int, samples: int) -> None:
    """Make the folder: the workflow, a model of a head and a tokenizer, and a source's tokens.

    Stand-ins replace the scripts that need a server.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("model", "made"):
        (folder / name).mkdir(parents=True)
    for name in LINKED:
        (folder / name).symlink_to(REPOSITORY / name)
    shutil.copytree(REPOSITORY / "scripts", folder / "scripts")
    for name, text in STAND_INS.items():
        (folder / "scripts" / name).write_text(text)
    kind = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": False,
    }
    shape = {
        "num_hidden_layers": 8,
        "num_attention_heads": 1,
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
    }
    (folder / "model" / "config.json").write_text(json.dumps({**kind, **shape}))
    save_file(
        {"lm_head.weight": np.ones((VOCABULARY, HIDDEN), np.float32)},
        folder / "model" / "model.safetensors",
    )
    write_tokenizer(folder / "model")
    (folder / "source.jsonl").write_text("{}\n")
    write_tokens(folder / "results" / "tokens" / "source.parquet", short_samples(samples))
    mean = samples * (LONGEST // 2 * (4 * HIDDEN * 2 + 5) + 8) // shards
    config = {
        "data": {"sources": [{"name": "source", "files": ["source.jsonl"]}], "max_tokens": LONGEST},
        "model": {"path": "model"},
        "capture": {"residual_layers": [2, 4, 5], "compute_dtype": "float32"},
        "shards": {"min_bytes": mean // 2, "max_bytes": 2 * mean},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one word per token, so that samples can be shown.

    The ids that number the samples are outside its vocabulary and are shown as empty text.
    """
    words = tokenizers.models.WordLevel(
        {f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"
    )
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"})
    )


def short_samples(samples: int) -> Iterator[list[np.ndarray]]:
    """Yield batches of random samples of up to LONGEST tokens, no two of them alike."""
    draw = np.random.default_rng(samples)
    for first in range(0, samples, 1024):
        lengths = draw.integers(1, LONGEST, min(1024, samples - first))
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        values = draw.integers(0, VOCABULARY, lengths.sum()).astype(np.int32)
        values[starts] = np.arange(first, first + len(lengths))
        yield np.split(values, starts[1:])


def write_tokens(path: Path, batches: Iterator[list[np.ndarray]]) -> None:
    """Write samples as the tokeniser does, half of their tokens supervised, and their accounting.

    Args:
        path: `<source>.parquet`; the accounting is beside it.
        batches: ids of the samples, int32, those of a row group at a time.
    """
    path.parent.mkdir(parents=True)
    draw = np.random.default_rng(0)
    samples, tokens, targets = 0, 0, 0
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        for batch in batches:
            starts = np.concatenate([[0], np.cumsum([*map(len, batch)])]).astype(np.int32)
            values = np.concatenate(batch)
            masks = (draw.random(starts[-1]) < 0.5).astype(np.uint8)
            names = [
                ids.sample_id(sample, masks[a:b])
                for sample, a, b in zip(batch, starts, starts[1:], strict=False)
            ]
            lists = [
                pa.ListArray.from_arrays(pa.array(starts), pa.array(part))
                for part in (values, masks)
            ]
            rows = np.arange(samples, samples + len(names))
            columns = [
                pa.array(rows),
                pa.array(np.zeros(len(rows), np.int32)),
                pa.array(names),
                *lists,
                # the data's own answers have no log probabilities and no temperature
                *(pa.nulls(len(rows), field.type) for field in list(SCHEMA)[5:]),
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=SCHEMA))
            samples, tokens = samples + len(names), tokens + int(starts[-1])
            targets += int(masks.sum())
    counts = {"rows_in": samples, "kept": samples, "samples": samples, "skipped": {}, "failed": {}}
    counts |= {"tokens": tokens, "supervised_tokens": targets}
    publish_accounting(counts, path.with_suffix(".json"), tokens=path)


def make_shards(folder: Path) -> tuple[str, int]:
    """Write every planned shard, of zeros, and its record of verification to `made/`.

    Returns:
        The capture folder and the number of shards.
    """
    plan = Plan.read(folder / "results" / "plan.json")
    for entry in plan.shards:
        shard_id, path = entry.shard_id, folder / "made" / f"{entry.shard_id}.safetensors"
        table = pq.read_table(folder / "results" / "tokens" / "shards" / f"{shard_id}.parquet")
        inputs, masks = (table[name].combine_chunks() for name in ("input_ids", "loss_mask"))
        starts, names, mask = (
            inputs.offsets.to_numpy(),
            table["sample_id"].to_pylist(),
            masks.flatten().to_numpy(),
        )
        lengths, ids_ = np.diff(starts).tolist(), inputs.flatten().to_numpy()
        create(
            path,
            spec=plan.capture,
            shard_id=shard_id,
            sample_ids=names,
            lengths=lengths,
            input_ids=ids_,
            loss_mask=mask,
        )
        shard, targets = Shard(path), np.add.reduceat(mask.astype(np.int64), starts[:-1]).tolist()
        Verified(
            shard_id=shard_id,
            capture_key=plan.capture.key,
            engine=Engine(name="none", version="0"),
            images={"server": (None,), "extract": (None,), "verify": (None,)},
            bytes=shard.header.size,
            checksum=file_checksum(path),
            samples=VerifiedSamples(
                sample_id=tuple(names),
                tokens=tuple(lengths),
                supervised_tokens=tuple(targets),
                checksum=tuple(map(shard.checksum, range(len(names)))),
            ),
            figures=Figures(
                recaptures=3,
                recaptured_tokens=3,
                alignment_share_of_limit=0.0,
                prefix_distance=0.0,
            ),
            selftests=(SELFTEST,),
        ).publish(folder / "made" / f"{shard_id}.json")
        for suffix in (".recaptures.safetensors", ".receipts.json"):
            path.with_suffix(suffix).write_text("-")
    return f"results/{plan.capture_folder}", len(plan.shards)


def place_rest(folder: Path, run: str) -> None:
    """Move the files that an interrupted run left, shards before their records of verification."""
    for suffix in (".safetensors", ".json"):
        for path in sorted((folder / "made").glob(f"*{suffix}")):
            part = (
                "verified"
                if suffix == ".json" and not path.name.endswith(".receipts.json")
                else "shards"
            )
            (folder / run / part).mkdir(parents=True, exist_ok=True)
            os.utime(path)
            path.rename(folder / run / part / path.name)
    if not (folder / run / "server.json").exists():
        (folder / run / "server.json").write_text("{}")
    page = folder / "results" / "report" / "index.html"
    page.parent.mkdir(exist_ok=True)
    page.touch()

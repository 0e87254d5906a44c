"""The drafter's vocabulary out of tokens alone is the one that speculators and SpecForge would make, in files that they read."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from draftstates.ids import sample_id, shard_id
from draftstates.tokens.vocabulary import write_vocabulary

speculators = pytest.importorskip("speculators.train.vocab_mapping", reason="speculators is not installed here: make test-exports")
specforge = pytest.importorskip("specforge.data.preprocessing", reason="specforge is not installed here: make test-exports")

TARGET = 200


@pytest.fixture(params=[8, 60, 150], ids="draft size {}".format)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Counter, int]:
    """The folder, how often each token is a target, and the draft size; of 100 distinct targets many are equally frequent."""
    draw = np.random.default_rng(0)
    ids = draw.zipf(1.3, 4000) % 100 + 50
    mask = (np.arange(len(ids)) % 3 > 0).astype(np.uint8)
    name = sample_id(ids, mask)
    table = {"input_ids": pa.array([ids.tolist()], pa.list_(pa.int32())), "loss_mask": pa.array([mask.tolist()], pa.list_(pa.uint8()))}
    pq.write_table(pa.table({"sample_id": [name], **table}), tmp_path / f"{shard_id([name])}.parquet")
    plan = {"shards": [{"shard_id": shard_id([name])}]}
    folder = write_vocabulary(plan, shard_tokens=tmp_path, draft_size=request.param, target_size=TARGET, output=tmp_path / "v")
    return folder, Counter(sorted(ids[mask == 1].tolist())), request.param


def test_it_is_the_one_that_speculators_makes_of_its_token_frequencies(written: tuple[Path, Counter, int]) -> None:
    folder, counts, size = written
    frequencies = torch.load(folder / "token_freq.pt", weights_only=True)
    assert frequencies == dict(counts)
    d2t, t2d = speculators.build_vocab_mappings_from_distribution(frequencies, size, TARGET)
    assert torch.equal(torch.from_numpy(np.load(folder / "d2t.npy")), d2t)
    assert torch.equal(torch.from_numpy(np.load(folder / "t2d.npy")), t2d)


def test_it_is_the_one_that_specforge_makes_and_loads(written: tuple[Path, Counter, int]) -> None:
    folder, counts, size = written
    assert (len(counts) < size) == (size == 150)
    d2t, t2d = specforge.process_token_dict_to_mappings(Counter(counts), size, TARGET)
    found = torch.load(folder / "vocab_mapping.pt", weights_only=True)
    assert torch.equal(found["d2t"], d2t)
    assert torch.equal(found["t2d"], t2d)
    assert json.loads((folder / "vocabulary.json").read_text())["distinct_targets"] == len(counts)

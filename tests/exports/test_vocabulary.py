"""The drafter's vocabulary, made from tokens alone, is that of speculators and SpecForge.

Both read its files.
"""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from draftstates.exports.vocabulary import write_vocabulary
from draftstates.ids import sample_id, shard_id

speculators = pytest.importorskip(
    "speculators.train.vocab_mapping", reason="speculators is not installed here: make test-exports"
)
specforge = pytest.importorskip(
    "specforge.data.preprocessing", reason="specforge is not installed here: make test-exports"
)

TARGET = 200


@pytest.fixture(params=[8, 60, 150], ids="draft size {}".format)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Counter, int]:
    """Return the folder, how often each token is supervised, and the draft size.

    Many of the 100 distinct supervised tokens are equally frequent.
    """
    draw = np.random.default_rng(0)
    ids = draw.zipf(1.3, 4000) % 100 + 50
    mask = (np.arange(len(ids)) % 3 > 0).astype(np.uint8)
    name = sample_id(ids, mask)
    table = {
        "input_ids": pa.array([ids.tolist()], pa.list_(pa.int32())),
        "loss_mask": pa.array([mask.tolist()], pa.list_(pa.uint8())),
    }
    pq.write_table(
        pa.table({"sample_id": [name], **table}), tmp_path / f"{shard_id([name])}.parquet"
    )
    plan = SimpleNamespace(shards=[SimpleNamespace(shard_id=shard_id([name]))])
    folder = write_vocabulary(
        plan,
        shard_tokens=tmp_path,
        draft_size=request.param,
        target_size=TARGET,
        output=tmp_path / "v",
    )
    return folder, Counter(sorted(ids[mask == 1].tolist())), request.param


def test_it_is_the_one_that_speculators_makes_of_its_token_frequencies(
    written: tuple[Path, Counter, int],
) -> None:
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
    assert json.loads((folder / "vocabulary.json").read_text())[
        "distinct_supervised_tokens"
    ] == len(counts)

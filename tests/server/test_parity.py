"""Promise 5 on the models that SGLang holds in different layouts: the right r_k close to Hugging Face's, its neighbours far."""

from pathlib import Path

import pytest
import tiny_models
import torch
from server_harness import Running, capture, random_ids, serve, spec_for

from draftstates import parity, shards
from draftstates.model import read_model

pytestmark = pytest.mark.server
TINY = {
    "deepseek_v3": ((2, 3, 4), "post_norm"),
    "qwen2": ((0, 2, 3, 6), "pre_norm"),
    "qwen3": ((1, 3, 5), "post_norm"),
}


def check(shard: shards.Shard, folder: Path, count: int) -> None:
    reference = parity.Reference(folder, dtype=torch.float32)
    for index in range(count):
        found = parity.compare(
            parity.named_states(shard, index, num_layers=read_model(folder).num_layers),
            reference.states(torch.from_numpy(shard.input_ids[slice(*shard.rows(index))].copy())),
        )
        parity.judge(found, dtype="float32", sample=str(index))
        for layer in found:
            assert layer.worst < 1e-3, layer
            assert all(distance > 0.02 for distance in layer.neighbours.values()), layer


def test_smollm2(server: Running) -> None:
    shard, _, refused = capture(server, [random_ids(n, seed=n, vocabulary=49000) for n in (40, 400)])
    assert not refused
    check(shard, server.model, 2)


@pytest.mark.parametrize("kind", TINY)
def test_tiny(kind: str, tmp_path: Path) -> None:
    layers, final_norm = TINY[kind]
    folder = tiny_models.make(kind, tmp_path / kind)
    (tmp_path / "root").mkdir()
    with serve(spec_for(folder, layers=layers, final_norm=final_norm), folder=folder, root=tmp_path / "root") as running:
        samples = [random_ids(n, seed=n, vocabulary=tiny_models.VOCABULARY) for n in (7, 33, 90, 200)]
        shard, _, refused = capture(running, samples)
        assert not refused
        check(shard, folder, len(samples))

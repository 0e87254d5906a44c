"""Promise 5 on the models that SGLang holds in different layouts.

The right r_k is close to Hugging Face's, its neighbours are far. Qwen2 is in test_parallel.py and
Qwen3 in test_selftest.py, because those files start a server of the model anyway.
"""

from pathlib import Path

import pytest
import tiny_models
from server_harness import Running, capture, check_parity, random_ids, serve, spec_for

pytestmark = pytest.mark.server


def test_smollm2(server: Running) -> None:
    shard, _, refused = capture(
        server, [random_ids(n, seed=n, vocabulary=49000) for n in (40, 400)]
    )
    assert not refused
    check_parity(shard, server.model, 2)


def test_deepseek_v3(tmp_path: Path) -> None:
    folder, root = tiny_models.make("deepseek_v3", tmp_path / "model"), tmp_path / "root"
    root.mkdir()
    with serve(spec_for(folder, layers=(2, 3, 4)), folder=folder, root=root) as running:
        samples = [
            random_ids(n, seed=n, vocabulary=tiny_models.VOCABULARY) for n in (7, 33, 90, 200)
        ]
        shard, _, refused = capture(running, samples)
        assert not refused
        check_parity(shard, folder, len(samples))

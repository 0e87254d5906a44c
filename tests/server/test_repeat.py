"""Equal requests: their rows are equal, batched or alone, now or later, retracted or not."""

import numpy as np
import pytest
import torch
from server_harness import Running, capture, random_ids

pytestmark = pytest.mark.server
VOCABULARY = 49000
BATCHING = (
    # Of float32 rows, over the row's norm: batching changes only the order of sums.
    1e-4
)


def samples() -> list[np.ndarray]:
    lengths = np.random.default_rng(40).integers(5, 120, 40)
    return [random_ids(int(n), seed=i, vocabulary=VOCABULARY) for i, n in enumerate(lengths)]


def test_40_samples_at_once_equal_the_same_one_by_one(server: Running) -> None:
    together, _, refused = capture(server, samples(), tokens_in_flight=100_000)
    alone, _, refused_alone = capture(server, samples(), tokens_in_flight=1)
    assert not refused
    assert not refused_alone
    for name in ("hidden_states", "final_hidden_state"):
        one, other = (shard.state_rows(name, 0, shard.header.rows) for shard in (together, alone))
        assert ((one - other).norm(dim=-1) / other.norm(dim=-1)).max() < BATCHING


def test_a_second_pass_equals_the_first(server: Running) -> None:
    """Requests that run one by one have equal batches, so their rows are equal to the last bit."""
    first, _, _ = capture(server, samples()[:8], tokens_in_flight=1)
    second, _, _ = capture(server, samples()[:8], tokens_in_flight=1)
    for name in ("hidden_states", "final_hidden_state"):
        assert torch.equal(
            first.state_rows(name, 0, first.header.rows),
            second.state_rows(name, 0, second.header.rows),
        )

"""Promise 2: tokens sent = prompt tokens = rows = length in the shard, cached tokens = 0."""

import dataclasses

import numpy as np
import pytest
from server_harness import (
    Running,
    capture,
    new_shard,
    post,
    random_ids,
    rows_on_disk,
    worst_row_difference,
)

from draftstates import ids
from draftstates.extract import protocol
from draftstates.model.folder import ModelFolder
from draftstates.shards.layout import Shard

pytestmark = pytest.mark.server
VOCABULARY = 49000


def test_every_row_of_a_sample_is_written_once(server: Running) -> None:
    samples = [random_ids(n, seed=n, vocabulary=VOCABULARY) for n in (1, 10, 257, 300)]
    shard, captured, refused = capture(server, samples)
    assert not refused
    assert [(c.prompt_tokens, c.receipt.rows, c.receipt.cached_tokens) for c in captured] == [
        (len(s), len(s), 0) for s in samples
    ]
    assert [c.receipt.ids_hash for c in captured] == [ids.ids_hash(s) for s in samples]
    assert rows_on_disk(shard) == sum(map(len, samples))
    assert [shard.checksum(i) for i in range(4)] == [c.receipt.checksum for c in captured]


def test_the_last_token_of_the_vocabulary_is_captured_as_a_prefix(server: Running) -> None:
    last = ModelFolder(server.model).vocab_size - 1
    sample = random_ids(40, seed=40, vocabulary=VOCABULARY)
    sample[20] = last
    _, captured, refused = capture(server, [sample], prefix=True)
    assert not refused
    token, logprob = captured[0].rows[19][-1]
    assert token == last and -100 < logprob < 0


def test_the_same_ids_twice_are_whole_both_times_without_the_radix_cache(server: Running) -> None:
    sample = random_ids(10, seed=1, vocabulary=VOCABULARY)
    for _ in range(2):
        shard, captured, refused = capture(server, [sample])
        assert not refused
        assert captured[0].receipt.rows == 10
        assert rows_on_disk(shard) == 10


def test_chunked_prefill_gives_every_row_equal_to_the_unchunked_ones(
    server: Running, shared_server: Running
) -> None:
    """995 ids run in chunks of 256.

    float32 rows of chunked and unchunked prefill differ by rounding: at most 1e-4 of the norm.
    """
    ids_995 = random_ids(995, seed=995, vocabulary=VOCABULARY)
    chunked, captured, refused = capture(server, [ids_995])
    assert not refused
    assert (captured[0].receipt.rows, captured[0].receipt.chunks) == (995, 4)
    whole, captured, refused = capture(
        shared_server,
        [ids_995],
        endpoint=dataclasses.replace(shared_server.endpoint, fresh_namespace=True),
    )
    assert not refused
    assert (captured[0].receipt.rows, captured[0].receipt.chunks) == (995, 1)
    for name in ("hidden_states", "final_hidden_state"):
        assert worst_row_difference(chunked.sample(0)[name], whole.sample(0)[name]) < 1e-4


def test_decode_steps_write_nothing(server: Running) -> None:
    """The server generates 8 tokens after the prompt.

    The rows behind the sample's own rows stay as they were laid out.
    """
    samples = [
        random_ids(20, seed=5, vocabulary=VOCABULARY),
        random_ids(30, seed=6, vocabulary=VOCABULARY),
    ]
    path = new_shard(server, samples)
    destination = protocol.Destination(
        file=str(path.relative_to(server.endpoint.root)),
        first_row=0,
        rows=20,
        ids_hash=ids.ids_hash(samples[0]),
        attempt="decode",
        kind=protocol.PLAIN,
    )
    body = {
        "rid": destination.rid,
        "input_ids": samples[0].tolist(),
        "sampling_params": {"max_new_tokens": 8, "ignore_eos": True},
    }
    post(server, body)
    shard = Shard(path)
    assert rows_on_disk(shard) == 20
    assert not shard.state_rows("hidden_states", 20, 50).any()


def test_requests_that_are_not_ours_write_nothing(server: Running) -> None:
    before = sorted(server.endpoint.root.iterdir())
    post(server, {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4}})
    assert sorted(server.endpoint.root.iterdir()) == before


def test_with_the_radix_cache_on_the_second_time_is_refused_by_count(
    shared_server: Running,
) -> None:
    sample = random_ids(10, seed=7, vocabulary=VOCABULARY)
    _, captured, refused = capture(shared_server, [sample])
    assert not refused
    shard, captured, refused = capture(shared_server, [sample])
    assert not captured
    assert "1 of 10 rows captured: 9 came from a cache" in refused[0]
    assert rows_on_disk(shard) == 1


def test_a_fresh_namespace_makes_both_whole_with_the_radix_cache_on(shared_server: Running) -> None:
    endpoint = dataclasses.replace(shared_server.endpoint, fresh_namespace=True)
    sample = random_ids(10, seed=8, vocabulary=VOCABULARY)
    first, _, refused = capture(shared_server, [sample], endpoint=endpoint)
    second, _, refused_again = capture(shared_server, [sample], endpoint=endpoint)
    assert not refused
    assert not refused_again
    assert np.array_equal(
        first.state_rows("hidden_states", 0, 10).numpy(),
        second.state_rows("hidden_states", 0, 10).numpy(),
    )

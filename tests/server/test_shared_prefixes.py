"""Promise 2 where samples share rows: rows written + rows shared = tokens sent, what comes from the
radix cache is shared, and a shared row is the one that a capture of the sample alone gives.
"""

import dataclasses

import numpy as np
import pytest
from server_harness import Running, capture, random_ids, rows_on_disk, worst_row_difference

from draftstates import ids
from draftstates.extract.client import Captured, Client, Work
from draftstates.plan.prefixes import Segments, share_prefixes
from draftstates.shards import layout
from draftstates.shards.layout import Shard

pytestmark = pytest.mark.server
VOCABULARY = 49000


def conversations() -> list[np.ndarray]:
    """Return samples in which prefixes end within a chunk of 256, at its end, and past it."""
    system, first, second, third, fourth = (
        random_ids(n, seed=n, vocabulary=VOCABULARY) for n in (100, 156, 210, 70, 40)
    )
    return [
        np.concatenate(parts)
        for parts in (
            [system, first, second],
            # the history as a template rewrites it
            [system, first, second[:20], third],
            [system, first, second[:20], third[:-5], fourth],
            # all of a chunk, and another conversation under the same system prompt
            [system, first, fourth],
            [system, fourth, third],
            [third],
        )
    ]


def segments_of(samples: list[np.ndarray]) -> Segments:
    segments = share_prefixes(np.concatenate(samples), list(map(len, samples)), minimum=64)
    assert [segments.shared(i) for i in range(6)] == [0, 276, 341, 256, 100, 0]
    return segments


def check_rows(shard: Shard, alone: Shard) -> None:
    """Hold each sample's rows, shared ones too, to those of a capture without sharing."""
    for index in range(len(shard)):
        for name in ("hidden_states", "final_hidden_state"):
            one, other = shard.sample(index)[name], alone.sample(index)[name]
            assert worst_row_difference(one, other) < 1e-4


def test_shared_rows_are_computed_dropped_and_those_of_a_capture_alone(server: Running) -> None:
    samples = conversations()
    segments = segments_of(samples)
    shard, captured, refused = capture(server, samples, segments=segments, compared=[1, 3])
    assert not refused
    assert [c.receipt.again_rows for c in captured] == [0, 276, 0, 256, 0, 0]
    assert [c.receipt.again_distance < 1e-3 for c in captured] == [True] * 6
    assert [
        (c.receipt.rows + segments.shared(i), c.prompt_tokens, c.receipt.cached_tokens)
        for i, c in enumerate(captured)
    ] == [(len(sample), len(sample), 0) for sample in samples]
    assert [c.receipt.ids_hash for c in captured] == [ids.ids_hash(sample) for sample in samples]
    assert rows_on_disk(shard) == segments.rows < sum(map(len, samples))
    alone, _, refused = capture(server, samples)
    assert not refused
    check_rows(shard, alone)


def test_shared_rows_that_are_not_those_of_the_shard_are_seen_by_the_server(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second sample shares 276 rows, and a chunk has 256: row 270, of its second chunk, is
    changed in the file before it is sent.
    """
    samples = conversations()[:2]
    segments = share_prefixes(np.concatenate(samples), list(map(len, samples)), minimum=64)
    send = Client._send

    async def spoilt(self: Client, work: Work, *arguments: object) -> Captured:
        if work.compared:
            begin, width = layout.read_header(work.shard).states()["hidden_states"]
            with open(work.shard, "r+b") as file:
                file.seek(begin + 270 * width)
                file.write(np.full(width // 4, 0.5, np.float32).tobytes())
        return await send(self, work, *arguments)

    monkeypatch.setattr(Client, "_send", spoilt)
    _, captured, refused = capture(server, samples, segments=segments, compared=[1])
    assert not refused
    assert captured[1].receipt.again_rows == 276
    assert captured[1].receipt.again_distance > 0.05


def test_shared_rows_are_computed_once_with_the_radix_cache_and_all_of_them_are_hits(
    shared_server: Running,
) -> None:
    samples = conversations()
    segments = segments_of(samples)
    endpoint = dataclasses.replace(shared_server.endpoint, fresh_namespace=True)
    reusing = dataclasses.replace(endpoint, reuse_prefixes=True)
    # a second time: what the first one left in the cache is of other namespaces
    for _ in range(2):
        shard, captured, refused = capture(
            shared_server, samples, segments=segments, endpoint=reusing
        )
        assert not refused
        assert [c.receipt.cached_tokens for c in captured] == [
            segments.shared(i) for i in range(len(samples))
        ]
        assert [c.receipt.rows + c.receipt.cached_tokens for c in captured] == [
            len(sample) for sample in samples
        ]
        assert rows_on_disk(shard) == segments.rows
    alone, _, refused = capture(shared_server, samples, endpoint=endpoint)
    assert not refused
    check_rows(shard, alone)

"""What the server does with rows on their way to a file: order, restarts, gaps, seals, bounded
memory.
"""

import threading
from pathlib import Path

import pytest
import torch
from capture_bench import SPEC, Bench

from draftstates.capture import writer
from draftstates.capture.blocks import BlockPool
from draftstates.extract import protocol
from draftstates.plan.prefixes import Segments
from draftstates.shards import layout
from draftstates.shards.distance import distance
from draftstates.verify.alignment import Rounding
from draftstates.verify.prefixes import Limits


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_chunks_of_a_sample_become_one_receipt_with_the_checksum_of_the_file(bench: Bench) -> None:
    whole = bench.destination(5, 7)
    for start, rows in ((0, 3), (3, 3), (6, 1)):
        bench.put(whole, start, rows)
    (receipt,), reader = bench.receipts(1)
    shard = layout.Shard(bench.path)
    assert (receipt.rows, receipt.chunks, receipt.cached_tokens, receipt.error) == (7, 3, 0, None)
    assert receipt.ids_hash == whole.ids_hash
    assert receipt.checksum == shard.checksum(1)
    assert torch.equal(shard.sample(1)["hidden_states"], bench.rows[5:, :2])
    assert torch.equal(shard.sample(1)["final_hidden_state"], bench.rows[5:, 2])
    assert reader.synced_rows == 0, "half of the shard is not written yet"


@pytest.mark.parametrize("chunks", [(9,), (2, 7), (4, 5), (6, 3), (3, 1, 2, 3)])
@pytest.mark.parametrize("small", [100, 1 << 20])
def test_shared_rows_are_computed_and_not_written(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, chunks: tuple[int, ...], small: int
) -> None:
    """Rows written + rows shared = tokens sent, and the ids of all of them are hashed."""
    monkeypatch.setattr(writer, "_SMALL_BYTES", small)
    bench.put(bench.destination(0, 5), 0, 5)
    bench.receipts(1)
    child, start = bench.destination(5, 9, shared=4), 0
    for rows in chunks:
        # rows of its own where the earlier sample's must stay
        bench.put(child, start, rows, shift=1.0)
        start += rows
    receipt = bench.receipts(2)[0][1]
    shard = layout.Shard(bench.path)
    assert (receipt.rows, receipt.chunks, receipt.error) == (5, len(chunks), None)
    assert receipt.ids_hash == child.ids_hash
    assert torch.equal(shard.state_rows("hidden_states", 0, 5), bench.rows[:5, :2])
    own = [
        shard.state_rows("hidden_states", 5, 10),
        shard.state_rows("final_hidden_state", 5, 10),
    ]
    assert torch.equal(own[0], bench.rows[5:10, :2] + 1)
    assert torch.equal(own[1], bench.rows[5:10, 2] + 1)
    assert receipt.checksum == layout.sample_checksum(*(rows.numpy().tobytes() for rows in own))


@pytest.mark.parametrize("shift", [0.0, 0.5, float("nan")])
def test_shared_rows_that_are_computed_again_are_held_against_the_files(
    tmp_path: Path, shift: float
) -> None:
    """The cache of the server has lost them: the first two of four came from it."""
    bench = Bench(tmp_path, segments=Segments.of([[(0, 5)], [(1, 4), (5, 3)]]))
    bench.put(bench.destination(0, 5), 0, 5)
    bench.receipts(1)
    child = bench.destination(5, 7, shared=4, kind=protocol.COMPARING)
    bench.put(child, 2, 1, shift=shift)
    bench.put(child, 3, 4, shift=shift)
    receipt = bench.receipts(2)[0][1]
    assert (receipt.rows, receipt.cached_tokens, receipt.again_rows) == (3, 2, 2)
    expected = distance(bench.rows[3:5] + shift, bench.rows[3:5])
    largest = 1e6 if shift != shift else expected.max().item()
    assert receipt.again_distance == pytest.approx(largest)
    assert torch.equal(
        layout.Shard(bench.path).state_rows("hidden_states", 0, 5), bench.rows[:5, :2]
    )


def test_huge_components_hide_no_other_row_that_comes_again(tmp_path: Path) -> None:
    """They alone make up the norm of a row, as those of the residual stream do."""
    bench = Bench(tmp_path, segments=Segments.of([[(0, 5)], [(1, 4), (5, 3)]]))
    bench.rows[:, :, :2] = 1e4
    bench.put(bench.destination(0, 5), 0, 5)
    bench.receipts(1)
    bench.put(bench.destination(5, 7, shared=4, kind=protocol.COMPARING), 0, 7, shift=1.0)
    receipt = bench.receipts(2)[0][1]
    assert receipt.again_rows == 4
    assert receipt.again_distance > Limits.of(Rounding.of(SPEC)).worst


def test_rows_that_another_thread_writes_are_those_of_the_checksum(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_SMALL_BYTES", 100)
    bench.put(bench.destination(5, 7), 0, 7)
    (receipt,), _ = bench.receipts(1)
    shard = layout.Shard(bench.path)
    assert receipt.checksum == shard.checksum(1)
    assert torch.equal(shard.sample(1)["hidden_states"], bench.rows[5:, :2])
    assert torch.equal(shard.sample(1)["final_hidden_state"], bench.rows[5:, 2])


@pytest.mark.parametrize("fails", ["write", "sum"])
def test_where_a_write_or_a_sum_fails_the_block_is_kept_until_both_have_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    monkeypatch.setattr(writer, "_SMALL_BYTES", 100)
    release = threading.Event()

    def broken(*_: object) -> None:
        raise OSError("no space left")

    def slow(*_: object) -> None:
        release.wait(10)

    monkeypatch.setattr(writer, "_put", broken if fails == "write" else slow)
    monkeypatch.setattr(writer, "_sum", broken if fails == "sum" else slow)
    blocks = bench.pool.free
    bench.put(bench.destination(0, 5), 0, 5)
    assert not bench.receipts(0)[0]
    assert bench.pool.free == blocks - 1
    release.set()
    (receipt,), _ = bench.receipts(1)
    assert "no space left" in receipt.error
    assert bench.pool.free == blocks


def test_the_file_is_reported_as_synced_when_its_last_row_is_written(bench: Bench) -> None:
    bench.put(bench.destination(0, 5), 0, 5)
    bench.put(bench.destination(5, 7), 0, 7)
    _, reader = bench.receipts(2)
    assert reader.synced_rows == 12


def test_rows_that_the_client_copied_count_as_written(bench: Bench) -> None:
    protocol.say_copied(bench.path, 7)
    bench.put(bench.destination(0, 5), 0, 5)
    _, reader = bench.receipts(1)
    assert (reader.copied_rows, reader.synced_rows) == (7, 12)


def test_a_file_that_was_closed_in_between_still_knows_what_it_holds(bench: Bench) -> None:
    bench.put(bench.destination(0, 5), 0, 5)
    bench.receipts(1)
    bench.destinations._open.clear()
    bench.put(bench.destination(5, 7), 0, 7)
    _, reader = bench.receipts(2)
    assert reader.synced_rows == 12


def test_a_retracted_request_starts_over(bench: Bench) -> None:
    whole = bench.destination(0, 5)
    bench.put(whole, 0, 3)
    bench.put(whole, 0, 4, shift=1.0)
    bench.put(whole, 4, 1, shift=1.0)
    (receipt,), _ = bench.receipts(1)
    assert (receipt.rows, receipt.chunks) == (5, 2)
    assert receipt.checksum == layout.Shard(bench.path).checksum(0)
    assert receipt.ids_hash == whole.ids_hash


def test_a_request_prefilled_again_after_its_receipt_changes_neither_rows_nor_receipts(
    bench: Bench,
) -> None:
    """Retraction while it decodes: the second prefill may come in chunks, the first of them within
    the sample.
    """
    first, second = bench.destination(0, 5), bench.destination(5, 7)
    bench.put(first, 0, 5)
    bench.put(second, 0, 7)
    whole, _ = bench.receipts(2)
    before = bench.path.read_bytes()
    bench.put(first, 0, 3, shift=1.0)
    bench.put(second, 0, 7, shift=1.0)
    again, _ = bench.receipts(3, patience=1.0)
    assert [(r.rows, r.error) for r in again] == [(r.rows, r.error) for r in whole]
    assert bench.path.read_bytes() == before


def test_rows_that_a_cache_skipped_are_counted_as_missing(bench: Bench) -> None:
    bench.put(bench.destination(0, 5), 4, 1)
    (receipt,), _ = bench.receipts(1)
    assert (receipt.rows, receipt.cached_tokens) == (1, 4)


def test_a_gap_between_chunks_fails_the_sample_by_name_and_the_thread_lives_on(
    bench: Bench,
) -> None:
    bench.put(bench.destination(0, 5), 0, 2)
    bench.put(bench.destination(0, 5), 3, 2)
    bench.put(bench.destination(0, 5, attempt="2"), 0, 5)
    bench.put(bench.destination(0, 5, attempt="3"), 0, 5)
    receipts, _ = bench.receipts(3)
    by_attempt = {protocol.parse_rid(r.rid).attempt: r for r in receipts}
    assert "expected rows from 2 on, found rows from 3 on" in by_attempt["1"].error
    assert by_attempt["2"].error is None
    assert by_attempt["3"].error is None


def test_where_there_is_no_room_for_a_receipt_the_thread_lives_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, refused = bench.destinations.open(bench.name), threading.Semaphore(0)
    append = file._append

    def no_room(line: bytes) -> None:
        refused.release()
        raise OSError("no space left")

    monkeypatch.setattr(file, "_append", no_room)
    # both samples go to the same thread
    bench.writers._next = 0
    bench.put(bench.destination(0, 5), 0, 5)
    assert all(refused.acquire(timeout=10) for _ in ("receipt", "its error"))
    monkeypatch.setattr(file, "_append", append)
    bench.writers._next = 0
    bench.put(bench.destination(5, 7), 0, 7)
    (receipt,), _ = bench.receipts(1)
    assert (receipt.rows, receipt.error) == (7, None)


def test_a_synced_file_takes_no_more_rows(bench: Bench) -> None:
    bench.put(bench.destination(0, 5), 0, 5)
    bench.put(bench.destination(5, 7), 0, 7)
    bench.receipts(2)
    before = bench.path.read_bytes()
    bench.put(bench.destination(0, 5, attempt="late"), 0, 5, shift=9.0)
    receipts, _ = bench.receipts(3)
    assert "captured and synced already" in receipts[-1].error
    assert bench.path.read_bytes() == before


def test_two_ranks_fill_one_file_and_the_one_that_ends_it_syncs_it(bench: Bench) -> None:
    """Data parallel ranks are processes of their own: neither sees what the other does but in the
    receipts.
    """
    other = Bench(bench.root)
    bench.put(bench.destination(0, 1), 0, 1)
    bench.receipts(1)
    other.put(other.destination(1, 4), 0, 4)
    bench.receipts(2)
    bench.put(bench.destination(5, 3), 0, 3)
    _, reader = bench.receipts(3)
    assert reader.synced_rows == 0
    other.put(other.destination(8, 4), 0, 4)
    receipts, reader = bench.receipts(4)
    assert [r.rows for r in receipts] == [1, 4, 3, 4]
    assert reader.synced_rows == 12


def test_a_file_that_another_rank_ended_takes_no_more_rows(bench: Bench) -> None:
    """Also by a rank that opens it only afterwards, and after one late attempt has been turned
    away.
    """
    other = Bench(bench.root)
    other.destinations.open(bench.name)
    bench.put(bench.destination(0, 5), 0, 5)
    bench.put(bench.destination(5, 7), 0, 7)
    bench.receipts(2)
    before = bench.path.read_bytes()
    for late, rank in enumerate((other, Bench(bench.root))):
        rank.put(rank.destination(0, 5, attempt=f"late {late}"), 0, 5, shift=9.0)
        receipts, _ = bench.receipts(3 + late)
        assert "captured and synced already" in receipts[-1].error
        assert bench.path.read_bytes() == before


def test_memory_is_bounded_and_a_full_queue_makes_the_next_one_wait() -> None:
    pool = BlockPool(total_bytes=3 << 10, block_bytes=1 << 10, pinned=False)
    blocks = [pool.take(users=2) for _ in range(3)]
    got = threading.Event()
    threading.Thread(target=lambda: (pool.take(users=1), got.set()), daemon=True).start()
    assert not got.wait(0.2)
    blocks[0].release()
    assert not got.wait(0.2), "one of two users still reads the block"
    blocks[0].release()
    assert got.wait(5)


def test_memory_is_taken_before_the_run_and_what_is_not_needed_is_not_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pinning memory during a run would stop the scheduler; a block that was in use before is real
    memory already.
    """
    pool = BlockPool(total_bytes=3 << 10, block_bytes=1 << 10, pinned=False)
    monkeypatch.setattr(torch, "empty", None)
    used = set()
    for _ in range(5):
        block = pool.take(users=1)
        used.add(id(block))
        block.release()
    assert len(used) == 1
    assert len({id(pool.take(users=1)) for _ in range(3)}) == 3

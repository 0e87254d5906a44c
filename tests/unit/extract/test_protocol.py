"""What client and server say to each other: request ids and receipts."""

import json
import os
from pathlib import Path

import pytest

from draftstates.errors import UserError
from draftstates.extract import protocol


def test_a_request_id_says_where_its_rows_go_and_others_are_not_ours() -> None:
    destination = protocol.Destination(
        file="a/b.safetensors",
        first_row=3,
        rows=7,
        ids_hash="0" * 16,
        attempt="x",
        kind=protocol.SELF_TEST,
    )
    assert protocol.parse_rid(destination.rid) == destination
    assert protocol.parse_rid("6d1f0b8e") is None
    # Anyone can send it; it must not end the server.
    assert protocol.parse_rid(destination.rid.replace("|3|", "|x|")) is None


def test_a_receipt_that_is_not_whole_yet_waits(tmp_path: Path) -> None:
    receipt = protocol.Receipt(
        rid="r", rows=1, chunks=1, cached_tokens=0, ids_hash="h", checksum="c"
    )
    path, line = tmp_path / "r.jsonl", receipt.line()
    reader = protocol.ReceiptReader(path)
    assert reader.new() == []
    path.write_bytes(line[:10])
    assert reader.new() == []
    path.write_bytes(line + protocol.synced_line(4) + json.dumps({"x": 1}).encode())
    assert reader.new() == [receipt]
    assert reader.synced_rows == 4


def test_a_line_of_receipts_that_was_cut_short_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"rid": "' + protocol.synced_line(4))
    with pytest.raises(UserError, match=r"r\.jsonl: .* is no receipt"):
        protocol.ReceiptReader(path).new()


@pytest.mark.parametrize("line", [b"17", b"[]", b'{"a": 1}', b"null", b"\xff"])
def test_a_line_that_is_no_receipt_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(UserError, match=r"r\.jsonl: .* is no receipt"):
        protocol.ReceiptReader(path).new()


def test_a_line_that_is_no_receipt_costs_its_neighbours_nothing(tmp_path: Path) -> None:
    before, after = (
        protocol.Receipt(rid=rid, rows=1, chunks=1, cached_tokens=0, ids_hash="h", checksum="c")
        for rid in ("a", "b")
    )
    path = tmp_path / "r.jsonl"
    path.write_bytes(before.line() + b"rubbish\n" + after.line())
    reader = protocol.ReceiptReader(path)
    assert reader.new() == [before]
    with pytest.raises(UserError, match="rubbish"):
        reader.new()
    assert reader.new() == [after]


def test_a_look_does_not_depend_on_where_a_shared_descriptor_stands(tmp_path: Path) -> None:
    """Threads append through the one that is read: each moves its position, at any time."""
    receipts = [
        protocol.Receipt(rid=str(i), rows=1, chunks=1, cached_tokens=0, ids_hash="h", checksum="c")
        for i in range(3)
    ]
    file = os.open(tmp_path / "r.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    reader = protocol.ReceiptReader(file)
    for receipt in receipts:
        os.write(file, receipt.line())
        before = os.lseek(file, 0, os.SEEK_CUR)
        assert reader.new() == [receipt]
        assert os.lseek(file, 0, os.SEEK_CUR) == before
        os.lseek(file, 0, os.SEEK_SET)
        assert reader.new() == []
        assert os.lseek(file, 0, os.SEEK_CUR) == 0
    os.close(file)

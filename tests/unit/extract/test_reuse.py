"""Never compute twice: rows of verified shards are copied into a new one; what is not exactly as
verified is left to capture.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from captured import (
    Captured,
    Files,
    capture,
    capture_sharing,
    states_of,
    tiny_model,
    verify,
    write,
)

from draftstates import ids
from draftstates.extract import reuse
from draftstates.extract.reuse import copy_captured
from draftstates.plan.prefixes import shard_id, share_prefixes
from draftstates.shards import layout

NEW = np.arange(20, 33, dtype=np.int32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def captured(model: Path) -> Captured:
    return capture(model)


@pytest.fixture
def old(captured: Captured, tmp_path: Path) -> Files:
    """Return a verified shard below `tmp_path`, a run's folder."""
    files = write(captured, tmp_path / "shards")
    (tmp_path / "verified").mkdir()
    verify(files).publish(tmp_path / "verified" / f"{files.shard_id}.json")
    return files


def lay_out(
    path: Path,
    captured: Captured,
    tokens: list,
    masks: list,
    *,
    shares: bool = False,
    **changes: object,
) -> layout.Shard:
    lengths, input_ids = [len(t) for t in tokens], np.concatenate(tokens)
    segments = share_prefixes(input_ids, lengths, minimum=4) if shares else None
    names = [ids.sample_id(t, m) for t, m in zip(tokens, masks, strict=True)]
    layout.create(
        path,
        spec=dataclasses.replace(captured.spec, **changes),
        shard_id=shard_id(names, segments),
        sample_ids=names,
        lengths=lengths,
        input_ids=input_ids,
        loss_mask=np.concatenate(masks),
        segments=segments,
    )
    return layout.Shard(path)


def successor(captured: Captured, folder: Path, **changes: object) -> layout.Shard:
    """Return the same samples without the third, in another order, and a new one in the middle."""
    tokens, masks = captured.tokens[::-1], captured.masks[::-1]
    tokens[-3], masks[-3] = NEW, np.ones(len(NEW), dtype=np.uint8)
    return lay_out(folder / "new.safetensors", captured, tokens, masks, **changes)


def test_all_samples_but_the_new_one_are_copied_with_their_receipts(
    captured: Captured, old: Files, tmp_path: Path
) -> None:
    new = successor(captured, tmp_path)
    found = copy_captured(new.path, capture_folder=tmp_path, planned=[])
    copied, engines = found.receipts, found.engines
    count = len(captured.tokens)
    assert sorted(copied) == [index for index in range(count) if index != count - 3]
    assert engines == {json.loads(old.receipts.read_text())["engine"]["version"]}
    assert found.images == {None}
    before, after = layout.Shard(old.shard), layout.Shard(new.path)
    for index, receipt in copied.items():
        assert after.checksum(index) == receipt.checksum == before.checksum(count - 1 - index)
        assert receipt.first_row == after.rows(index)[0]
        assert receipt.sample_id == after.header.sample_ids[index]
        assert receipt.copied_from == old.shard_id
    first, end = after.rows(count - 3)
    assert not after.state_rows("hidden_states", first, end).any(), (
        "the new sample's rows are not touched"
    )


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_rows_are_copied_between_shards_with_and_without_shared_rows(
    model: Path, tmp_path: Path, before: bool, after: bool
) -> None:
    """Of a shard in which another sample is first, so that rows are shared otherwise."""
    captured = capture_sharing(model)
    if not before:
        samples = captured.tokens, captured.masks
        captured = states_of(*samples, spec=captured.spec, model=model)
    files = write(captured, tmp_path / "shards")
    (tmp_path / "verified").mkdir()
    verify(files).publish(tmp_path / "verified" / f"{files.shard_id}.json")
    new = lay_out(
        tmp_path / "new", captured, captured.tokens[::-1], captured.masks[::-1], shares=after
    )
    found = copy_captured(new.path, capture_folder=tmp_path, planned=[])
    assert sorted(found.receipts) == list(range(len(new)))
    assert (found.tokens, found.rows) == (len(new.input_ids), new.header.rows)
    assert (new.header.rows < found.tokens) == after
    for index, receipt in found.receipts.items():
        first, end = new.rows(index)
        there = len(new) - 1 - index
        assert (receipt.first_row, receipt.rows) == (first, end - first)
        assert receipt.rows + receipt.shared_rows == len(captured.tokens[there])
        own = captured.hidden[there][receipt.shared_rows :]
        assert new.state_rows("hidden_states", first, end).equal(own)
        states = [new.row_bytes(name, first, end) for name in new.header.states()]
        assert receipt.checksum == layout.sample_checksum(*states)


def test_another_mask_of_the_same_tokens_is_copied_too(
    captured: Captured, old: Files, tmp_path: Path
) -> None:
    new = lay_out(
        tmp_path / "new", captured, captured.tokens, [1 - mask for mask in captured.masks]
    )
    copied = copy_captured(new.path, capture_folder=tmp_path, planned=[]).receipts
    assert len(copied) == len(captured.tokens)
    assert not set(new.header.sample_ids) & set(captured.names)


def test_a_planned_shard_is_not_looked_at(captured: Captured, old: Files, tmp_path: Path) -> None:
    assert (
        copy_captured(
            successor(captured, tmp_path).path, capture_folder=tmp_path, planned=[old.shard_id]
        ).receipts
        == {}
    )


def test_states_of_another_capture_are_not_copied(
    captured: Captured, old: Files, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    new = successor(captured, tmp_path, model_digest="of other weights")
    assert copy_captured(new.path, capture_folder=tmp_path, planned=[]).receipts == {}
    assert "expected capture key" in capsys.readouterr().err


def test_rows_of_another_width_are_not_copied_whatever_key_they_have(
    captured: Captured, old: Files, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    new = successor(captured, tmp_path, stored_dtype="float32")
    keys = [
        header.metadata["capture_key"].encode()
        for header in (new.header, layout.read_header(old.shard))
    ]
    new.path.write_bytes(new.path.read_bytes().replace(*keys))
    before = new.path.read_bytes()
    assert copy_captured(new.path, capture_folder=tmp_path, planned=[]).receipts == {}
    assert new.path.read_bytes() == before
    assert "expected rows" in capsys.readouterr().err


def test_a_shard_that_shrinks_while_it_is_read_is_an_error_and_not_the_end(old: Files) -> None:
    size = old.shard.stat().st_size
    with pytest.raises(OSError, match=r"ends at byte \d+, 10 bytes early"):
        reuse._read(old.shard, size - 90, 100)


@pytest.mark.parametrize("tensor", ["hidden_states", "final_hidden_state"])
def test_a_sample_with_a_flipped_bit_is_left_to_capture(
    captured: Captured, old: Files, tmp_path: Path, capsys: pytest.CaptureFixture, tensor: str
) -> None:
    begin, width = layout.read_header(old.shard).states()[tensor]
    at = begin + layout.Shard(old.shard).rows(4)[0] * width
    data = bytearray(old.shard.read_bytes())
    data[at] ^= 1
    old.shard.write_bytes(data)
    new = successor(captured, tmp_path)
    copied = copy_captured(new.path, capture_folder=tmp_path, planned=[]).receipts
    missing = set(range(len(new))) - set(copied)
    assert missing == {len(new) - 3, len(new) - 1 - 4}
    assert (
        f"sample {captured.names[4]} is not copied from {old.shard}: expected checksum"
        in capsys.readouterr().err
    )


def test_the_same_hash_of_other_ids_is_not_taken_for_the_same_ids(
    captured: Captured, old: Files, tmp_path: Path
) -> None:
    stranger = captured.tokens[4].copy()
    stranger[0] += 1
    old.change_receipts(lambda said: said["samples"][4].update(ids_hash=ids.ids_hash(stranger)))
    new = lay_out(tmp_path / "new", captured, [stranger], [captured.masks[4]])
    assert copy_captured(new.path, capture_folder=tmp_path, planned=[]).receipts == {}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def claim(path: Path) -> None:
    """Verification never said this."""
    found = json.loads(path.read_text())
    found["samples"]["checksum"][0] = "0" * 32
    path.write_text(json.dumps(found))


def change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("part", "damage"),
    [
        ("shard", Path.unlink),
        ("shard", cut),
        ("receipts", Path.unlink),
        ("receipts", cut),
        ("receipts", lambda path: path.write_text("[]")),
        ("receipts", lambda path: path.write_text('{"samples": [{}], "engine": {"version": "x"}}')),
        ("receipts", lambda path: change(path, engine={"version": None})),
        ("receipts", lambda path: change(path, images=None)),
        ("receipts", lambda path: change(path, images={"server": [5]})),
        ("receipts", lambda path: path.write_text("[" * 100_000)),
        ("verified", claim),
        ("verified", lambda path: path.write_text("{}")),
        ("verified", lambda path: path.write_bytes(b"\xff\x00")),
    ],
)
def test_of_a_shard_that_is_damaged_nothing_is_copied_and_the_reason_is_said(
    captured: Captured,
    old: Files,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    part: str,
    damage: Callable[[Path], None],
) -> None:
    damage(
        {
            "shard": old.shard,
            "receipts": old.receipts,
            "verified": tmp_path / "verified" / f"{old.shard_id}.json",
        }[part]
    )
    assert (
        copy_captured(
            successor(captured, tmp_path).path, capture_folder=tmp_path, planned=[]
        ).receipts
        == {}
    )
    assert f"copied from shard {old.shard_id}" in capsys.readouterr().err


def test_a_shard_that_was_never_verified_is_not_looked_at(
    captured: Captured, old: Files, tmp_path: Path
) -> None:
    (tmp_path / "verified" / f"{old.shard_id}.json").unlink()
    assert (
        copy_captured(
            successor(captured, tmp_path).path, capture_folder=tmp_path, planned=[]
        ).receipts
        == {}
    )

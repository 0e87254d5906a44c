"""The header of a shard: as it was written, or refused."""

from pathlib import Path

import numpy as np
import pytest
import xxhash
from safetensors import safe_open
from synthetic import capture_spec

from draftstates.errors import UserError
from draftstates.shards import layout


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "shard.safetensors"
    tokens = {"input_ids": np.arange(5), "loss_mask": np.ones(5)}
    layout.create(
        path, spec=capture_spec(), shard_id="s", sample_ids=["a", "b"], lengths=[2, 3], **tokens
    )
    return path


def test_no_flipped_bit_of_a_header_passes_but_in_what_it_says_of_the_capture(shard: Path) -> None:
    """What verification compares with the plan may differ here; all else is refused, and every
    safetensors reader opens what passes.
    """
    whole, metadata = bytearray(shard.read_bytes()), layout.read_header(shard).metadata
    end = whole.index(b"}}") + 2
    for bit in range(8 * (end + 8)):
        changed = whole.copy()
        changed[bit // 8] ^= 1 << (bit % 8)
        shard.write_bytes(changed)
        try:
            header = layout.read_header(shard)
        except UserError:
            continue
        assert header.metadata != metadata, f"bit {bit % 8} of byte {bit // 8} passes"
        with safe_open(shard, framework="np") as file:
            assert len(file.keys()) == 5


def test_a_header_that_another_reader_would_refuse_is_named_with_what_was_expected(
    shard: Path,
) -> None:
    whole = shard.read_bytes()
    shard.write_bytes(whole.replace(b'"dtype":"U8"', b'"dtype":"U9"'))
    with pytest.raises(
        UserError, match=r"expected b'8\",\"shape\".* at byte \d+, found b'9\",\"shape\""
    ):
        layout.read_header(shard)


def test_a_checksum_is_one_definition_for_streams_and_for_whole_tensors() -> None:
    """The server hashes chunks of two tensors in turns; compact shards have up to six tensors."""
    hidden, final = bytes(range(200)), bytes(range(50, 90))
    streams = xxhash.xxh3_128(), xxhash.xxh3_128()
    for first in range(0, 200, 25):
        streams[0].update(hidden[first : first + 25])
        streams[1].update(final[first // 5 : first // 5 + 5])
    digests = xxhash.xxh3_128_digest(hidden) + xxhash.xxh3_128_digest(final)
    assert (
        layout.combined_checksum(*streams)
        == layout.sample_checksum(hidden, final)
        == xxhash.xxh3_128_hexdigest(digests)
    )
    assert layout.sample_checksum(hidden, final, b"") != layout.sample_checksum(hidden, final)
    assert layout.sample_checksum(hidden + final, b"") != layout.sample_checksum(hidden, final)

"""The header of a shard: as it was written, or refused."""

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from synthetic import capture_spec

from draftstates import shards
from draftstates.errors import UserError


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "shard.safetensors"
    tokens = {"input_ids": np.arange(5), "loss_mask": np.ones(5)}
    shards.create(path, spec=capture_spec(), shard_id="s", sample_ids=["a", "b"], lengths=[2, 3], **tokens)
    return path


def test_no_flipped_bit_of_a_header_passes_but_in_what_it_says_of_the_capture(shard: Path) -> None:
    """What verification compares with the plan may differ here; all else is refused, and every safetensors reader opens what passes."""
    whole, metadata = bytearray(shard.read_bytes()), shards.read_header(shard).metadata
    end = whole.index(b"}}") + 2
    for bit in range(8 * (end + 8)):
        changed = whole.copy()
        changed[bit // 8] ^= 1 << (bit % 8)
        shard.write_bytes(changed)
        try:
            header = shards.read_header(shard)
        except UserError:
            continue
        assert header.metadata != metadata, f"bit {bit % 8} of byte {bit // 8} passes"
        with safe_open(shard, framework="np") as file:
            assert len(file.keys()) == 5


def test_a_header_that_another_reader_would_refuse_is_named_with_what_was_expected(shard: Path) -> None:
    whole = shard.read_bytes()
    shard.write_bytes(whole.replace(b'"dtype":"U8"', b'"dtype":"U9"'))
    with pytest.raises(UserError, match=r"expected b'8\",\"shape\".* at byte \d+, found b'9\",\"shape\""):
        shards.read_header(shard)

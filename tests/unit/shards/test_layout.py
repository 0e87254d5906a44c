"""The header of a shard: as it was written, or refused."""

from pathlib import Path

import numpy as np
import pytest
import xxhash
from safetensors import safe_open
from synthetic import capture_spec, sharing

from draftstates.errors import UserError
from draftstates.plan.prefixes import share_prefixes
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


def test_the_readmes_lines_read_a_sample_whose_rows_lie_in_several_places(tmp_path: Path) -> None:
    """With any safetensors reader, and nothing of this package."""
    written = sharing(tmp_path)
    (path,) = (tmp_path / "shards").iterdir()
    lines = (Path(__file__).parents[3] / "README.md").read_text()
    code = lines.split("a sample takes six\nlines:\n\n```python\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line and "import" not in line]) == 6
    names = layout.read_header(path).sample_ids
    several = 0
    for index, name in enumerate(names):
        found: dict = {}
        here = code.replace("results/…/shards/….safetensors", str(path))
        exec(here.replace('"pt"), 0', f'"pt"), {index}'), found)
        several += len(found["places"]) > 1
        for tensor in ("input_ids", "hidden_states"):
            assert found[tensor].equal(written.samples[name][tensor])
    assert several > 2


def test_shared_rows_are_in_the_file_once(tmp_path: Path) -> None:
    written = sharing(tmp_path)
    (path,) = (tmp_path / "shards").iterdir()
    header, tokens = (
        layout.read_header(path),
        sum(len(s["input_ids"]) for s in written.samples.values()),
    )
    assert header.metadata["format_version"] == str(layout.SHARED_VERSION)
    assert header.rows < tokens / 2
    assert header.tensors["input_ids"][1] == (tokens,)
    segments = layout.Shard(path).segments
    size = written.spec.shard_bytes(
        samples=6, tokens=tokens, rows=header.rows, segments=len(segments.places)
    )
    start = min(begin for _, _, begin, _ in header.tensors.values())
    assert path.stat().st_size == start + size


def test_where_nothing_is_shared_the_file_is_the_one_of_before(shard: Path, tmp_path: Path) -> None:
    """The plan then hands no segments over (`test_plan`)."""
    assert layout.read_header(shard).metadata["format_version"] == str(layout.FORMAT_VERSION)
    assert "segments" not in layout.read_header(shard).tensors
    assert share_prefixes(np.arange(5), [2, 3], minimum=1) is None


@pytest.mark.parametrize("name", ["segments", "segment_offsets"])
@pytest.mark.parametrize("bit", [1, 128])
def test_segments_that_are_not_those_of_the_shard_id_are_refused(
    tmp_path: Path, name: str, bit: int
) -> None:
    """A reader would give a sample the rows of another, or look for them outside the array."""
    sharing(tmp_path)
    (path,) = (tmp_path / "shards").iterdir()
    _, _, begin, end = layout.read_header(path).tensors[name]
    data = bytearray(path.read_bytes())
    for at in range(begin, end, 5):
        data[at] ^= bit
        path.write_bytes(data)
        with pytest.raises(UserError, match="segments are not those of shard"):
            layout.Shard(path)
        data[at] ^= bit

"""Promise 3, values: rows that no forward pass gives, found exactly in every stored format."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from draftstates.verify.checks import row_faults

FORMATS = {torch.bfloat16: np.uint16, torch.float16: np.uint16, torch.float32: np.uint32}
# Bits that matter: zeros of both signs, the smallest and largest numbers, infinities, numbers that
# are none.
EDGES = {
    torch.bfloat16: [0, 0x8000, 1, 0x8001, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7F81, 0xFFFF, 0x3F80],
    torch.float16: [0, 0x8000, 1, 0x8001, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7C01, 0xFFFF, 0x3C00],
    torch.float32: [
        0,
        1 << 31,
        1,
        (1 << 31) + 1,
        0x7F7FFFFF,
        0xFF7FFFFF,
        0x7F800000,
        0xFF800000,
        0x7F800001,
        0xFFFFFFFF,
        0x3F800000,
    ],
}


def _plainly(rows: np.ndarray, dtype: torch.dtype) -> list[tuple[int, str]]:
    """Return what `row_faults` returns, computed in floats, a row at a time."""
    signed = {np.uint16: np.int16, np.uint32: np.int32}[FORMATS[dtype]]
    found = []
    for index, row in enumerate(torch.from_numpy(rows.view(signed).copy()).view(dtype).float()):
        if not row.isfinite().all():
            found.append((index, "not finite"))
        elif (row == 0).all():
            found.append((index, "all zero"))
        elif (row == row[0]).all():
            found.append((index, "constant"))
    return found


@given(data=st.data(), dtype=st.sampled_from(list(FORMATS)))
def test_the_bits_tell_what_the_floats_do(data: st.DataObject, dtype: torch.dtype) -> None:
    unsigned = FORMATS[dtype]
    numbers = st.one_of(st.sampled_from(EDGES[dtype]), st.integers(0, np.iinfo(unsigned).max))
    shape = st.tuples(st.integers(1, 6), st.integers(1, 5))
    rows = data.draw(
        hnp.arrays(unsigned, shape, elements=numbers, fill=st.sampled_from(EDGES[dtype]))
    )
    assert row_faults(rows, dtype) == _plainly(rows, dtype)


@pytest.mark.parametrize("dtype", list(FORMATS))
@pytest.mark.parametrize("place", [0, 1, 4094, 4095])
def test_one_value_among_thousands_is_found(dtype: torch.dtype, place: int) -> None:
    generator = torch.Generator().manual_seed(0)
    signed = {np.uint16: torch.int16, np.uint32: torch.int32}[FORMATS[dtype]]
    rows = (
        torch.randn(8, 4096, generator=generator)
        .to(dtype)
        .view(signed)
        .numpy()
        .view(FORMATS[dtype])
        .copy()
    )
    assert row_faults(rows, dtype) == []
    for edge in EDGES[dtype][6:10]:
        spoilt = rows.copy()
        spoilt[5, place] = edge
        assert row_faults(spoilt, dtype) == [(5, "not finite")]
    flat = rows.copy()
    flat[3] = EDGES[dtype][10]
    assert row_faults(flat, dtype) == [(3, "constant")]
    flat[3, place] += 1
    assert row_faults(flat, dtype) == []

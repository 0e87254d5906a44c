"""Strategies for fuzzing: JSON values, and documents with one place changed.

The tests try the same few examples every time. With DRAFTSTATES_FUZZ=2000 they try 2,000 new ones;
what they find becomes a test of its own.
"""

import copy
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from hypothesis import settings
from hypothesis import strategies as st

EXAMPLES = os.environ.get("DRAFTSTATES_FUZZ")
settings.register_profile("few", max_examples=25, deadline=None, derandomize=True, database=None)
settings.register_profile("many", max_examples=int(EXAMPLES or 1), deadline=None)
settings.load_profile("many" if EXAMPLES else "few")

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["", "..", "\x00", "\ud800", "{x}", "1e999", "0" * 5000])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(document: Any, at: tuple = ()) -> list[tuple]:
    """Return the path of every value of a JSON document."""
    inner = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    return [at, *(place for key, value in inner for place in places(value, (*at, key)))]


@st.composite
def changed(draw: st.DrawFn, document: Any) -> Any:
    """Draw the document with one value replaced, removed or added."""
    document = copy.deepcopy(document)
    place = draw(st.sampled_from(places(document)))
    if not place:
        return draw(JSON)
    parent = document
    for key in place[:-1]:
        parent = parent[key]
    what = draw(st.sampled_from(["replace", "remove", "add"]))
    if what == "replace":
        parent[place[-1]] = draw(JSON)
    elif what == "remove":
        del parent[place[-1]]
    elif isinstance(parent, dict):
        parent[draw(st.text(max_size=8))] = draw(JSON)
    else:
        parent.append(draw(JSON))
    return document


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Draw the bytes with some bits flipped, cut short, or with bytes put in."""
    found = bytearray(data)
    what = draw(st.sampled_from(["flip", "flip", "cut", "put"]))
    at = draw(st.integers(0, len(data) - 1))
    if what == "cut":
        return bytes(found[:at])
    if what == "put":
        found[at:at] = draw(st.binary(min_size=1, max_size=9))
        return bytes(found)
    for _ in range(draw(st.integers(1, 3))):
        found[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
    return bytes(found)


def flip_in_column(path: Path, column: str) -> None:
    """Flip a bit in the last value of a Parquet file's column."""
    group = pq.ParquetFile(path).metadata.row_group(0)
    chunks = [group.column(number) for number in range(group.num_columns)]
    chunk = next(each for each in chunks if each.path_in_schema.split(".")[0] == column)
    data = bytearray(path.read_bytes())
    begin = chunk.dictionary_page_offset or chunk.data_page_offset
    data[begin + chunk.total_compressed_size - 1] ^= 4
    path.write_bytes(data)

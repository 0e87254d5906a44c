"""Shared prefixes: the rows of a sample that an earlier sample of its shard has already.

A row's state depends on the tokens before it and on nothing else. So samples of one shard that
begin with the same tokens share these rows: the file holds them once, as the earlier sample's.

The plan decides which rows are shared, and the shard id is a hash of that too. So a shard with
shared rows is another shard than one of the same samples without: neither is ever taken for the
other, and what is captured still depends on shard id and capture key alone. A shard in which
nothing is shared has the id and the layout that it has without sharing.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from draftstates import ids

# Most places in which a sample's rows lie. The longest conversations of ShareGPT have 13.
MOST_SEGMENTS = 16
_ID_BYTES = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Segments:
    """The places of each sample's rows in a shard's file.

    A sample's rows are those of its segments, in order. The last of them are its own: the rows that
    no earlier sample has. Own rows follow one another in the order of the samples. A sample has at
    least one, its last, so that its next token can be compared with what the server returned.

    Attributes:
        offsets: segments of sample i are places[offsets[i]:offsets[i+1]], int64 [S+1].
        places: first row and number of rows of each segment, int64 [G, 2].
    """

    offsets: np.ndarray
    places: np.ndarray

    @classmethod
    def of(cls, places: Sequence[Sequence[tuple[int, int]]]) -> "Segments":
        """Return the segments of S samples, given as pairs (first row, rows) of each."""
        flat = [place for sample in places for place in sample]
        return cls(
            np.cumsum([0, *map(len, places)], dtype=np.int64),
            np.array(flat, dtype=np.int64).reshape(-1, 2),
        )

    @classmethod
    def unshared(cls, lengths: Sequence[int] | np.ndarray) -> "Segments":
        """Return one segment a sample, for samples of these lengths that share nothing."""
        ends = np.cumsum(lengths, dtype=np.int64)
        return cls(
            np.arange(len(ends) + 1), np.stack([ends - lengths, np.asarray(lengths)], axis=1)
        )

    @cached_property
    def ends(self) -> np.ndarray:
        """The end of each sample's own rows, after a leading 0: int64 [S+1]."""
        return np.concatenate([[0], self.places[self.offsets[1:] - 1].sum(axis=1)])

    @property
    def rows(self) -> int:
        """Number of rows of the file."""
        return int(self.ends[-1])

    @cached_property
    def lengths(self) -> np.ndarray:
        """Number of rows of each sample, int64 [S]."""
        if not len(self.offsets) - 1:
            return np.empty(0, np.int64)
        return np.add.reduceat(self.places[:, 1], self.offsets[:-1])

    def shared(self, index: int) -> int:
        """Return how many rows of sample `index` are an earlier sample's."""
        return int(self.lengths[index] - (self.ends[index + 1] - self.ends[index]))

    def of_sample(self, index: int) -> list[tuple[int, int]]:
        """Return first row and number of rows of each segment of sample `index`."""
        return [
            (first, rows)
            for first, rows in self.places[self.offsets[index] : self.offsets[index + 1]].tolist()
        ]

    def row_numbers(self, index: int) -> np.ndarray:
        """Return the row in the file of each token of sample `index`, int64 [n]."""
        return np.concatenate(
            [np.arange(first, first + rows) for first, rows in self.of_sample(index)]
        )

    def owners(self, index: int) -> list[int]:
        """Return the samples whose own rows sample `index` shares, in the order of its tokens."""
        left, found = self.shared(index), []
        for first, rows in self.of_sample(index):
            for owner, _, count in self.owners_of(first, min(rows, left)):
                found.append(owner)
                left -= count
        return found

    def content(self) -> bytes:
        """Return what a shard id hashes beside the sample ids: nothing where nothing is shared."""
        if np.array_equal(self.places[:, 0], self.ends[:-1]):
            return b""
        return self.offsets.astype("<i8").tobytes() + self.places.astype("<i8").tobytes()

    def fault(self, input_ids: np.ndarray) -> str | None:
        """Return why these cannot be the places of the rows of these samples; None if they can.

        Args:
            input_ids: ids of all samples in sequence, int [T].
        """
        return next(self._faults(input_ids), None)

    def _faults(self, input_ids: np.ndarray) -> Iterator[str]:
        counts = np.diff(self.offsets, prepend=0, append=len(self.places))
        if counts[0] or counts[-1] or (counts[1:-1] <= 0).any() or (self.places[:, 1] <= 0).any():
            yield "expected segments of at least one row, and one of each sample at least"
            return
        starts = np.cumsum([0, *self.lengths.tolist()])
        outside = (self.places[:, 0] < 0) | (self.places.sum(axis=1) > self.rows)
        if (np.diff(self.ends) <= 0).any() or outside.any() or starts[-1] != len(input_ids):
            yield f"expected rows of its own of each sample, and {len(input_ids)} rows in all"
            return
        for index in range(len(starts) - 1):
            own, position, own_rows = input_ids[starts[index] : starts[index + 1]], 0, 0
            for first, rows in self.of_sample(index):
                for owner, row, count in self.owners_of(first, rows):
                    at = starts[owner] + self.shared(owner) + row - self.ends[owner]
                    end = position + count
                    # the whole prefix: a row's state depends on every token before it
                    if (
                        owner > index
                        or at - starts[owner] != position
                        or (own[:end] != input_ids[starts[owner] : starts[owner] + end]).any()
                    ):
                        yield (
                            f"rows {row} to {row + count} are those of other tokens: expected the"
                            f" tokens {position} to {end} of sample {index} and those before them"
                        )
                        return
                    position = end
                    own_rows += count * (owner == index)
            begin, end = self.ends[index : index + 2].tolist()
            # or rows of the file would be nobody's
            if own_rows != end - begin:
                yield f"expected all rows {begin} to {end} in sample {index}, found {own_rows}"
                return

    def owners_of(self, first: int, rows: int) -> Iterator[tuple[int, int, int]]:
        """Yield the samples whose own rows these are: sample, first row, number of rows."""
        row, end = first, first + rows
        while row < end:
            owner = int(np.searchsorted(self.ends, row, side="right")) - 1
            stop = min(end, int(self.ends[owner + 1]))
            yield owner, row, stop - row
            row = stop


def shard_id(sample_ids: Sequence[str], segments: Segments | None) -> str:
    """Return the id of a shard of these samples, whose rows lie in these places.

    Args:
        segments: None where nothing is shared.
    """
    return ids.shard_id(sample_ids, segments.content() if segments else b"")


def share_prefixes(
    input_ids: np.ndarray, lengths: Sequence[int] | np.ndarray, *, minimum: int
) -> Segments | None:
    """Let each sample of a shard share the longest prefix that an earlier sample has too.

    Args:
        input_ids: ids of all samples in sequence, int [T].
        lengths: tokens of each sample.
        minimum: least number of shared rows.

    Returns:
        the places of the samples' rows; None if no sample shares rows.
    """
    parents = _longest_prefixes(input_ids, lengths, minimum)
    if not parents:
        return None
    places: list[list[tuple[int, int]]] = []
    row = 0
    for index, length in enumerate(lengths):
        parent, shared = parents.get(index, (0, 0))
        found = _first_rows(places[parent], min(shared, length - 1)) if shared else []
        shared = sum(rows for _, rows in found)
        if shared < minimum:
            found, shared = [], 0
        own = int(length) - shared
        if found and sum(found[-1]) == row:
            # own rows that follow the shared ones in the file too
            found[-1] = (found[-1][0], found[-1][1] + own)
        else:
            found.append((row, own))
        places.append(found)
        row += own
    return Segments.of(places) if row < len(input_ids) else None


def _first_rows(places: list[tuple[int, int]], rows: int) -> list[tuple[int, int]]:
    """Return the places of a sample's first rows, which leave one segment for own rows."""
    found = []
    for first, count in places[: MOST_SEGMENTS - 1]:
        if rows <= 0:
            break
        found.append((first, min(count, rows)))
        rows -= count
    return found


def _longest_prefixes(
    input_ids: np.ndarray, lengths: Sequence[int] | np.ndarray, minimum: int
) -> dict[int, tuple[int, int]]:
    """Return the earlier sample with the longest common prefix, and its number of ids.

    In the order of their bytes, the samples that have the longest prefix in common with a sample
    are its neighbours. Samples are taken out from the last to the first, so that the neighbours of
    each are earlier ones.

    Args:
        minimum: least number of ids of a prefix; samples without such a prefix are left out.
    """
    ends = np.cumsum(lengths).tolist()
    starts = [0, *ends[:-1]]
    whole = np.ascontiguousarray(input_ids, dtype="<i4").tobytes()
    texts = [whole[a * _ID_BYTES : b * _ID_BYTES] for a, b in zip(starts, ends, strict=True)]
    order = sorted(range(len(texts)), key=texts.__getitem__)
    head = minimum * _ID_BYTES
    # ids in common with the sample before it in this order
    common = [0] * (len(order) + 1)
    for rank in range(1, len(order)):
        one, other = order[rank - 1], order[rank]
        count = min(len(texts[one]), len(texts[other])) // _ID_BYTES
        if count >= minimum and texts[one][:head] == texts[other][:head]:
            a, b = starts[one], starts[other]
            different = input_ids[a : a + count] != input_ids[b : b + count]
            at = int(different.argmax())
            common[rank] = at if different[at] else count
    if not any(common):
        return {}
    rank_of = {index: rank for rank, index in enumerate(order)}
    before = [rank - 1 for rank in range(len(order) + 1)]
    after = [rank + 1 for rank in range(len(order) + 1)]
    found = {}
    for index in range(len(texts) - 1, 0, -1):
        rank = rank_of[index]
        left, right = before[rank], after[rank]
        if shared := max(common[rank], common[right]):
            sides = (common[rank], left), (common[right], right)
            found[index] = (min(order[at] for count, at in sides if count == shared), shared)
        common[right] = min(common[rank], common[right])
        before[right] = left
        if left >= 0:
            after[left] = right
    return found

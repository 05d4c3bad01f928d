"""The work of each rank's attention, counted in the blocks that the kernels visit: 128 rows by 128 keys.

Visible pairs tell how even a layout is; what it costs is told by blocks, as a tile of rows visits every block between
the first key and the last that any of its rows sees. Rows that lie far apart in the batch may share a tile, and a
document's few rows on a rank fill a tile badly: both are why layouts with equal pairs aren't equally fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROWS = KEYS = 128  # of a block
PAIRS_PER_BLOCK = ROWS * KEYS

Integers = NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tiles of all ranks' rows, rank after rank.

    Attributes:
        start: (tiles,) the first key that a tile visits.
        stop: (tiles,) one past the last.
        begins: (ranks + 1,) where each rank's tiles begin, and the last one's end.
        pairs: (ranks,) what each rank's rows see.
    """

    start: Integers
    stop: Integers
    begins: Integers
    pairs: Integers

    def blocks(self) -> Integers:
        """(ranks,): the blocks that each rank visits, of all keys."""
        return self._per_rank(self.start, self.stop)

    def blocks_by_source(self, rows: Sequence[Integers]) -> Integers:
        """(ranks, ranks): the blocks that each rank visits among the keys of each other, which are `rows` of the batch.

        The tiles are those of the whole batch's keys; cut anew for each source there may be a few more or less.
        """
        found = np.empty((len(self.begins) - 1, len(rows)), np.int64)
        bounds = np.concatenate([self.start, self.stop])
        for source, keys in enumerate(rows):
            passed = np.searchsorted(keys, bounds)
            found[:, source] = self._per_rank(passed[: len(self.start)], passed[len(self.start) :])
        return found

    def _per_rank(self, start: Integers, stop: Integers) -> Integers:
        return _sums(-(np.maximum(stop - start, 0) // -KEYS), self.begins)


def cut(start: Integers, stop: Integers, lengths: Sequence[int]) -> Tiles:
    """The tiles that the kernels would cut (tritonpack/backends/schedule.py), for every rank's rows at once.

    Args:
        start: (rows,) the first key of each row, the ranks' rows laid end to end, as `Layout` has them.
        stop: (rows,) one past the last key, likewise.
        lengths: rows of each rank.
    """
    total, edges = len(start), np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    live = start < stop
    begins = np.zeros(total, bool)
    # A row that has no key in common with the row above begins a document, or a run of rows that see nothing.
    begins[1:] = ((start[1:] >= stop[:-1]) & (live[1:] | live[:-1])) | (live[1:] != live[:-1])
    shards = np.zeros(total, bool)
    shards[edges[edges < total]] = True
    runs = np.flatnonzero(begins | shards)
    long = np.diff(runs, append=total) >= ROWS
    kept = long | shards[runs]
    kept[1:] |= long[:-1]  # shorter documents share tiles
    runs = runs[kept]
    counts = -(np.diff(runs, append=total) // -ROWS)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    first = np.repeat(runs, counts) + number * ROWS
    last = np.append(first[1:], total)[: len(first)] - 1
    return Tiles(start[first], stop[last], np.searchsorted(first, edges), _sums(stop - start, edges))


def _sums(values: Integers, begins: Integers) -> Integers:
    """(runs,): of values[begins[r]:begins[r + 1]], where runs may be empty."""
    sums = np.add.reduceat(np.append(values, 0), begins[:-1], dtype=np.int64)
    sums[begins[1:] == begins[:-1]] = 0
    return sums

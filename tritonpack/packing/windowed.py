"""Best-fit-decreasing over windows of documents in input order: for streams, and where order shall nearly be kept."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.best_fit import best_fit
from tritonpack.packing.bins import CARRY_THRESHOLD, WINDOW
from tritonpack.packing.reorder import group_by_bin

MAX_CARRIES = 2  # more gains nothing measurable


def windowed(lengths: NDArray[np.int32], capacity: int, max_items: int) -> Any:
    """Windowed best-fit-decreasing of lengths that are all known; arguments and result as best_fit_decreasing."""
    packer = WindowPacker(capacity, max_items, CARRY_THRESHOLD)
    groups = []
    for start in range(0, len(lengths), WINDOW):
        groups.append(packer.add(lengths[start : start + WINDOW], last=start + WINDOW >= len(lengths)))
    items = np.concatenate([items for items, _ in groups]).astype(np.int32)
    sizes = np.concatenate([np.diff(offsets) for _, offsets in groups])
    return items, np.concatenate([[0], np.cumsum(sizes)])


class WindowPacker:
    """Packs windows of documents one after the other, and carries the documents of poorly filled bins on.

    At a window's end bins filled below the threshold are dissolved, and their documents are packed again with the next
    window's. Documents that were carried MAX_CARRIES times are overdue: they go into bins before all others, and their
    bins are done. Without that, documents that always fill bins poorly would be carried, and packed anew, to the end,
    and so would the shortest, which are packed last. So no document waits for more than MAX_CARRIES windows, and no
    more than MAX_CARRIES + 1 windows are held.

    Bins that are done come in the order of their first documents.

    Args:
        capacity: tokens per bin.
        max_items: documents per bin.
        carry_threshold: the filled share of a bin, from 0 to 1, below which it is dissolved; 0 carries nothing.
    """

    def __init__(self, capacity: int, max_items: int, carry_threshold: float) -> None:
        self.capacity = capacity
        self.max_items = max_items
        self.carry_threshold = carry_threshold
        self._documents = np.zeros(0, dtype=np.int64)
        self._lengths = np.zeros(0, dtype=np.int32)
        self._carries = np.zeros(0, dtype=np.int64)
        self._next_document = 0

    def add(self, lengths: NDArray[np.int32], *, last: bool = False) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The bins that a window of documents completes; with `last`, of all documents that are left.

        Args:
            lengths: (documents,) int32, each in 1..capacity.
            last: no window follows.

        Returns:
            documents (entries,) int64, numbered in the order in which they were added, and offsets (bins + 1,) int64.
        """
        new = np.arange(self._next_document, self._next_document + len(lengths))
        self._next_document += len(lengths)
        documents = np.concatenate([self._documents, new])
        if not len(documents):
            return documents, np.zeros(1, dtype=np.int64)
        lengths = np.concatenate([self._lengths, lengths])
        carries = np.concatenate([self._carries, np.zeros_like(new)])

        # Overdue ones first, then from long to short.
        overdue = carries == MAX_CARRIES
        order = np.argsort(-(lengths + np.where(overdue, self.capacity, 0)), kind="stable").astype(np.int32)
        bins, num_bins = best_fit(lengths[order], self.capacity, self.max_items)
        items, offsets = group_by_bin(bins, order, num_bins)
        starts, sizes = offsets[:-1], np.diff(offsets)
        done = np.add.reduceat(lengths[items], starts, dtype=np.int64) >= self.carry_threshold * self.capacity
        done |= sizes == self.max_items
        done |= np.logical_or.reduceat(overdue[items], starts)
        done |= last

        # Ascending within bins, and bins by their first document; those that aren't done come last.
        rank = np.empty(len(sizes), dtype=np.int64)
        rank[np.lexsort([np.minimum.reduceat(items, starts), ~done])] = np.arange(len(sizes))
        entries = items[np.lexsort([items, np.repeat(rank, sizes)])]
        taken = int(sizes[done].sum())
        kept = np.sort(entries[taken:])
        self._documents, self._lengths, self._carries = documents[kept], lengths[kept], carries[kept] + 1
        sizes_done = sizes[np.argsort(rank)][: int(done.sum())]
        return documents[entries[:taken]], np.concatenate([[0], np.cumsum(sizes_done)])

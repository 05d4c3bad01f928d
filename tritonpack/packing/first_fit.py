"""First-fit and first-fit-decreasing in O(documents x log bins), compiled by numba.

A binary tree over the bins holds at each node the most room that any bin below it has left, so the first bin with
enough room is found from the root in one descent. Bins that aren't open yet are leaves with all their room, so opening
a bin is no special case.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.reorder import group_by_bin, longest_first


def first_fit(lengths: NDArray[np.int32], capacity: int, max_items: int) -> Any:
    """Each document, in input order, into the first bin with room; arguments and result as best_fit_decreasing."""
    bins, num_bins = _first_fit(lengths, capacity, max_items, _num_leaves(lengths, capacity, max_items))
    return group_by_bin(bins, np.arange(len(lengths), dtype=np.int32), num_bins)


def first_fit_decreasing(lengths: NDArray[np.int32], capacity: int, max_items: int) -> Any:
    """First-fit with documents from long to short; arguments and result as best_fit_decreasing."""
    order, sorted_lengths = longest_first(lengths, capacity)
    bins, num_bins = _first_fit(sorted_lengths, capacity, max_items, _num_leaves(lengths, capacity, max_items))
    return group_by_bin(bins, order, num_bins)


def _num_leaves(lengths: NDArray[np.int32], capacity: int, max_items: int) -> int:
    """A power of two that the number of bins can't exceed.

    Of two bins that may take one more document the second was opened for one that the first had no room for, so the
    two hold more than one capacity.
    """
    most_bins = 1 + 2 * int(lengths.sum(dtype=np.int64)) // capacity + len(lengths) // max_items
    return 1 << (min(most_bins, len(lengths)) - 1).bit_length()


@numba.njit(cache=True, nogil=True)
def _first_fit(lengths: Any, capacity: int, max_items: int, num_leaves: int) -> Any:
    """Each document, in the order given, into the first bin with room: bins (documents,) int32, and their number.

    The first bin that fits stays so until it is too full, so each run of equal lengths fills it with as many as fit.
    """
    num_items = len(lengths)
    # The children of node i are 2 i and 2 i + 1; node 1 is the root, and bin b is leaf num_leaves + b.
    most_room = np.full(2 * num_leaves, capacity, dtype=np.int32)
    bins = np.empty(num_items, dtype=np.int32)
    limited = max_items < num_items
    held = np.zeros(num_leaves if limited else 0, dtype=np.int32)  # by bin: documents in it, counted only for a limit

    num_bins = 0
    placed = 0
    while placed < num_items:
        length = lengths[placed]
        node = 1
        while node < num_leaves:
            node *= 2
            if most_room[node] < length:
                node += 1
        chosen = node - num_leaves
        num_bins = max(num_bins, chosen + 1)

        count = most_room[node] // length
        if limited:
            count = min(count, max_items - held[chosen])
        stop = placed
        while stop < num_items and stop - placed < count and lengths[stop] == length:
            stop += 1
        bins[placed:stop] = chosen
        room = most_room[node] - (stop - placed) * length
        if limited:
            held[chosen] += stop - placed
            if held[chosen] == max_items:
                room = 0
        placed = stop

        most_room[node] = room
        while node > 1:
            node //= 2
            largest = max(most_room[2 * node], most_room[2 * node + 1])
            if most_room[node] == largest:
                break
            most_room[node] = largest
    return bins, num_bins

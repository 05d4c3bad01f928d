"""Sorting documents by length and by bin, in time linear in documents, compiled by numba.

Compiled loops call no compiled function of another file: numba's cache on disk would keep the old machine code of a
function whose own file is unchanged.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np


@numba.njit(cache=True, nogil=True)
def longest_first(lengths: Any, capacity: int) -> Any:
    """Documents from long to short, (documents,) int32, and their lengths, likewise; equal ones stay in input order."""
    starts = np.zeros(capacity + 1, dtype=np.int64)
    for length in lengths:
        starts[length] += 1
    sorted_lengths = np.empty(len(lengths), dtype=np.int32)
    total = 0
    for length in range(capacity, 0, -1):
        count = starts[length]
        sorted_lengths[total : total + count] = length
        starts[length] = total
        total += count
    order = np.empty(len(lengths), dtype=np.int32)
    for item in range(len(lengths)):
        order[starts[lengths[item]]] = item
        starts[lengths[item]] += 1
    return order, sorted_lengths


@numba.njit(cache=True, nogil=True)
def group_by_bin(bins: Any, order: Any, num_bins: int) -> Any:
    """Which items each bin holds.

    Args:
        bins: (documents,) int32, the bin of document order[i].
        order: (documents,) int32, a permutation.
        num_bins: bins, numbered from 0.

    Returns:
        items (documents,) int32 and offsets (num_bins + 1,) int64: bin b holds `items[offsets[b] : offsets[b + 1]]`, in
        the order in which they were given.
    """
    offsets = np.zeros(num_bins + 1, dtype=np.int64)
    for chosen in bins:
        offsets[chosen + 1] += 1
    for bin_index in range(num_bins):
        offsets[bin_index + 1] += offsets[bin_index]
    cursor = offsets[:-1].copy()
    items = np.empty(len(bins), dtype=np.int32)
    for position in range(len(bins)):
        items[cursor[bins[position]]] = order[position]
        cursor[bins[position]] += 1
    return items, offsets


@numba.njit(cache=True, nogil=True)
def gather(values: Any, indices: Any) -> Any:
    """values[indices]; numpy takes several times as long for int32 indices, which it widens first."""
    gathered = np.empty(len(indices), dtype=values.dtype)
    for position in range(len(indices)):
        gathered[position] = values[indices[position]]
    return gathered

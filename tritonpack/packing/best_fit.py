"""Best-fit-decreasing in time linear in documents and capacity, compiled by numba.

Bins are kept in stacks by the room they have left, and a bitmap says which stacks hold a bin. The bitmap is a tree of
64-bit words: bit i of a level says that word i of the level below isn't zero, so the fullest bin with room for a
document is a handful of word reads away, however large the capacity.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.reorder import group_by_bin, longest_first

_WORD_BITS = 64
_ONE = np.uint64(1)
# Multiplying a power of two by a de Bruijn constant leaves a different number in its top six bits for each of the 64.
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
_BIT_OF_PRODUCT = np.zeros(_WORD_BITS, dtype=np.int64)
for _bit in range(_WORD_BITS):
    _BIT_OF_PRODUCT[((int(_DE_BRUIJN) << _bit) & (2**64 - 1)) >> 58] = _bit


def best_fit_decreasing(lengths: NDArray[np.int32], capacity: int, max_items: int) -> Any:
    """Exact best-fit-decreasing.

    Among bins with equal room the one that was changed last is taken.

    Args:
        lengths: (documents,) int32, each in 1..capacity.
        capacity: tokens per bin.
        max_items: documents per bin; as many as there are documents sets no limit.

    Returns:
        items (documents,) int32 and offsets (bins + 1,) int64: bin b holds `items[offsets[b] : offsets[b + 1]]`.
    """
    order, sorted_lengths = longest_first(lengths, capacity)
    bins, num_bins = best_fit(sorted_lengths, capacity, max_items)
    return group_by_bin(bins, order, num_bins)


@numba.njit(cache=True, nogil=True)
def best_fit(lengths: Any, capacity: int, max_items: int) -> Any:
    """Each document, in the order given, into the fullest bin with room for it.

    Documents of one length are alike, and the fullest bin that fits stays so until it is too full for that length, so
    each run of equal lengths fills a bin with as many as fit at once.

    Args:
        lengths, capacity, max_items: as best_fit_decreasing.

    Returns:
        The bin of each document, (documents,) int32, and the number of bins.
    """
    num_items = len(lengths)
    shortest = lengths.min()
    level_starts = _level_starts(capacity + 1)
    bitmap = np.zeros(level_starts[-1], dtype=np.uint64)
    top_bin = np.full(capacity + 1, -1, dtype=np.int32)  # by room left: the top of that stack of bins
    below = np.empty(num_items, dtype=np.int32)  # by bin: the next bin down its stack
    bins = np.empty(num_items, dtype=np.int32)
    limited = max_items < num_items
    held = np.zeros(num_items if limited else 0, dtype=np.int32)  # by bin: documents in it, counted only for a limit

    num_bins = 0
    placed = 0
    while placed < num_items:
        length = lengths[placed]
        run_end = placed
        while run_end < num_items and lengths[run_end] == length:
            run_end += 1
        while placed < run_end:
            room = _next_set(bitmap, level_starts, length)
            if room < 0:
                room = capacity
                chosen = num_bins
                num_bins += 1
            else:
                chosen = top_bin[room]
                top_bin[room] = below[chosen]
                if below[chosen] < 0:
                    _clear(bitmap, level_starts, room)
            count = min(run_end - placed, room // length)
            if limited:
                count = min(count, max_items - held[chosen])
                held[chosen] += count
            bins[placed : placed + count] = chosen
            placed += count
            room -= count * length
            if room >= shortest and not (limited and held[chosen] == max_items):  # others can take nothing more
                below[chosen] = top_bin[room]
                if top_bin[room] < 0:
                    _set(bitmap, level_starts, room)
                top_bin[room] = chosen
    return bins, num_bins


def _level_starts_of(num_bits: int) -> NDArray[np.int64]:
    """Where each level of a bitmap of `num_bits` bits begins, the leaves first, and one past the last word."""
    starts = [0]
    words = num_bits
    while words > 1 or len(starts) == 1:
        words = (words + _WORD_BITS - 1) // _WORD_BITS
        starts.append(starts[-1] + words)
    return np.array(starts, dtype=np.int64)


_level_starts = numba.njit(cache=True, nogil=True)(_level_starts_of)


@numba.njit(cache=True, nogil=True)
def _lowest_bit(word: Any) -> Any:
    return _BIT_OF_PRODUCT[((word & (~word + _ONE)) * _DE_BRUIJN) >> np.uint64(58)]


@numba.njit(cache=True, nogil=True)
def _set(bitmap: Any, level_starts: Any, bit: int) -> None:
    for level in range(len(level_starts) - 1):
        bitmap[level_starts[level] + (bit >> 6)] |= _ONE << np.uint64(bit & 63)
        bit >>= 6


@numba.njit(cache=True, nogil=True)
def _clear(bitmap: Any, level_starts: Any, bit: int) -> None:
    for level in range(len(level_starts) - 1):
        word = level_starts[level] + (bit >> 6)
        bitmap[word] &= ~(_ONE << np.uint64(bit & 63))
        if bitmap[word]:
            return
        bit >>= 6


@numba.njit(cache=True, nogil=True)
def _next_set(bitmap: Any, level_starts: Any, bit: int) -> int:
    """The first set bit at or after `bit`, -1 if there is none."""
    for level in range(len(level_starts) - 1):
        word = level_starts[level] + (bit >> 6)
        if word >= level_starts[level + 1]:
            return -1
        rest = bitmap[word] >> np.uint64(bit & 63)
        if rest:
            bit += _lowest_bit(rest)
            for lower in range(level - 1, -1, -1):
                bit = (bit << 6) + _lowest_bit(bitmap[level_starts[lower] + bit])
            return bit
        bit = (bit >> 6) + 1
    return -1

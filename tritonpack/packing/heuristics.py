"""The heuristics of `pack` and `pack_stream`, compiled by numba; imported when something is packed or planned.

Those of `pack` take lengths (documents,) int32 from 1 to `capacity`, and the documents per bin, for which the number of
all documents sets no limit. They return what `group_by_bin` returns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_FEW = 48  # fewer keys are sorted by insertion

try:
    from tritonpack import compilation
except ImportError as error:
    raise ImportError(
        "tritonpack packs and plans with loops that numba compiles, and numba can't be imported here "
        f"({error}). Install it: pip install numba. PackingCollator works without it."
    ) from error

compiled: Any = compilation.compiled()
# For loops that allocate no array and are called for a few documents at a time.
compiled_without_arrays: Any = compilation.compiled(**compilation.COUNTS_NOTHING)


@compiled
def longest_first(lengths: Any, capacity: int) -> Any:
    """Documents from long to short, (documents,) int32, and their lengths; equal lengths keep their order."""
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


@compiled
def group_by_bin(bins: Any, order: Any, num_bins: int) -> Any:
    """Group documents by bin, in linear time; within a bin they keep their order. bins[i] is the bin of order[i].

    Returns:
        items (documents,) int32 and offsets (num_bins + 1,) int64: bin b holds `items[offsets[b] : offsets[b + 1]]`.
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


def best_fit_decreasing(lengths: NDArray[np.int32], capacity: int, max_items: int) -> Any:
    """Exact best-fit-decreasing; among bins with equal room it takes the one that was changed last."""
    order, sorted_lengths = longest_first(lengths, capacity)
    bins, num_bins = fullest_with_room(sorted_lengths, capacity, max_items)
    return group_by_bin(bins, order, num_bins)


def best_fit(lengths: NDArray[np.int32], capacity: int, max_items: int) -> Any:
    """Best-fit in the input order."""
    bins, num_bins = fullest_with_room(lengths, capacity, max_items)
    return group_by_bin(bins, np.arange(len(lengths), dtype=np.int32), num_bins)


@compiled
def fullest_with_room(lengths: Any, capacity: int, max_items: int) -> Any:
    """Put each document, in the given order, into the fullest bin with room for it.

    Bins with the same room form a stack, and a binary tree marks the stacks that hold a bin: node i has the children
    2 i and 2 i + 1, and room r is leaf leaves + r. So a search takes O(log capacity). The fullest bin with room for a
    length remains the fullest until it has no room, so it takes as many documents of a run of equal lengths as fit.

    Returns:
        The bin of each document, (documents,) int32, and the number of bins.
    """
    num_items = len(lengths)
    shortest = lengths[0]
    for length in lengths:
        shortest = min(shortest, length)
    leaves = 1
    while leaves <= capacity:
        leaves *= 2
    marks = np.zeros(2 * leaves, dtype=np.bool_)
    top_bin = np.full(capacity + 1, -1, dtype=np.int32)  # by room: the top of the stack of bins
    below = np.empty(num_items, dtype=np.int32)  # by bin: the next bin of its stack
    bins = np.empty(num_items, dtype=np.int32)
    held = np.zeros(num_items, dtype=np.int32)  # by bin: documents in it

    num_bins = 0
    placed = 0
    while placed < num_items:
        length = lengths[placed]
        run_end = placed
        while run_end < num_items and lengths[run_end] == length:
            run_end += 1
        while placed < run_end:
            room = _next_marked(marks, length)
            if room < 0:
                room = capacity
                chosen = num_bins
                num_bins += 1
            else:
                chosen = top_bin[room]
                top_bin[room] = below[chosen]
                if below[chosen] < 0:
                    _change_mark(marks, room)
            count = min(run_end - placed, room // length, max_items - held[chosen])
            held[chosen] += count
            bins[placed : placed + count] = chosen
            placed += count
            room -= count * length
            if room >= shortest and held[chosen] < max_items:  # all other bins are closed
                below[chosen] = top_bin[room]
                if top_bin[room] < 0:
                    _change_mark(marks, room)
                top_bin[room] = chosen
    return bins, num_bins


@compiled
def _change_mark(marks: Any, room: int) -> None:
    node = len(marks) // 2 + room
    marks[node] = not marks[node]
    while node > 1 and marks[node // 2] != (marks[node] or marks[node ^ 1]):
        node //= 2
        marks[node] = not marks[node]


@compiled
def _next_marked(marks: Any, room: int) -> int:
    """The first marked room from `room` up, -1 if there is none."""
    leaves = len(marks) // 2
    node = leaves + room
    while not marks[node]:
        while node & 1:  # a right child: go up to where the tree continues to the right
            node >>= 1
        if node == 0:
            return -1
        node += 1
    while node < leaves:
        node = 2 * node + (not marks[2 * node])
    return node - leaves


@compiled
def next_fit(lengths: Any, capacity: int, max_items: int) -> Any:
    """Next-fit: bins of consecutive documents."""
    offsets = np.empty(len(lengths) + 1, dtype=np.int64)
    num_bins = 0
    room = 0
    for item in range(len(lengths)):
        if lengths[item] > room or item - offsets[num_bins - 1] == max_items:
            offsets[num_bins] = item
            num_bins += 1
            room = capacity
        room -= lengths[item]
    offsets[num_bins] = len(lengths)
    return np.arange(len(lengths)).astype(np.int32), offsets[: num_bins + 1].copy()


CARRY_THRESHOLD = 0.95  # the filled share of a bin below which its documents are packed again with the next window
MAX_CARRIES = 2  # more had no measurable benefit


def pack_window(
    carried: NDArray[np.int64], lengths: NDArray[np.int32], first: int, capacity: int, max_items: int, last: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Best-fit-decreasing of a window of a stream, and of the documents that are carried into it.

    Documents of bins that are filled below CARRY_THRESHOLD are carried: packed again with the next window. Documents
    that were carried MAX_CARRIES times are packed before all others, and their bins are finished.

    Args:
        carried: (3, documents) int64, the number, the tokens and the carries of each document of earlier windows.
        lengths: (documents,) integers of the window's documents, which are numbered from `first` on.
        last: no window follows, so all bins are finished.

    Returns:
        The finished bins, in the order of their first documents: documents (entries,) int64 and offsets (bins + 1,)
        int64. And what is carried into the next window.
    """
    new = np.stack([np.arange(first, first + len(lengths)), lengths, np.zeros(len(lengths), dtype=np.int64)])
    pieces = np.concatenate([carried, new], axis=1)
    documents, tokens, carries = pieces
    if not len(documents):
        return documents, np.zeros(1, dtype=np.int64), pieces

    overdue = carries == MAX_CARRIES
    order = np.argsort(-(tokens + np.where(overdue, capacity, 0)), kind="stable").astype(np.int32)  # overdue ones first
    bins, num_bins = fullest_with_room(tokens[order].astype(np.int32), capacity, max_items)
    items, offsets = group_by_bin(bins, order, num_bins)
    starts, sizes = offsets[:-1], np.diff(offsets)
    done = np.add.reduceat(tokens[items], starts) >= CARRY_THRESHOLD * capacity
    done |= sizes == max_items
    done |= np.logical_or.reduceat(overdue[items], starts)
    done |= last

    # Sort documents within bins, and bins by their first document. Bins that aren't done come last.
    by_first = np.lexsort([np.minimum.reduceat(items, starts), ~done])
    rank = np.argsort(by_first)
    entries = items[np.lexsort([items, np.repeat(rank, sizes)])]
    sizes = sizes[by_first][: int(done.sum())]
    taken = int(sizes.sum())
    carried = pieces[:, np.sort(entries[taken:])]
    carried[2] += 1
    return documents[entries[:taken]], np.concatenate([[0], np.cumsum(sizes)]), carried


@compiled_without_arrays
def sort_by_bytes(keys: Any, spare: Any, starts: Any, count: int, shift: int, most: int) -> None:
    """Sort the first `count` keys, in place; `most` is at least the largest `key >> shift`.

    Few keys are sorted by insertion, which takes few moves if they nearly descend. More are sorted byte by byte from
    the bit `shift` on, and must ascend below that bit. `spare` (count,) and `starts` (257,) int64 are scratch memory.
    """
    if count < _FEW:
        for place in range(count):
            key = keys[count - 1 - place]
            hole = place
            while hole and spare[hole - 1] > key:
                spare[hole] = spare[hole - 1]
                hole -= 1
            spare[hole] = key
        for place in range(count):
            keys[place] = spare[place]
        return
    turns = 0
    while most:
        starts[:257] = 0
        for place in range(count):
            starts[(keys[place] >> shift & 255) + 1] += 1
        for value in range(min(most, 255)):
            starts[value + 1] += starts[value]
        for place in range(count):
            value = keys[place] >> shift & 255
            spare[starts[value]] = keys[place]
            starts[value] += 1
        keys, spare = spare, keys
        turns += 1
        shift += 8
        most >>= 8
    if turns % 2:
        for place in range(count):
            spare[place] = keys[place]

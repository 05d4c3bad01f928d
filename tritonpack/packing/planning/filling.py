"""Put the units of a group into rows: evenly loaded ones, or full ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from tritonpack.packing.heuristics import compiled_without_arrays

UNLIMITED = 2**62  # above all loads
_BLOCK = 16  # rows that are searched together


@compiled_without_arrays
def fill_evenly(own: Any, loads: Any, rows: int, limit: int, row_of: Any, of_rows: Any) -> int:
    """Put each unit into the least loaded row with room, and write its row, or -1, to `row_of`; return placed tokens.

    `own` are the tokens of units: first of those that were deferred often, then of all others, both from large to
    small. A row holds `limit` tokens. `of_rows` (12, rows or more) is scratch memory; `of_rows[1]` are the rows' units.
    """
    load, size, block_load, block_room, room = of_rows[0], of_rows[1], of_rows[2], of_rows[3], of_rows[11]
    blocks = (rows + _BLOCK - 1) // _BLOCK
    load[:rows] = size[:rows] = block_load[:blocks] = 0
    room[:rows] = block_room[:blocks] = UNLIMITED  # of an empty row, which takes any unit
    placed = np.int64(0)
    for unit in range(len(loads)):
        row_of[unit], row, needed, least = -1, -1, own[unit], np.int64(UNLIMITED)
        for block in range(blocks):
            if block_load[block] >= least or block_room[block] < needed:
                continue
            first, end = _BLOCK * block, min(_BLOCK * (block + 1), rows)
            found = np.int64(UNLIMITED)
            part, has = load[first:end], room[first:end]
            for each in range(len(part)):  # without branches, for vector instructions
                found = min(found, part[each] | ((has[each] - needed) >> 63 & UNLIMITED))
            if found < least:
                row, least = first, found
                while load[row] != least or room[row] < needed:
                    row += 1
        if row < 0:
            continue
        room[row] = (room[row] if size[row] else limit) - needed
        row_of[unit] = row
        placed += needed
        load[row] += loads[unit]
        size[row] += 1
        block, first = row // _BLOCK, row // _BLOCK * _BLOCK
        least, most = np.int64(UNLIMITED), np.int64(0)
        part, has = load[first : min(first + _BLOCK, rows)], room[first : min(first + _BLOCK, rows)]
        for each in range(len(part)):
            least, most = min(least, part[each]), max(most, has[each])
        block_load[block], block_room[block] = least, most
    return placed


@compiled_without_arrays
def fill_closely(
    own: Any, overdue: int, rows: int, limit: int, row_of: Any, after: Any, before: Any, size: Any
) -> int:  # fmt: skip
    """Fill one row after the other with the largest units, and at the end with the one or two that leave least open.

    So rows of few units become full: in rows of 8,192 tokens, units of 2,000 to 3,500 tokens fill 95%, and 90% if each
    goes to the least loaded row. See `fill_evenly` for `own`, `limit` and `row_of`; the first `overdue` units were
    deferred often. `after` and `before` (units + 1,) are scratch memory; `size` is set to the number of units of rows.
    """
    end, late, placed = len(row_of), 0, np.int64(0)
    row_of[:] = -1
    # The units that have no row and aren't overdue are a list in both directions, closed by `end`.
    for unit in range(overdue, end + 1):
        after[unit], before[unit] = unit + 1, unit - 1
    after[end], before[overdue] = overdue, end
    for row in range(rows):
        room, size[row] = limit, 0
        while late < overdue and (size[row] == 0 or (overdue - late >= rows - row and own[late] <= room)):
            row_of[late] = row
            room -= own[late]
            late, size[row] = late + 1, size[row] + 1
        while after[end] < end and (size[row] == 0 or own[before[end]] <= room):
            one, two, last = after[end], end, before[end]
            if size[row]:
                one = _largest(own, row_of, after, one, last, room)
            if size[row] and room >= 2 * own[last] and (room < 3 * own[last] or room < 2 * own[one]):
                best, first = own[one], _largest(own, row_of, after, one, last, room - own[last])
                while first < last and best < room:
                    both = own[first] + own[last]
                    if best < both <= room:
                        best, one, two = both, first, last
                    if own[first] == own[last]:
                        break
                    if both <= room:
                        is_run = own[before[last]] == own[last]
                        last = before[_largest(own, row_of, after, first, last, own[last]) if is_run else last]
                    elif own[after[first]] == own[first]:
                        first = _largest(own, row_of, after, first, last, room - own[last])
                    else:
                        first = after[first]
            for unit in (one, two):
                if unit < end:
                    row_of[unit] = row
                    room -= own[unit]
                    size[row] += 1
                    after[before[unit]], before[after[unit]] = after[unit], before[unit]
        placed += limit - room
    return placed


@compiled_without_arrays
def _largest(own: Any, row_of: Any, after: Any, first: int, last: int, room: int) -> int:
    """The largest unit of at most `room` tokens among the units without a row from `first` to `last`, else `last`."""
    if own[first] <= room:
        return first
    high = last
    while first < high:
        middle = (first + high) // 2
        first, high = (first, middle) if own[middle] <= room else (middle + 1, high)
    while row_of[first] >= 0:  # its links are of the time when it got a row: shorten the way
        after[first] = after[after[first]] if row_of[after[first]] >= 0 else after[first]
        first = after[first]
    return first

"""Fills rows that leave much open, of one step or of several planned together: by exchanges, or packed anew."""

from __future__ import annotations

from typing import Any

import numpy as np

from tritonpack.packing.heuristics import compiled, compiled_without_arrays
from tritonpack.packing.planning.tournament import num_leaves

_CHOICES = 64  # deferred units that are looked at to exchange one of a row
_WIDE_OPEN = 128  # rows that leave more of a step open, as a divisor, are packed anew, if that gains as much
_LOW = 2**32 - 1


@compiled_without_arrays
def total(values: Any) -> int:
    """The sum of integers. numba takes longer to compile `values.sum()`."""
    found = np.int64(0)
    for value in values:
        found += value
    return found


@compiled_without_arrays
def placed_sum(amounts: Any, row_of: Any) -> int:
    """The sum over units that have a row."""
    found = np.int64(0)
    for unit in range(len(row_of)):
        if row_of[unit] >= 0:
            found += amounts[unit]
    return found


@compiled_without_arrays
def has_room(used: Any, row: int, others: Any, unit: int, budgets: Any) -> bool:
    """Whether a row has room for a unit in every resource but tokens."""
    fits = True
    if budgets is None:
        return fits
    for resource in range(len(budgets)):
        fits = fits and used[row, resource] + others[unit, resource] <= budgets[resource]
    return fits


@compiled_without_arrays
def use(used: Any, row: int, others: Any, unit: int, sign: int) -> None:
    """Add what a unit takes of each resource but tokens to a row, or take it away with sign -1."""
    if used is None:
        return
    for resource in range(used.shape[1]):
        used[row, resource] += sign * others[unit, resource]


@compiled
def fuller(
    lengths: Any, others: Any, amounts: Any, overdue: Any, row_of: Any, rows: int, fill: int, budgets: Any, full: int,
    taken: int,
) -> Any:  # fmt: skip
    """Rows that hold more of the scarcest resource than those of `row_of`, which may be changed.

    Args:
        lengths, others, amounts, overdue: (units, ...) from large to small.
        amounts, full: (units,) what units take of that resource, and what a row holds.
        taken: what rows hold now.
    """
    most = _most_tokens(lengths, rows, fill) if budgets is None else total(amounts)
    if taken == most:
        return row_of
    wide_open = rows * full // _WIDE_OPEN
    if taken < min(rows * full, most) - wide_open:
        if budgets is None:
            packed = _first_fit(lengths, overdue, rows, fill)
        else:
            packed = _match(lengths, others, overdue, rows, fill, budgets)
        held = placed_sum(amounts, packed)
        if held > taken and _every_row_holds(packed, rows):
            held += _exchange(lengths, others, amounts, overdue, packed, rows, fill, budgets, full)
            if held > taken + wide_open:
                return packed
    _exchange(lengths, others, amounts, overdue, row_of, rows, fill, budgets, full)
    return row_of


@compiled
def _every_row_holds(row_of: Any, rows: int) -> bool:
    """Whether each row holds a unit."""
    holds, empty = np.zeros(rows, dtype=np.int64), rows
    for row in row_of:
        if row >= 0:
            empty -= 1 - holds[row]
            holds[row] = 1
    return empty == 0


@compiled_without_arrays
def _most_tokens(lengths: Any, rows: int, fill: int) -> int:
    """Tokens that no packing of units into these rows exceeds.

    No row holds more units than the shortest ones that fit into it together, so at best the longest ones are so many
    per row.
    """
    per_row, tokens = 0, np.int64(0)
    while per_row < len(lengths):
        tokens += lengths[len(lengths) - 1 - per_row]
        if tokens > fill:
            break
        per_row += 1
    tokens = np.int64(0)
    for place in range(min(len(lengths), rows * max(1, per_row))):
        tokens += lengths[place]
    return tokens


@compiled
def _first_fit(lengths: Any, overdue: Any, rows: int, fill: int) -> Any:
    """Put each unit into the first row with room, overdue units first, and the largest first among both."""
    leaves = num_leaves(rows)
    # A tree as in tournament.py, in which each node holds the most room of the rows below it. It is searched only once
    # a begun row has room for a unit. Before, each unit begins the next row.
    room = np.zeros(2 * leaves, dtype=np.int64)
    room[leaves : leaves + rows] = fill
    begun, most_begun, searching = 0, np.int64(0), False  # begun rows, and the most room of one of them
    row_of = np.full(len(lengths), -1, dtype=np.int32)
    one = np.uint64(1)  # signed indices would be checked for negative ones
    for turn in (True, False):
        unit = 0
        while unit < len(lengths):
            length = lengths[unit]
            if not searching and most_begun >= length:
                searching = True
                for parent in range(leaves - 1, 0, -1):
                    room[parent] = max(room[2 * parent], room[2 * parent + 1])
            fits = room[1] >= length if searching else begun < rows and length <= fill
            if overdue[unit] != turn or not fits:
                unit += 1
                continue
            node = one
            if searching:
                while node < np.uint64(leaves):
                    node <<= one
                    node -= np.uint64((room[node] - length) >> 63)  # to the right, if the left one has no room
            else:
                node = np.uint64(leaves + begun)
                begun += 1
            most = room[node]
            # Following units of this length go there, too, while there is room.
            while unit < len(lengths) and lengths[unit] == length and most >= length:
                if overdue[unit] == turn:
                    row_of[unit] = np.int64(node) - leaves
                    most -= length
                unit += 1
            room[node] = most
            most_begun = max(most_begun, most)
            while searching and node > one:
                most = max(most, room[node ^ one])
                node >>= one
                if room[node] == most:
                    break
                room[node] = most
    return row_of


@compiled
def _match(lengths: Any, others: Any, overdue: Any, rows: int, fill: int, budgets: Any) -> Any:
    """Put each unit into the row whose room resembles it most; the order is that of `_first_fit`.

    The resemblance is the product of the unit's shares of a row and the row's open shares, summed over resources.
    """
    row_of = np.full(len(lengths), -1, dtype=np.int32)
    room = np.full(rows, fill, dtype=np.int64)
    used = np.zeros((rows, len(budgets)), dtype=np.int64)
    weights = 1.0 / budgets**2.0
    for turn in (True, False):
        for unit in range(len(lengths)):
            if overdue[unit] != turn:
                continue
            best, chosen = -1.0, np.int64(-1)
            for row in range(rows):
                if lengths[unit] <= room[row] and has_room(used, row, others, unit, budgets):
                    alike = lengths[unit] * room[row] / float(fill) ** 2
                    for resource in range(len(budgets)):
                        left = budgets[resource] - used[row, resource]
                        alike += float(others[unit, resource]) * left * weights[resource]
                    if alike > best:
                        best, chosen = alike, row
            if chosen >= 0:
                row_of[unit] = chosen
                room[chosen] -= lengths[unit]
                use(used, chosen, others, unit, np.int64(1))
    return row_of


@compiled
def _exchange(
    lengths: Any, others: Any, amounts: Any, overdue: Any, row_of: Any, rows: int, fill: int, budgets: Any, full: int
) -> int:
    """Exchange units of rows with room for deferred ones that take more of the scarcest resource; return the gain."""
    tokens, held_in = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)
    left = 0
    for unit in range(len(lengths)):
        row = row_of[unit]
        if row >= 0:
            tokens[row] += lengths[unit]
            held_in[row] += amounts[unit]
        else:
            left += 1
    if budgets is None and not _can_exchange(amounts, overdue, row_of, held_in, full):
        return np.int64(0)

    gained, add, take = np.int64(0), np.int64(1), np.int64(-1)
    used = others  # None without resources
    if budgets is not None:
        used = np.zeros((rows, len(budgets)), dtype=np.int64)
    first = np.zeros(rows + 2, dtype=np.int64)  # where the units of each row begin in `held`, from the second on
    out = np.empty(left, dtype=np.int64)  # deferred units, those first that take most
    left = 0
    for unit in range(len(lengths)):
        row = np.int64(row_of[unit])
        if row >= 0:
            first[row + 2] += 1
            use(used, row, others, unit, add)
        else:
            out[left] = (np.int64(2**31) - amounts[unit]) << 32 | unit
            left += 1
    if budgets is not None:  # otherwise they come in this order
        out.sort()
    for row in range(rows):
        first[row + 2] += first[row + 1]
    held = np.empty(len(lengths) - left, dtype=np.int64)
    for unit in range(len(lengths)):
        if row_of[unit] >= 0:
            held[first[row_of[unit] + 1]] = unit
            first[row_of[unit] + 1] += 1
    for row in range(rows):
        while held_in[row] < full:
            best = best_out = best_place = np.int64(0)
            for place in range(first[row], first[row + 1]):
                own = held[place]
                if overdue[own]:
                    continue
                most = amounts[own] + full - held_in[row]
                low, high = 0, left  # the first deferred unit that takes at most `most`
                while low < high:
                    middle = (low + high) // 2
                    if np.int64(2**31) - (out[middle] >> 32) > most:
                        low = middle + 1
                    else:
                        high = middle
                use(used, row, others, own, take)
                for turn in range(low, min(left, low + _CHOICES)):
                    new = out[turn] & _LOW
                    gain = amounts[new] - amounts[own]
                    if gain <= best:
                        break
                    if tokens[row] - lengths[own] + lengths[new] <= fill and has_room(used, row, others, new, budgets):
                        best, best_out, best_place = gain, turn, place
                        break
                use(used, row, others, own, add)
            if best == 0:
                break
            own, new = held[best_place], out[best_out] & _LOW
            row_of[new], row_of[own] = row, -1
            held[best_place] = new
            tokens[row] += lengths[new] - lengths[own]
            held_in[row] += best
            use(used, row, others, own, take)
            use(used, row, others, new, add)
            gained += best
            key = (np.int64(2**31) - amounts[own]) << 32 | own
            place = best_out
            while place + 1 < left and out[place + 1] < key:
                out[place] = out[place + 1]
                place += 1
            out[place] = key
    return gained


@compiled_without_arrays
def _can_exchange(amounts: Any, overdue: Any, row_of: Any, held_in: Any, full: int) -> bool:
    """Whether a row has room to exchange a unit for a deferred one that takes more.

    Args:
        amounts: (units,) descending.
        held_in, full: (rows,) what rows hold, and what a row may hold.
    """
    latest = above = full + amounts[0]  # what deferred units take: the latest one, and the next larger amount
    for unit in range(len(amounts)):
        row = row_of[unit]
        if row < 0:
            if amounts[unit] < latest:
                above = latest
            latest = amounts[unit]
        else:
            larger = latest if latest > amounts[unit] else above
            if larger - amounts[unit] <= full - held_in[row] and not overdue[unit]:
                return True
    return False

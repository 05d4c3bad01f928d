"""plan_steps: puts the units of an epoch into the rows of its steps.

Steps are planned in groups, one group after the other:

1. A group is offered a little more than it holds: first the units that earlier groups deferred, then the next ones of
   the shuffled stream. So a unit moves by few steps. Packing a whole epoch at once would destroy the order.
2. The largest units are placed first, each in the row with the least cost that has room. If the rows stay open, the
   first row with room is tried, then the row with the fewest tokens. Units that fit nowhere are deferred. Units that
   were deferred twice are placed before all others.
3. The rows are divided among the steps of the group, similar rows in one step, as long as the mean lengths of steps
   differ no more than by chance.
4. The costliest row of each step exchanges units with the cheapest ones.

Costs are integers, and the other sums are rounded alike everywhere, so every machine computes the same plan.

numba compiles a function once more for each literal number, so numbers are typed. It compiles loops in less time than
numpy's sums, maxima and assignments of whole arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tritonpack.packing.heuristics import compiled, compiled_without_arrays
from tritonpack.packing.planning.exchanges import SETS, UNLIMITED, level_rows

_PATIENCE = 2  # how often a unit may be deferred
_CLOSE = 2.0**-11  # the share of a group that its offer may lack
# Units of more than half a row that a group is offered, per row. A row takes one; of more, some would wait too long.
_HALVES = 1.25
_BEYOND = 0.1  # the largest share of a group that is passed over to complete its offer
_OPEN = 128  # rows that leave more of a group open, as a divisor, are filled one after the other, if that gains as much
_UNEVEN = 64  # rows that leave more of a group open, as a divisor, get equal tokens in place of equal costs
_BLOCK = 16  # rows that are searched together
_BITS = 31  # of the number of a unit or a row in sorted keys


@compiled
def plan_steps(
    takes: Any, costs: Any, limits: Any, last_limits: Any, ranks: int, lookahead: float, together: int, level: bool,
    last_step: int,
) -> Any:  # fmt: skip
    """The row of each unit, (units,) int64: `step * ranks + rank`.

    Args:
        takes: (units, resources) int64, what each unit takes, in the shuffled order; the first resource is tokens.
        costs: (units,) int64, at least 1.
        limits: (resources,) int64, what a row holds; a single unit may take more.
        last_limits: the same for the rows of `last_step`. No unit takes more.
        ranks: rows of a step.
        lookahead: the share of what it holds that a group is offered in addition.
        together: how many steps are planned as one group.
        level: a row takes no more units once it has its share of the group's cost, even if it has room.
        last_step: the step that is offered all remaining units.
    """
    count, resources = takes.shape
    rows_of = np.empty(count, dtype=np.int64)
    arrived = np.empty(count, dtype=np.int32)  # the group that read a unit from the stream
    pool = np.empty(count, dtype=np.int64)  # units that were read and not placed, in the order of the stream
    offered = np.empty(count, dtype=np.bool_)
    small = np.empty(count, dtype=np.int64)  # how much smaller than a row a unit is, by the resource it needs most
    left, offer = np.zeros(resources, np.int64), np.empty(resources, np.int64)
    sums = np.empty((3, resources), np.int64)
    for unit in range(count):
        rows_of[unit], small[unit] = -1, last_limits[0]
        for resource in range(resources):
            left[resource] += takes[unit, resource]
            share = -(-takes[unit, resource] * last_limits[0] // last_limits[resource])
            small[unit] = min(small[unit], last_limits[0] - share)
    # Scratch memory is used for every group anew, because small groups would take longer to allocate than to plan.
    of_units, every_own = np.empty((6, count + 257), np.int64), np.empty((count, resources), np.int64)
    of_rows, room = np.empty((10, 257), np.int64), np.empty((resources, 0), np.int64)
    sets = np.empty((2, 3 + resources, SETS), dtype=np.int64)
    none, unlimited, bits = np.int64(0), np.int64(UNLIMITED), np.int64(_BITS)
    done = waiting = cursor = group = step = none
    while done < count:
        last = step == last_step
        most = last_limits if last else limits
        steps = none  # that the remaining units fill
        for resource in range(resources):
            steps = max(steps, left[resource] // (ranks * most[resource]))
        steps = max(1, min(together, steps, last_step - step, waiting + count - cursor))
        rows = ranks * steps
        if room.shape[1] < rows:
            of_rows, room = np.empty((10, rows + 257), np.int64), np.empty((resources, rows), np.int64)
        for resource in range(resources):
            whole = rows * most[resource]
            offer[resource] = unlimited if last else whole + int(lookahead * whole)
        for final in (False, True):
            pooled, stop = _offer(takes, most, rows, offer, pool, offered, waiting, cursor, sums)
            for unit in range(cursor, stop):
                arrived[unit] = group
            keys, size, overdue = of_units[0], none, none
            for place in range(pooled):
                if offered[place]:
                    unit = pool[place]
                    late = group - arrived[unit] >= _PATIENCE
                    overdue += late
                    keys[size] = (small[unit] + (none if late else last_limits[0])) << bits | unit
                    size += 1
            _sort(keys, of_units[1], of_rows[0], size, 2 * last_limits[0])
            units, own, own_costs, row_of, other, after = (
                keys[:size], every_own[:size], of_units[1, :size], of_units[2, :size], of_units[3, :size],
                of_units[4, :size],
            )  # fmt: skip
            cost = dearest = none
            for resource in range(resources):
                sums[0, resource] = 0
            for place in range(size):
                unit = keys[place] & (1 << bits) - 1
                units[place], own_costs[place] = unit, costs[unit]
                cost += costs[unit]
                dearest = max(dearest, costs[unit])
                for resource in range(resources):
                    own[place, resource] = takes[unit, resource]
                    sums[0, resource] += takes[unit, resource]
            scarce = none  # the resource of which the offer has most, relative to what rows hold
            for resource in range(resources):
                if sums[0, resource] / most[resource] > sums[0, scarce] / most[scarce]:
                    scarce = resource
            held, whole = sums[0, scarce], rows * most[scarce]
            # The share of a row is the cost of a full row of units like these, or of the costliest unit. The end of an
            # epoch needs no limit.
            limited = level and (stop < count or held >= whole)
            share = max(int(cost / held * most[scarce]), dearest) if limited else unlimited
            used = _fill(own, own_costs, overdue, rows, most, share, row_of, room, of_rows)
            taken = _placed(own, row_of, scarce)
            if final or not limited or offer[scarce] <= taken + int(1.125 * lookahead * whole):
                break
            for resource in range(resources):  # rows that stop at their share hold less: offer as much
                offer[resource] = _placed(own, row_of, resource) + int(lookahead * rows * most[resource])
        waiting, cursor = pooled, stop
        # No row can be fuller if the smallest unit without a row takes more than half a row.
        unit, is_fuller = size - 1, False
        while unit >= 0 and row_of[unit] >= 0:
            unit -= 1
        is_open = not level and taken < min(held, whole) - whole // _OPEN
        if is_open and own[unit, scarce] <= most[scarce] // 2:
            for place in range(size):
                after[place] = none
            first_used = _fill(own, after, overdue, rows, most, share, other, room, of_rows)
            gained = _placed(own, other, scarce)
            is_fuller = first_used == rows and gained > taken + whole // _OPEN
            if is_fuller:
                row_of, taken, used = other, gained, rows
        is_uneven = not level and taken < whole - whole // _UNEVEN
        if is_uneven and not is_fuller:
            for place in range(size):
                after[place] = own[place, 0]
            even_used = _fill(own, after, overdue, rows, most, share, other, room, of_rows)
            if _placed(own, other, scarce) >= taken:
                row_of, used = other, even_used
        if steps > 1 and used == rows:  # else the last rows are empty
            _divide(own, own_costs, units, row_of, rows, ranks, is_uneven, of_rows)
        if ranks > 1:
            level_rows(own, own_costs, row_of, rows, ranks, most, level, room, of_rows, after, of_units[5], sets)
        for place in range(size):
            if row_of[place] >= 0:
                rows_of[units[place]] = step * ranks + row_of[place]
                done += 1
                for resource in range(resources):
                    left[resource] -= own[place, resource]
        kept = 0
        for place in range(waiting):
            pool[kept] = pool[place]
            kept += rows_of[pool[place]] < 0
        waiting, group, step = kept, group + 1, step + steps
    return rows_of


@compiled_without_arrays
def _offer(
    takes: Any, limits: Any, rows: int, most: Any, pool: Any, offered: Any, waiting: int, cursor: int, sums: Any
) -> tuple[int, int]:  # fmt: skip
    """Choose what a group is offered from the pool; units of the stream are added to the pool as needed.

    Units that would exceed the offer are passed over, so every group is offered the same number of tokens.

    Args:
        most: (resources,) what the offer doesn't exceed, except to give every row a unit.
        sums: (3, resources) int64, whose values don't matter.

    Returns:
        The number of units in the pool now, and the position up to which the stream is read.
    """
    held, passed, halves = sums[0], sums[1], sums[2]
    for resource in range(len(most)):
        held[resource] = passed[resource] = halves[resource] = 0
    complete = most[0] - int(_CLOSE * rows * limits[0])
    given = place = 0
    stopping = False  # too much was passed over, or too many are of more than half a row
    while place < waiting or cursor < len(takes):
        if place == waiting:
            if given >= rows and (held[0] >= complete or stopping):
                break
            pool[waiting] = cursor
            waiting, cursor = waiting + 1, cursor + 1
        unit = pool[place]
        fits = True
        for resource in range(len(most)):
            fits = fits and held[resource] + takes[unit, resource] <= most[resource]
        offered[place] = fits or given < rows
        given += offered[place]
        for resource in range(len(most)):
            if offered[place]:
                held[resource] += takes[unit, resource]
                halves[resource] += takes[unit, resource] > limits[resource] // 2
                stopping |= halves[resource] >= int(_HALVES * rows)
            else:
                passed[resource] += takes[unit, resource]
                stopping |= passed[resource] >= max(1, int(_BEYOND * rows * limits[resource]))
        place += 1
    return waiting, cursor


@compiled_without_arrays
def _fill(
    own: Any, loads: Any, overdue: int, rows: int, limits: Any, share: int, row_of: Any, room: Any, of_rows: Any
) -> int:  # fmt: skip
    """Put each unit into the first of the least loaded rows with room, and write its row, or -1, to `row_of`.

    Args:
        own: (units, resources) what units take: `overdue` units that were deferred often, and then all others, both
            from large to small.
        loads: (units,) at least 0.
        share: the load that a row doesn't exceed, except by an overdue unit, or by one alone in its row.
        room: (resources, rows or more) and `of_rows`, whose values don't matter.

    Returns:
        The number of rows that hold a unit.
    """
    load, size, masked, least_load, most_room = of_rows[0], of_rows[1], of_rows[2], of_rows[3], of_rows[4]  # of blocks
    used = np.int64(0)
    for row in range(rows):
        load[row] = size[row] = least_load[row // _BLOCK] = 0
        most_room[row // _BLOCK] = UNLIMITED
        for resource in range(len(limits)):
            room[resource, row] = UNLIMITED  # of an empty row, which takes any unit
    for unit in range(len(loads)):
        row_of[unit], row, least = -1, -1, np.int64(UNLIMITED)
        for first in range(0, rows, _BLOCK):
            if least_load[first // _BLOCK] >= least or most_room[first // _BLOCK] < own[unit, 0]:
                continue
            end, found = min(first + _BLOCK, rows), np.int64(UNLIMITED)
            part = masked[first:end]
            for resource in range(len(limits)):  # without branches, for vector instructions
                before, free = part if resource else load[first:end], room[resource, first:end]
                needed, found = own[unit, resource], np.int64(UNLIMITED)
                for each in range(len(part)):
                    part[each] = before[each] | ((free[each] - needed) >> 63 & UNLIMITED)
                    found = min(found, part[each])
            if found < least:
                row, least = first, found
        if row < 0:
            continue
        while masked[row] != least:
            row += 1
        if unit >= overdue and size[row] and least + loads[unit] > share:
            continue
        for resource in range(len(limits)):
            room[resource, row] = (room[resource, row] if size[row] else limits[resource]) - own[unit, resource]
        row_of[unit] = row
        used += size[row] == 0
        load[row] += loads[unit]
        size[row] += 1
        block, least, has = row // _BLOCK, np.int64(UNLIMITED), np.int64(0)
        for each in range(block * _BLOCK, min(block * _BLOCK + _BLOCK, rows)):
            least, has = min(least, load[each]), max(has, room[0, each])
        least_load[block], most_room[block] = least, has
    return used


@compiled_without_arrays
def _placed(own: Any, row_of: Any, resource: int) -> int:
    """What the units that have a row take of a resource."""
    found = np.int64(0)
    for unit in range(len(row_of)):
        if row_of[unit] >= 0:
            found += own[unit, resource]
    return found


@compiled_without_arrays
def _divide(
    own: Any, costs: Any, units: Any, row_of: Any, rows: int, ranks: int, by_tokens: bool, of_rows: Any
) -> None:  # fmt: skip
    """Divide the rows of a group among its steps, in place.

    Similar rows in one step have similar costs, but make steps of long units and steps of short ones. So rows are
    ordered by their loads and by their places in the stream, the loads with less and less weight, until the mean
    lengths of steps differ no more than by chance. If they still do without that weight, each step gets as many rows of
    each range of loads, of more and more ranges. The place of a row is the place of one of its units, drawn by a hash:
    a mean place would collect rows of many units in the middle.

    Args:
        by_tokens: the load is tokens, because all ranks wait for the fullest row of a step; otherwise it is the cost.
    """
    load, size, tokens, place = of_rows[0, :rows], of_rows[1, :rows], of_rows[2, :rows], of_rows[3, :rows]
    step_of, keys, spare, sums = of_rows[4, :rows], of_rows[5], of_rows[6], of_rows[7:]
    drawn = step_of
    for row in range(rows):
        load[row] = size[row] = tokens[row] = drawn[row] = 0
    placed = total = most = last = np.int64(0)
    squares = 0.0
    for unit in range(len(units)):
        row = row_of[unit]
        if row >= 0:
            placed += 1
            total += own[unit, 0]
            squares += float(own[unit, 0]) * own[unit, 0]
            size[row] += 1
            tokens[row] += own[unit, 0]
            load[row] += own[unit, 0] if by_tokens else costs[unit]
            most = max(most, load[row])
            hashed = (units[unit] * 2654435761) % 2**32
            if hashed >= drawn[row]:
                drawn[row], place[row] = hashed, units[unit]
            last = max(last, units[unit])
    steps, mean, bits, low = rows // ranks, total / placed, np.int64(_BITS), (1 << _BITS) - 1
    variance = squares / placed - mean * mean
    while most >> 62 - _BITS:
        most >>= 1
        for row in range(rows):
            load[row] >>= 1
    for values in (place, load):  # become the places of rows in the order of these values
        for row in range(rows):
            keys[row] = values[row] << bits | row
        _sort(keys, spare, sums[0], rows, max(most, last))
        for number in range(rows):
            values[keys[number] & low] = number
    weight, strata = 32, 1
    while True:
        for row in range(rows):
            value = load[row] // steps * strata // ranks if strata > 1 else 8 * place[row] + weight * load[row]
            keys[place[row]] = value << bits | row
        _sort(keys, spare, sums[0], rows, 40 * rows)
        for number in range(rows):
            stratum = keys[number] >> bits if strata > 1 else np.int64(0)
            first, last = -(-stratum * ranks // strata) * steps, -(-(stratum + 1) * ranks // strata) * steps
            step_of[keys[number] & low] = (number - first) * steps // (last - first)
        for step in range(steps):
            sums[0, step] = sums[1, step] = sums[2, step] = 0
        for row in range(rows):
            sums[0, step_of[row]] += tokens[row]
            sums[1, step_of[row]] += size[row]
            sums[2, step_of[row]] += place[row]
        between = chance = 0.0  # the variance of the steps' mean lengths, as a sum over steps: as it is, and by chance
        for step in range(steps):
            between += (sums[0, step] / sums[1, step] - mean) ** 2
            chance += variance / sums[1, step]
        if strata == ranks or between <= chance * (steps - 1) / steps:
            break
        weight, strata = weight // 4, strata if weight else min(4 * strata, ranks)
    for step in range(steps):  # steps come in the order of the stream, too
        keys[step] = sums[2, step] << bits | step
    _sort(keys, spare, sums[0], steps, rows * rows)
    for number in range(steps):
        sums[1, keys[number] & low] = number * ranks
    for row in range(rows):
        place[row] = sums[1, step_of[row]]
        sums[1, step_of[row]] += 1
    for unit in range(len(units)):
        if row_of[unit] >= 0:
            row_of[unit] = place[row_of[unit]]


@compiled_without_arrays
def _sort(keys: Any, spare: Any, starts: Any, count: int, most: int) -> None:
    """Sort the first `count` keys, byte by byte from bit `_BITS` on, in place. They must ascend below that bit.

    Args:
        spare, starts: (count or more,) and (257 or more,) int64, whose values don't matter.
        most: at least the largest `key >> _BITS`.
    """
    turns, shift = 0, np.int64(_BITS)
    while most:
        for value in range(257):
            starts[value] = 0
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

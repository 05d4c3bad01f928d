"""plan_steps: puts the units of an epoch into the rows of its steps.

Steps are planned in groups, one group after the other:

1. A group is offered a little more than it holds: first the units that earlier groups deferred, then the next ones of
   the shuffled stream. So a unit moves by few steps. Packing a whole epoch at once would destroy the order.
2. The largest units are placed first, each in the row with the least cost that has room. If the rows stay open, they
   are filled closely, one after the other; if that doesn't help, rows with the fewest tokens come first. Units that
   fit nowhere are deferred. Units that were deferred twice are placed before all others.
3. The rows are divided among the steps of the group, similar rows in one step, as long as the mean lengths of steps
   differ no more than by chance.
4. The costliest row of each step exchanges units with the cheapest ones.

Costs are integers, and the other sums are rounded alike everywhere, so every machine computes the same plan.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tritonpack.packing.heuristics import compiled, compiled_without_arrays, sort_by_bytes
from tritonpack.packing.planning.filling import UNLIMITED, fill_closely, fill_evenly

_PATIENCE = 2  # how often a unit may be deferred
_CLOSE = 2.0**-11  # the share of a group that its offer may lack
# Units of more than half a row that a group is offered, per row. A row takes one; of more, some would wait too long.
_HALVES = 1.25
_BEYOND = 0.1  # the largest share of a group that is passed over to complete its offer
_OPEN = 128  # rows that leave more of a group open, as a divisor, are filled closely, if that gains as much
_UNEVEN = 64  # rows whose fullest one is so much fuller than their mean, as a divisor, are filled by tokens
_BITS = 31  # of the number of a unit
_ROW_BITS = 26  # of the number of a row
_TOLERANCE = 2.0**-11  # the gap between the costs of two rows, relative to the larger one, that counts as none
_PARTNERS = 3  # the cheapest rows, with which the costliest one tries to exchange units
_OFFERED = 12  # units that a row offers, spread from its largest to its smallest
_SETS = 1 + _OFFERED * (_OFFERED + 1) // 2  # of none, one or two of them


@compiled
def plan_steps(
    takes: Any, costs: Any, kinds: Any, limits: Any, last_limits: Any, ranks: int, lookahead: float, together: int,
    level: bool, last_step: int,
) -> Any:  # fmt: skip
    """The row of each unit, (units,) int64: `step * ranks + rank`.

    Args:
        takes: (units, resources) int64, what each unit takes, in the shuffled order; the first resource is tokens.
        costs: (units,) int64, at least 1.
        kinds: (units,) int64 below 2**30; larger units have smaller kinds.
        limits: (resources,) int64, what a row holds; a single unit may take more.
        last_limits: the same for the rows of `last_step`.
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
    offer, left, sums = np.empty(resources, np.int64), np.zeros(resources, np.int64), np.empty((3, resources), np.int64)
    largest = np.int64(0)
    # Loops, because numpy's sums, maxima and assignments of whole arrays take numba five seconds more to compile.
    for unit in range(count):
        rows_of[unit] = -1
        largest = max(largest, kinds[unit])
        for resource in range(resources):
            left[resource] += takes[unit, resource]
    # Scratch memory is used for every group anew, because small groups would take longer to allocate than to plan.
    of_units = np.empty((7, max(count + 1, 257)), dtype=np.int64)
    every_own = np.empty((count, resources), dtype=np.int64)
    of_rows, room = np.empty((11, 257), dtype=np.int64), np.empty((resources, 0), dtype=np.int64)
    sets = np.empty((2, 4, _SETS), dtype=np.int64)
    # numba compiles a function once more for each literal number, so numbers are typed.
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
            of_rows, room = np.empty((11, rows + 257), np.int64), np.empty((resources, rows), np.int64)
        for resource in range(resources):
            whole = rows * most[resource]
            offer[resource] = UNLIMITED if last else whole + int(lookahead * whole)
        for final in (False, True):
            pooled, stop = _offer(takes, most, rows, offer, pool, offered, waiting, cursor, sums)
            arrived[cursor:stop] = group
            keys, size, overdue = of_units[0], none, none
            for place in range(pooled):
                if offered[place]:
                    unit = pool[place]
                    late = group - arrived[unit] >= _PATIENCE
                    overdue += late
                    keys[size] = (kinds[unit] + (none if late else largest + 1)) << _BITS | unit
                    size += 1
            sort_by_bytes(keys, of_units[1], of_rows[0], size, bits, 2 * largest + 1)
            units, own, own_costs, row_of, other = (
                keys[:size], every_own[:size], of_units[1, :size], of_units[2, :size], of_units[3, :size]
            )  # fmt: skip
            sums[0] = 0
            cost = dearest = none
            for place in range(size):
                unit = keys[place] & (1 << _BITS) - 1
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
            fill_evenly(own, own_costs, overdue, rows, most, share, row_of, room, of_rows)
            taken = _placed(own, row_of, scarce)
            if final or not limited or offer[scarce] <= taken + int(1.125 * lookahead * whole):
                break
            for resource in range(resources):  # rows that stop at their share hold less: offer as much
                offer[resource] = _placed(own, row_of, resource) + int(lookahead * rows * most[resource])
        waiting, cursor = pooled, stop
        fuller = False
        open_rows = not level and taken < min(held, whole) - whole // _OPEN
        if open_rows and (resources > 1 or _least_deferred(own, row_of) <= most[0] // 2):
            if resources > 1:
                loads = of_units[4, :size]
                loads[:] = 0
                fill_evenly(own, loads, overdue, rows, most, share, other, room, of_rows)
            else:
                fill_closely(own, overdue, rows, most[0], other, of_units[4], of_units[5], of_rows[1])
            gained = _placed(own, other, scarce)
            fuller = gained > taken + whole // _OPEN and _extremes(of_rows[1], rows)[0] > 0
            if fuller:
                row_of, taken = other, gained
        uneven = not level and taken < whole - whole // _UNEVEN
        if uneven and not fuller:
            loads = of_units[4, :size]
            for place in range(size):
                loads[place] = own[place, 0]
            fill_evenly(own, loads, overdue, rows, most, share, other, room, of_rows)
            if _placed(own, other, scarce) >= taken:
                row_of = other
        if steps > 1:
            _divide(own, own_costs, units, row_of, rows, ranks, uneven, of_rows)
        if ranks > 1:
            _level(own, own_costs, row_of, rows, ranks, most, level, room, of_rows, of_units, sets)
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
    sums[:] = 0
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
def _extremes(values: Any, count: int) -> tuple[int, int]:
    """The least and the largest of the first `count` values."""
    least = most = values[0]
    for place in range(1, count):
        least, most = min(least, values[place]), max(most, values[place])
    return least, most


@compiled_without_arrays
def _placed(own: Any, row_of: Any, resource: int) -> int:
    """What the units that have a row take of a resource."""
    found = np.int64(0)
    for unit in range(len(row_of)):
        if row_of[unit] >= 0:
            found += own[unit, resource]
    return found


@compiled_without_arrays
def _least_deferred(own: Any, row_of: Any) -> int:
    """The tokens of the smallest unit without a row.

    If they are more than half a row, short units all have rows, and each row holds a long one: no row can be fuller.
    """
    unit = len(row_of) - 1
    while row_of[unit] >= 0:
        unit -= 1
    return own[unit, 0]


@compiled_without_arrays
def _divide(
    own: Any, costs: Any, units: Any, row_of: Any, rows: int, ranks: int, uneven: bool, of_rows: Any
) -> None:  # fmt: skip
    """Divide the rows of a group among its steps, in place.

    Similar rows in one step have similar costs, but make steps of long units and steps of short ones. So divisions are
    tried in this order, until the mean lengths of steps differ no more than by chance: first rows of like load share a
    step, then more and more rows of like places in the stream, at last each step gets equally many rows of each range
    of loads. A row's place is the place of one of its units, drawn by a hash: a mean place would collect rows of many
    units in the middle.

    Args:
        uneven: the load is tokens, because all ranks wait for the fullest row of a step; otherwise it is the cost.
    """
    load, size, tokens, place, number_of = of_rows[0], of_rows[1], of_rows[2], of_rows[3], of_rows[4]
    by_load, drawn, keys, spare, starts = of_rows[5], of_rows[5], of_rows[6], of_rows[7], of_rows[8]
    sums = of_rows[9:]
    load[:rows] = size[:rows] = tokens[:rows] = 0
    drawn[:rows] = -1
    placed = total = np.int64(0)
    squares = 0.0
    for unit in range(len(units)):
        row = row_of[unit]
        if row >= 0:
            placed += 1
            total += own[unit, 0]
            size[row] += 1
            tokens[row] += own[unit, 0]
            load[row] += own[unit, 0] if uneven else costs[unit]
            squares += float(own[unit, 0]) * own[unit, 0]
            hashed = (units[unit] * 2654435761) % 2**32
            if hashed > drawn[row]:
                drawn[row], place[row] = hashed, units[unit]
    if _extremes(size, rows)[0] == 0:  # fewer units than rows: the last rows are empty
        return
    steps, mean = rows // ranks, total / placed
    variance = squares / placed - mean * mean
    bits, low, shift = np.int64(_ROW_BITS), (1 << _ROW_BITS) - 1, 0
    while _extremes(load, rows)[1] >> shift >= 2 ** (62 - _ROW_BITS):
        shift += 1
    for turn in range(2):  # both become places in the order of rows by their values
        values = load if turn else place
        for row in range(rows):
            keys[row] = (values[row] >> shift * turn) << bits | row
        sort_by_bytes(keys, spare, starts, rows, bits, _extremes(values, rows)[1] >> shift * turn)
        for number in range(rows):
            by_load[number] = keys[number] & low
            values[by_load[number]] = number
    strata, weight = 1, 32
    while True:
        for stratum in range(strata):
            first, last = stratum * ranks // strata * steps, (stratum + 1) * ranks // strata * steps
            for number in range(first, last):
                keys[number] = (8 * place[by_load[number]] + weight * number) << bits | number
            sort_by_bytes(keys[first:last], spare, starts, last - first, bits, np.int64(40 * rows))
            for number in range(first, last):
                number_of[by_load[keys[number] & low]] = (number - first) * steps // (last - first)
        between = chance = 0.0  # the variance of the steps' mean lengths, as a sum over steps: as it is, and by chance
        sums[:, :steps] = 0
        for row in range(rows):
            sums[0, number_of[row]] += tokens[row]
            sums[1, number_of[row]] += size[row]
        for step in range(steps):
            between += (sums[0, step] / sums[1, step] - mean) ** 2
            chance += variance / sums[1, step]
        if between <= chance * (steps - 1) / steps or strata == ranks:
            break
        strata, weight = (strata, weight // 4) if weight else (min(4 * strata, ranks), 0)
    # Steps come in the order of the stream, too.
    sums[0, :steps] = 0
    for row in range(rows):
        sums[0, number_of[row]] += place[row]
    for step in range(steps):
        keys[step] = sums[0, step] << bits | step
    sort_by_bytes(keys, spare, starts, steps, bits, _extremes(sums[0], steps)[1])
    for number in range(steps):
        sums[1, keys[number] & low] = number * ranks
    for row in range(rows):
        step = number_of[row]
        number_of[row] = sums[1, step]
        sums[1, step] += 1
    for unit in range(len(units)):
        if row_of[unit] >= 0:
            row_of[unit] = number_of[row_of[unit]]


@compiled_without_arrays
def _level(
    own: Any, costs: Any, row_of: Any, rows: int, ranks: int, limits: Any, level: bool, room: Any, of_rows: Any,
    of_units: Any, sets: Any,
) -> None:  # fmt: skip
    """Exchange units between rows of each step until their costs are about equal, in place."""
    cost, head, by_cost = of_rows[0], of_rows[1], of_rows[2]
    after = of_units[5]  # the units of a row are a list, from large to small
    for row in range(rows):
        cost[row], head[row] = 0, -1
        for resource in range(len(limits)):
            room[resource, row] = limits[resource]
    for unit in range(len(costs) - 1, -1, -1):
        row = row_of[unit]
        if row >= 0:
            after[unit], head[row] = head[row], unit
            cost[row] += costs[unit]
            for resource in range(len(limits)):
                room[resource, row] -= own[unit, resource]
    for first in range(0, rows, ranks):
        if not level:  # no row gets fuller than the fullest one
            least = np.int64(UNLIMITED)
            for row in range(first, first + ranks):
                least = min(least, room[0, row])
            for row in range(first, first + ranks):
                room[0, row] -= least
        for place in range(ranks):
            by_cost[place] = first + place
        for _ in range(ranks):
            for place in range(1, ranks):  # by insertion: after an exchange few move
                row, hole = by_cost[place], place
                while hole and cost[by_cost[hole - 1]] > cost[row]:
                    by_cost[hole] = by_cost[hole - 1]
                    hole -= 1
                by_cost[hole] = row
            dear, partner = by_cost[ranks - 1], 0
            while partner < min(_PARTNERS, ranks - 1) and not _exchange(
                own, costs, row_of, dear, by_cost[partner], room, cost, head, after, of_units[6], sets
            ):
                partner += 1
            if partner == min(_PARTNERS, ranks - 1):
                break


@compiled_without_arrays
def _exchange(
    own: Any, costs: Any, row_of: Any, dear: int, cheap: int, room: Any, cost: Any, head: Any, after: Any, chosen: Any,
    sets: Any,
) -> bool:  # fmt: skip
    """Exchange up to two units of each of two rows so that their costs are as close as possible, if that gains."""
    gap = cost[dear] - cost[cheap]
    if gap <= _TOLERANCE * cost[dear]:
        return False
    # Of each set of one side: its first and its second unit or -1, its tokens, its cost.
    mine, theirs = sets
    num_mine = _make_sets(head[dear], after, own, costs, chosen, mine)
    num_theirs = _make_sets(head[cheap], after, own, costs, chosen, theirs)
    best, give, take = gap, -1, -1
    tokens_of, cost_of, most, least = theirs[2], theirs[3], max(room[0, cheap], 0), max(room[0, dear], 0)
    for one in range(num_mine):
        rest = gap - 2 * mine[3, one]  # the gap if the row gets nothing
        if rest >= best:
            continue
        for other in range(num_theirs):
            distance = abs(rest + 2 * cost_of[other])
            if distance < best and -least <= mine[2, one] - tokens_of[other] <= most:
                fits = True
                for resource in range(1, len(room)):
                    moved = _of_set(own, mine, one, resource) - _of_set(own, theirs, other, resource)
                    fits = fits and -room[resource, dear] <= moved <= room[resource, cheap]
                if fits:
                    best, give, take = distance, one, other
        if best <= gap >> 3:
            break
    if give < 0:
        return False
    for row, to, side, number in ((dear, cheap, mine, give), (cheap, dear, theirs, take)):
        for member in range(2):
            unit = side[member, number]
            if unit >= 0:
                row_of[unit] = to
                cost[row] -= costs[unit]
                cost[to] += costs[unit]
                for resource in range(len(room)):
                    room[resource, row] += own[unit, resource]
                    room[resource, to] -= own[unit, resource]
    # The lists of both rows are merged and divided anew.
    one, other, last_dear, last_cheap = head[dear], head[cheap], -1, -1
    while one >= 0 or other >= 0:
        if other < 0 or 0 <= one < other:
            unit, one = one, after[one]
        else:
            unit, other = other, after[other]
        is_dear = row_of[unit] == dear
        last = last_dear if is_dear else last_cheap
        if last < 0:
            head[row_of[unit]] = unit
        else:
            after[last] = unit
        after[unit] = -1
        last_dear, last_cheap = (unit, last_cheap) if is_dear else (last_dear, unit)
    return True


@compiled_without_arrays
def _make_sets(unit: int, after: Any, own: Any, costs: Any, chosen: Any, sets: Any) -> int:
    """Write the sets of up to two units that a row offers to `sets`; return their number.

    Args:
        unit: the first of the row.
        chosen: (units,) int64, whose values don't matter.
    """
    count = 0
    while unit >= 0:  # of a cost only two
        if count < 2 or costs[chosen[count - 2]] != costs[unit]:
            chosen[count] = unit
            count += 1
        unit = after[unit]
    offers = min(count, _OFFERED)
    sets[0, 0] = sets[1, 0] = -1
    sets[2, 0] = sets[3, 0] = 0
    found = 1
    for first in range(offers):
        one = chosen[first * count // offers]
        for second in range(first, offers):
            other = chosen[second * count // offers] if second > first else -1
            sets[0, found], sets[1, found] = one, other
            sets[2, found] = own[one, 0] + (own[other, 0] if second > first else 0)
            sets[3, found] = costs[one] + (costs[other] if second > first else 0)
            found += 1
    return found


@compiled_without_arrays
def _of_set(own: Any, side: Any, number: int, resource: int) -> int:
    """What a set of units takes of a resource."""
    first, second = side[0, number], side[1, number]
    return (own[first, resource] if first >= 0 else 0) + (own[second, resource] if second >= 0 else 0)

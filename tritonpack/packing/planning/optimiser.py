"""plan_steps: puts the units of an epoch into the rows of its steps, one group of steps after the other.

1. A group is offered a little more than it holds: first the units that earlier groups deferred, then the next ones of
   the shuffled stream. So a unit moves by few steps.
2. The largest units are placed first, each in the row with the least load that has room. If the rows stay open, they
   are filled closely, one after the other; if that doesn't help, rows with the fewest tokens come first. Units that
   fit nowhere are deferred.
3. The rows are divided among the steps of the group, similar rows in one step, as long as the mean lengths of steps
   differ no more than by chance.
4. The costliest row of each step exchanges units with the cheapest ones.

Costs are integers, and the other sums are rounded alike everywhere, so every machine computes the same plan.
docs/decisions/planner.md has the reasons.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tritonpack.packing.heuristics import compiled, compiled_without_arrays, sort_by_bytes
from tritonpack.packing.planning.filling import UNLIMITED, fill_closely, fill_evenly

_PATIENCE = 2  # how often a unit may be deferred
_LOOKAHEAD = 0.01  # the share of its tokens that a group is offered in addition
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
    tokens: Any, costs: Any, kinds: Any, limit: int, last_limit: int, ranks: int, together: int, last_step: int
) -> Any:  # fmt: skip
    """The row of each unit, (units,) int64: `step * ranks + rank`.

    Args:
        tokens, costs, kinds: (units,) int64 in the shuffled order; costs are at least 1, and kinds below 2**30. Larger
            units have smaller kinds.
        limit, last_limit: tokens that a row holds, and a row of `last_step`; a single unit may have more.
        ranks: rows of a step.
        together: how many steps are planned as one group.
        last_step: the step that is offered all remaining units.
    """
    count = len(tokens)
    rows_of = np.empty(count, dtype=np.int64)
    arrived = np.empty(count, dtype=np.int32)  # the group that read a unit from the stream
    pool = np.empty(count, dtype=np.int64)  # units that were read and not placed, in the order of the stream
    offered = np.empty(count, dtype=np.bool_)
    largest = left = np.int64(0)
    # Loops, because numpy's sums, maxima and assignments of whole arrays take numba five seconds more to compile.
    for unit in range(count):
        rows_of[unit] = -1
        largest = max(largest, kinds[unit])
        left += tokens[unit]
    # Scratch memory is used for every group anew, because small groups would take longer to allocate than to plan.
    of_units = np.empty((8, max(count + 1, 257)), dtype=np.int64)
    of_rows = np.empty((12, 257), dtype=np.int64)
    sets = np.empty((2, 4, _SETS), dtype=np.int64)
    # numba compiles a function once more for each literal number, so numbers are typed.
    none, bits = np.int64(0), np.int64(_BITS)
    done = waiting = cursor = group = step = none
    while done < count:
        last = step == last_step
        most = last_limit if last else limit
        steps = max(1, min(together, left // (ranks * most), last_step - step, waiting + count - cursor))
        rows = ranks * steps
        if of_rows.shape[1] < rows + 257:
            of_rows = np.empty((12, rows + 257), np.int64)
        whole = rows * most
        offer = np.int64(UNLIMITED) if last else whole + int(_LOOKAHEAD * whole)
        waiting, stop = _offer(tokens, most, rows, offer, pool, offered, waiting, cursor)
        arrived[cursor:stop] = group
        cursor = stop
        keys, size, overdue = of_units[0], none, none
        for place in range(waiting):
            if offered[place]:
                unit = pool[place]
                late = group - arrived[unit] >= _PATIENCE
                overdue += late
                keys[size] = (kinds[unit] + (none if late else largest + 1)) << _BITS | unit
                size += 1
        sort_by_bytes(keys, of_units[1], of_rows[0], size, bits, 2 * largest + 1)
        units, own, own_costs, row_of, other = (
            keys[:size], of_units[7, :size], of_units[1, :size], of_units[2, :size], of_units[3, :size]
        )  # fmt: skip
        held = none
        for place in range(size):
            unit = keys[place] & (1 << _BITS) - 1
            units[place], own[place], own_costs[place] = unit, tokens[unit], costs[unit]
            held += tokens[unit]
        taken = fill_evenly(own, own_costs, rows, most, row_of, of_rows)
        fuller = False
        open_rows = taken < min(held, whole) - whole // _OPEN
        if open_rows and _least_deferred(own, row_of) <= most // 2:
            gained = fill_closely(own, overdue, rows, most, other, of_units[4], of_units[5], of_rows[1])
            fuller = gained > taken + whole // _OPEN and _extremes(of_rows[1], rows)[0] > 0
            if fuller:
                row_of, taken = other, gained
        uneven = taken < whole - whole // _UNEVEN
        if uneven and not fuller and fill_evenly(own, own, rows, most, other, of_rows) >= taken:
            row_of = other
        if steps > 1:
            _divide(own, own_costs, units, row_of, rows, ranks, uneven, of_rows)
        if ranks > 1:
            _level(own, own_costs, row_of, rows, ranks, most, of_rows, of_units, sets)
        for place in range(size):
            if row_of[place] >= 0:
                rows_of[units[place]] = step * ranks + row_of[place]
                done += 1
                left -= own[place]
        kept = 0
        for place in range(waiting):
            pool[kept] = pool[place]
            kept += rows_of[pool[place]] < 0
        waiting, group, step = kept, group + 1, step + steps
    return rows_of


@compiled_without_arrays
def _offer(
    tokens: Any, limit: int, rows: int, most: int, pool: Any, offered: Any, waiting: int, cursor: int
) -> tuple[int, int]:  # fmt: skip
    """Choose what a group is offered from the pool; units of the stream are added to the pool as needed.

    Units that would exceed `most` tokens are passed over, except to give every row a unit.

    Returns:
        The number of units in the pool now, and the position up to which the stream is read.
    """
    complete = most - int(_CLOSE * rows * limit)
    held = passed = halves = given = place = 0
    stopping = False  # too much was passed over, or too many are of more than half a row
    while place < waiting or cursor < len(tokens):
        if place == waiting:
            if given >= rows and (held >= complete or stopping):
                break
            pool[waiting] = cursor
            waiting, cursor = waiting + 1, cursor + 1
        own = tokens[pool[place]]
        offered[place] = held + own <= most or given < rows
        if offered[place]:
            given += 1
            held += own
            halves += own > limit // 2
            stopping |= halves >= int(_HALVES * rows)
        else:
            passed += own
            stopping |= passed >= max(1, int(_BEYOND * rows * limit))
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
def _least_deferred(own: Any, row_of: Any) -> int:
    """The tokens of the smallest unit without a row. If they are more than half a row, no row can be fuller."""
    unit = len(row_of) - 1
    while row_of[unit] >= 0:
        unit -= 1
    return own[unit]


@compiled_without_arrays
def _divide(
    own: Any, costs: Any, units: Any, row_of: Any, rows: int, ranks: int, uneven: bool, of_rows: Any
) -> None:  # fmt: skip
    """Divide the rows of a group among its steps, in place.

    Similar rows in one step have similar costs, but make steps of long units and steps of short ones. So divisions are
    tried in this order, until the mean lengths of steps differ no more than by chance: first rows of like load share a
    step, then more and more rows of like places in the stream, at last each step gets equally many rows of each range
    of loads. A row's place is the place of one of its units, drawn by a hash. The load is the cost, or the tokens of
    `uneven` rows.
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
            total += own[unit]
            size[row] += 1
            tokens[row] += own[unit]
            load[row] += own[unit] if uneven else costs[unit]
            squares += float(own[unit]) * own[unit]
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
    own: Any, costs: Any, row_of: Any, rows: int, ranks: int, limit: int, of_rows: Any, of_units: Any, sets: Any
) -> None:  # fmt: skip
    """Exchange units between rows of each step until their costs are about equal, in place."""
    cost, head, by_cost, room = of_rows[0], of_rows[1], of_rows[2], of_rows[11]
    after = of_units[5]  # the units of a row are a list, from large to small
    for row in range(rows):
        cost[row], head[row], room[row] = 0, -1, limit
    for unit in range(len(costs) - 1, -1, -1):
        row = row_of[unit]
        if row >= 0:
            after[unit], head[row] = head[row], unit
            cost[row] += costs[unit]
            room[row] -= own[unit]
    for first in range(0, rows, ranks):
        least = np.int64(UNLIMITED)
        for row in range(first, first + ranks):
            least = min(least, room[row])
        for row in range(first, first + ranks):  # no row gets fuller than the fullest one
            room[row] -= least
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
    tokens_of, cost_of, most, least = theirs[2], theirs[3], max(room[cheap], 0), max(room[dear], 0)
    for one in range(num_mine):
        rest = gap - 2 * mine[3, one]  # the gap if the row gets nothing
        if rest >= best:
            continue
        for other in range(num_theirs):
            distance = abs(rest + 2 * cost_of[other])
            if distance < best and -least <= mine[2, one] - tokens_of[other] <= most:
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
                room[row] += own[unit]
                room[to] -= own[unit]
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
    """Write the sets of up to two units that a row offers to `sets`; return their number. `unit` is the row's first."""
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
            sets[2, found] = own[one] + (own[other] if second > first else 0)
            sets[3, found] = costs[one] + (costs[other] if second > first else 0)
            found += 1
    return found

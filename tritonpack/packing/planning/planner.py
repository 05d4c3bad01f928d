"""Chooses the units of each step of an epoch, one step after the other, and fills its rows at about equal costs.

The planner offers each step a little more than it holds: first the units that earlier steps deferred, then the next
ones of the shuffled stream. It passes over units that would exceed the offer, so every step is offered the same number
of tokens, and no more of any other resource than it holds. The largest units of the offer are placed first, each in the
cheapest row with room. The units that fit nowhere are deferred to the next step. Units that were deferred twice are
placed before all others. So a unit moves by two steps at most. Packing a whole epoch at once would destroy the order.

Rows that aren't full then exchange units for larger ones that would be deferred. If they still leave much open, the
offer is packed anew: by first-fit, or, if units take several resources, each unit into the row whose room resembles it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tritonpack.packing.heuristics import compiled, compiled_without_arrays, sort_by_bytes
from tritonpack.packing.planning.filling import fuller, has_room, placed_sum, total, use
from tritonpack.packing.planning.tournament import UNLIMITED, begin_tournament, num_leaves, set_key

PATIENCE = 2  # how many steps a unit may be deferred
# Units of more than half a row that a step is offered, per row. A row takes one; of more, some would wait too long.
_HALF_ROWS = 1.25
_CLOSE = 2.0**-11  # the share of a step that its offer may lack
_BEYOND = 0.1  # the largest share of a step that is passed over to complete its offer
_OPEN = 1024  # rows that leave more of a step open, as a divisor, are to become fuller
_PARKED = 32  # a unit may park one of so many rows before it is asked whether any row has room
_LOW = 2**32 - 1


@compiled
def fill_steps(
    lengths: Any, others: Any, kinds: Any, costs: Any, ranks: int, capacity: int, budgets: Any, target: int,
    lookahead: float, together: int, level: bool, last_step: int,
) -> Any:  # fmt: skip
    """The row of each unit. The arguments are those of `plan_steps`; others and budgets are None without resources.

    Returns:
        rows: (units,) int64, `step * ranks + rank`; the ranks of a group of steps aren't divided among its steps yet.
        order: (units,) int32, the units of one group after the other, in each from large to small.
        groups: (groups, 4) int64: where each group begins in `order`, its first step, the number of its steps, the
            tokens up to which its rows may be filled.
    """
    count = len(lengths)
    rows_of = np.full(count, -1, dtype=np.int64)
    order = np.empty(count, dtype=np.int32)
    groups = np.empty((count, 4), dtype=np.int64)
    arrived = np.empty(count, dtype=np.int32)  # the turn that read a unit from the stream
    pool = np.empty(count, dtype=np.int32)  # units that were read and not placed, in the order of the stream
    offered = np.empty(count, dtype=np.bool_)  # for each of them, whether this step is offered it
    left = total(lengths)
    # Memory that is used for every step anew, because small steps would take longer to allocate than to plan.
    keys, own = np.empty((3, max(count, 257)), dtype=np.int64), np.empty((2, count), dtype=np.int64)
    every_unit, every_overdue = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.bool_)
    every_row = np.empty(count, dtype=np.int32)
    of_rows = np.empty((7, 0), dtype=np.int64)
    own_others = used = others_scratch = others  # None without resources
    wholes = spares = offers = budgets
    if budgets is not None:
        others_left = np.zeros(len(budgets), dtype=np.int64)
        for resource in range(len(budgets)):
            others_left[resource] = total(others[:, resource].copy())
        every_others, used = np.empty((count, len(budgets)), np.int64), np.empty((0, len(budgets)), np.int64)
        wholes, spares, offers = budgets.copy(), budgets.copy(), budgets.copy()
        others_scratch = np.empty((3, len(budgets)), dtype=np.int64)
    largest_kind = np.int64(0)
    for kind in kinds:
        largest_kind = max(largest_kind, kind)
    done = waiting = cursor = turn = step = scarce = np.int64(0)
    while done < count:
        last = step == last_step
        fill = capacity if last else target
        steps = left // (ranks * fill)  # the steps that the remaining units fill
        if budgets is not None:
            for resource in range(len(budgets)):
                steps = max(steps, others_left[resource] // (ranks * budgets[resource]))
        steps = max(1, min(together, steps, last_step - step, waiting + count - cursor))
        rows = ranks * steps
        whole = rows * fill
        spare = int(lookahead * whole)
        offer = UNLIMITED if last else whole + spare
        if budgets is not None:
            for resource in range(len(budgets)):
                wholes[resource] = rows * budgets[resource]
                spares[resource] = int(lookahead * wholes[resource])
                offers[resource] = UNLIMITED if last else wholes[resource] + spares[resource]
        if of_rows.shape[1] < 4 * rows:
            of_rows = np.empty((7, 4 * rows), dtype=np.int64)
            if budgets is not None:
                used = np.empty((rows, len(budgets)), dtype=np.int64)
        for final in (False, True):
            pooled, stop = _offer(
                lengths, others, budgets, pool, offered, waiting, cursor, rows, fill, whole, wholes, offer, offers,
                others_scratch,
            )  # fmt: skip
            arrived[cursor:stop] = turn
            size = _largest_first(kinds, pool, pooled, offered, largest_kind, keys, every_unit)
            units, overdue, row_of = every_unit[:size], every_overdue[:size], every_row[:size]
            own_lengths, own_costs = own[0, :size], own[1, :size]
            for place in range(size):
                unit = units[place]
                own_lengths[place], own_costs[place] = lengths[unit], costs[unit]
                overdue[place] = turn - arrived[unit] >= PATIENCE
            # Whether rows are full is said by the resource of which the offer has most, relative to what rows hold.
            amounts, full, margin = own_lengths, fill, spare
            if budgets is not None:
                own_others = every_others[:size]
                for place in range(size):
                    for resource in range(len(budgets)):
                        own_others[place, resource] = others[units[place], resource]
                scarce = _scarcest(own_lengths, own_others, fill, budgets)
                if scarce >= 0:
                    amounts, full, margin = own_others[:, scarce].copy(), budgets[scarce], spares[scarce]
            held = total(amounts)
            # The share of a row is the cost of a full row of units like the offered ones. If one unit costs more, the
            # share is the cost of that unit. The end of an epoch needs no limit.
            limited = level and (stop < count or held >= rows * full)
            share = _share(own_costs, held, full) if limited else UNLIMITED
            _place(own_lengths, own_others, own_costs, overdue, rows, fill, budgets, share, row_of, of_rows, used)
            taken = placed_sum(amounts, row_of)
            offered_amount = offer
            if budgets is not None and scarce >= 0:
                offered_amount = offers[scarce]
            if final or not limited or offered_amount <= taken + margin + margin // 8:
                break
            # Rows that stop at their share hold less: offer as much.
            offer = placed_sum(own_lengths, row_of) + spare
            if budgets is not None:
                for resource in range(len(budgets)):
                    offers[resource] = placed_sum(own_others[:, resource].copy(), row_of) + spares[resource]
        waiting, cursor = pooled, stop
        if not level and taken < held and taken < rows * full - rows * full // _OPEN:
            row_of = fuller(own_lengths, own_others, amounts, overdue, row_of, rows, fill, budgets, full, taken)
        groups[turn, 0], groups[turn, 1], groups[turn, 2], groups[turn, 3] = done, step, steps, fill
        for place in range(size):
            if row_of[place] >= 0:
                rows_of[units[place]] = step * ranks + row_of[place]
                order[done] = units[place]
                done += 1
                left -= own_lengths[place]
                if budgets is not None:
                    for resource in range(len(budgets)):
                        others_left[resource] -= own_others[place, resource]
        kept = 0
        for place in range(waiting):
            pool[kept] = pool[place]
            kept += rows_of[pool[place]] < 0
        waiting, turn, step = kept, turn + 1, step + steps
    return rows_of, order, groups[:turn]


@compiled_without_arrays
def _scarcest(lengths: Any, others: Any, fill: int, budgets: Any) -> int:
    """The resource of which units need the most rows, -1 for tokens."""
    scarce, most = np.int64(-1), total(lengths) / fill
    for resource in range(len(budgets)):
        taken = np.int64(0)
        for unit in range(len(others)):
            taken += others[unit, resource]
        if taken / budgets[resource] > most:
            scarce, most = resource, taken / budgets[resource]
    return scarce


@compiled_without_arrays
def _share(costs: Any, held: int, full: int) -> int:
    """The cost of a full row of units like these, or of the costliest unit, if that is more."""
    largest = np.int64(0)
    for cost in costs:
        largest = max(largest, cost)
    return max(int(total(costs) / held * full), largest)


@compiled_without_arrays
def _largest_first(kinds: Any, pool: Any, pooled: int, offered: Any, most: int, scratch: Any, units: Any) -> int:
    """Write the offered units of the pool to `units`, from large to small; those of one kind keep their order.

    Args:
        pooled: the units in the pool.
        most: the largest kind.

    Returns:
        Their number.
    """
    keys = scratch[0]
    count = np.int64(0)
    for place in range(pooled):
        if offered[place]:
            keys[count] = kinds[pool[place]] << 32 | pool[place]
            count += 1
    sort_by_bytes(keys, scratch[1], scratch[2], count, np.int64(32), most)
    for place in range(count):
        units[place] = keys[place] & _LOW
    return count


@compiled_without_arrays
def _offer(
    lengths: Any, others: Any, budgets: Any, pool: Any, offered: Any, waiting: int, cursor: int, rows: int, fill: int,
    whole: int, wholes: Any, most: int, mosts: Any, scratch: Any,
) -> tuple[int, int]:  # fmt: skip
    """Choose what a step is offered from the pool; units of the stream are added to the pool as needed.

    Args:
        whole, wholes: tokens that the rows hold, and (resources,) what they hold of other resources.
        most, mosts: tokens that the offer doesn't exceed, and the same of other resources, except to give every row a
            unit.

    Returns:
        The number of units in the pool now, and the position up to which the stream is read.
    """
    complete, beyond = most - int(_CLOSE * whole), max(1, int(_BEYOND * whole))
    most_halves = int(_HALF_ROWS * rows)
    tokens = np.int64(0)
    given = place = halves = passed = np.int64(0)  # halves: units of more than half a row
    if budgets is not None:
        scratch[:] = 0
        held, passed_others, others_halves = scratch[0], scratch[1], scratch[2]
    stopping = False  # too much was passed over, or there are too many of more than half a row
    while place < waiting or cursor < len(lengths):
        if place == waiting:
            if given >= rows and (tokens >= complete or stopping):
                break
            pool[waiting] = cursor
            waiting += 1
            cursor += 1
        unit = pool[place]
        fits = tokens + lengths[unit] <= most
        if budgets is not None:
            for resource in range(len(budgets)):
                fits = fits and held[resource] + others[unit, resource] <= mosts[resource]
        offered[place] = fits or given < rows
        if offered[place]:
            tokens += lengths[unit]
            given += 1
            halves += lengths[unit] > fill // 2
            stopping |= halves >= most_halves
            if budgets is not None:
                for resource in range(len(budgets)):
                    held[resource] += others[unit, resource]
                    others_halves[resource] += others[unit, resource] > budgets[resource] // 2
                    stopping |= others_halves[resource] >= most_halves
        else:
            passed += lengths[unit]
            stopping |= passed >= beyond
            if budgets is not None:
                for resource in range(len(budgets)):
                    passed_others[resource] += others[unit, resource]
                    stopping |= passed_others[resource] >= max(1, int(_BEYOND * wholes[resource]))
        place += 1
    return waiting, cursor


@compiled_without_arrays
def _place(
    lengths: Any, others: Any, costs: Any, overdue: Any, ranks: int, fill: int, budgets: Any, share: int,
    row_of: Any, scratch: Any, used: Any,
) -> None:  # fmt: skip
    """Set the row of each unit, -1 for a deferred one: overdue units first, and the largest first among both.

    A unit goes to the cheapest row with room, which is the first empty one while there are empty ones. Only an overdue
    unit, or one alone in its row, may bring the cost of a row above `share`. A row that has too many tokens for a unit
    is parked until units are short enough.

    Args:
        scratch, used: (7, 4 * ranks or more) and (ranks or more, resources) int64, whose values don't matter.
    """
    row_of[:] = -1
    leaves = num_leaves(ranks)
    cost, tokens = scratch[0], scratch[1]
    aside = scratch[2]  # rows without room for a unit
    if budgets is not None:
        used[:ranks] = 0
    add, unlimited = np.int64(1), np.int64(UNLIMITED)  # numba compiles a function once more for each literal number
    # Two tournaments: the costs of open rows, and the tokens of parked ones.
    open_costs, cheapest, parked_tokens, emptiest = scratch[3], scratch[4], scratch[5], scratch[6]
    begun = np.int64(0)  # rows that hold units
    any_overdue = False
    for unit in range(len(overdue)):
        any_overdue |= overdue[unit]
    least = np.int64(0)  # no row holds fewer tokens, once all are begun
    for turn in (True, False):
        if turn and not any_overdue:
            continue
        for unit in range(len(lengths)):
            if overdue[unit] != turn:
                continue
            length = lengths[unit]
            if begun < ranks:
                row_of[unit] = begun
                tokens[begun], cost[begun] = length, costs[unit]
                use(used, begun, others, unit, add)
                open_costs[leaves + begun], parked_tokens[leaves + begun] = costs[unit], UNLIMITED
                begun += 1
                if begun == ranks:
                    for leaf in range(leaves + ranks, 2 * leaves):
                        open_costs[leaf] = parked_tokens[leaf] = UNLIMITED
                    begin_tournament(open_costs, cheapest, leaves)
                    begin_tournament(parked_tokens, emptiest, leaves)
                continue
            if least + length > fill:
                continue
            while parked_tokens[1] + length <= fill:
                row = emptiest[1]
                set_key(open_costs, cheapest, leaves, row, cost[row])
                set_key(parked_tokens, emptiest, leaves, row, unlimited)
            parked = put_aside = 0
            while open_costs[1] < UNLIMITED:
                row = cheapest[1]
                if tokens[row] + length > fill:
                    if parked == ranks // _PARKED:  # perhaps no row has room
                        least = tokens[0]
                        for other in range(1, ranks):
                            least = min(least, tokens[other])
                        if least + length > fill:
                            break
                    parked += 1
                    set_key(parked_tokens, emptiest, leaves, row, tokens[row])
                elif not has_room(used, row, others, unit, budgets):
                    aside[put_aside] = row
                    put_aside += 1
                else:
                    if turn or cost[row] + costs[unit] <= share:
                        row_of[unit] = row
                        tokens[row] += length
                        cost[row] += costs[unit]
                        use(used, row, others, unit, add)
                        set_key(open_costs, cheapest, leaves, row, cost[row])
                    break
                set_key(open_costs, cheapest, leaves, row, unlimited)
            for place in range(put_aside):
                set_key(open_costs, cheapest, leaves, aside[place], cost[aside[place]])

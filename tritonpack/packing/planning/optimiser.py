"""plan_steps: puts the units of an epoch into the rows of its steps.

Steps are planned in groups, one after the other:

1. A group is offered a little more than it holds: the units that earlier groups deferred, then the next ones of the
   shuffled stream. So a unit moves by few steps. Packing a whole epoch at once would destroy the order.
2. Its rows are filled by one greedy pass: the largest units first, each into the least loaded row with room. What counts
   as load is tried in turn: the cost (balanced rows), nothing (first-fit, which makes fuller rows), tokens (for rows
   that can't be full). The units that fit nowhere are deferred. Units that were deferred twice are placed first.
3. The rows are divided among the steps of the group, rows of like cost together, as far as the steps' mean lengths
   differ no more than by chance.
4. The rows of each step exchange units until their costs are about equal.

Costs are integers, and the other sums are rounded alike everywhere, so every machine computes the same plan.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tritonpack.packing.heuristics import compiled, compiled_without_arrays, sort_by_bytes

UNLIMITED = 2**62  # above all costs
_PATIENCE = 2  # how often a unit may be deferred
# Units of more than half a row that a step is offered, per row. A row takes one; of more, some would wait too long.
_HALF_ROWS = 1.25
_CLOSE = 2.0**-11  # the share of a step that its offer may lack
_BEYOND = 0.1  # the largest share of a step that is passed over to complete its offer
_WIDE_OPEN = 128  # rows that leave more of a group open, as a divisor, are packed by first-fit, if that gains as much
_UNEVEN = 64  # rows whose fullest one is so much fuller than their mean, as a divisor, are levelled by tokens
_TOLERANCE = 2.0**-11  # the gap between the costs of two rows, relative to the larger one, that counts as none
_TRADES = 3  # exchanges per rank
_PARTNERS = 8  # rows that are tried for one exchange
_OFFERED = 32  # units that a row offers, spread from its largest to its smallest
_LOW = 2**32 - 1
_ROW_BITS = 26  # 64 steps of 2**20 ranks
_LADDER = 8  # weights of cost that are tried to divide rows among steps


@compiled
def plan_steps(
    takes: Any, costs: Any, sizes: Any, limits: Any, last_limits: Any, ranks: int, lookahead: float, together: int,
    level: bool, last_step: int,
) -> Any:  # fmt: skip
    """The row of each unit, (units,) int64: `step * ranks + rank`.

    Args:
        takes: (units, resources) int64, what each unit takes, in the shuffled order; the first resource is tokens.
        costs: (units,) int64, at least 1.
        sizes: (units,) int64, the largest share of a row that a unit takes, in tokens of a row.
        limits: (resources,) int64, what a row holds; a single unit may take more.
        last_limits: the same for the rows of `last_step`.
        ranks: rows of a step.
        lookahead: the share of its room that a step is offered in addition.
        together: how many steps are planned as one group.
        level: a row takes no more units once it has its share of the step's cost, even if it has room.
        last_step: the step that is offered all remaining units; -1 for none.
    """
    count, resources = takes.shape
    rows_of = np.full(count, -1, dtype=np.int64)
    arrived = np.empty(count, dtype=np.int32)  # the group that read a unit from the stream
    pool = np.empty(count, dtype=np.int64)  # units that were read and not placed, in the order of the stream
    offered = np.empty(count, dtype=np.bool_)
    keys, spare, counts = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(257, np.int64)
    largest = np.int64(0)
    for size in sizes:
        largest = max(largest, size)
    left = np.zeros(resources, dtype=np.int64)
    for unit in range(count):
        for resource in range(resources):
            left[resource] += takes[unit, resource]
    every_take, every_load = np.empty((count, resources), dtype=np.int64), np.empty((3, count), dtype=np.int64)
    every_row, every_overdue = np.empty((2, count), dtype=np.int64), np.empty(count, dtype=np.bool_)
    offer, sums = np.empty(resources, dtype=np.int64), np.empty((3, resources), dtype=np.int64)
    of_rows = np.empty((13, 0), dtype=np.int64)
    used = np.empty((0, resources), dtype=np.int64)
    done = waiting = cursor = step = group = np.int64(0)
    while done < count:
        last = step == last_step
        most = last_limits if last else limits
        steps = np.int64(1)  # that the remaining units fill
        for resource in range(resources):
            steps = max(steps, left[resource] // (ranks * most[resource]))
        steps = min(together, steps, waiting + count - cursor)
        if last_step >= 0 and not last:
            steps = min(steps, last_step - step)
        rows = ranks * steps
        leaves = np.int64(1)
        while leaves < rows:
            leaves *= 2
        if of_rows.shape[1] < 2 * leaves:
            of_rows = np.empty((13, 2 * leaves), dtype=np.int64)
            used = np.empty((rows, resources), dtype=np.int64)
        for resource in range(resources):
            offer[resource] = UNLIMITED if last else rows * most[resource] + int(lookahead * rows * most[resource])
        for final in (False, True):
            waiting_now, stop = _offer(takes, pool, offered, waiting, cursor, rows, most, offer, sums)
            arrived[cursor:stop] = group
            size = np.int64(0)
            for place in range(waiting_now):
                if offered[place]:
                    keys[size] = (largest - sizes[pool[place]]) << 32 | pool[place]
                    size += 1
            sort_by_bytes(keys, spare, counts, size, np.int64(32), largest)
            units, own, overdue = keys[:size], every_take[:size], every_overdue[:size]
            own_costs, tokens, nothing = every_load[0, :size], every_load[1, :size], every_load[2, :size]
            row_of, other = every_row[0, :size], every_row[1, :size]
            sums[0] = 0
            total_cost = dearest = np.int64(0)
            for place in range(size):
                unit = units[place] & _LOW
                units[place] = unit
                for resource in range(resources):
                    own[place, resource] = takes[unit, resource]
                    sums[0, resource] += takes[unit, resource]
                own_costs[place], tokens[place], nothing[place] = costs[unit], takes[unit, 0], 0
                total_cost += costs[unit]
                dearest = max(dearest, costs[unit])
                overdue[place] = group - arrived[unit] >= _PATIENCE
            # Whether rows are full is said by the resource of which the offer has most, relative to what rows hold.
            scarce = 0
            for resource in range(resources):
                if sums[0, resource] * most[scarce] > sums[0, scarce] * most[resource]:
                    scarce = resource
            held, whole = sums[0, scarce], rows * most[scarce]
            # A row's share is the cost of a full row of units like these, or of the dearest one. The end of an epoch
            # needs no limit.
            limited = level and (stop < count or held >= whole)
            share = max(int(total_cost / held * most[scarce]), dearest) if limited else np.int64(UNLIMITED)
            _fill(own, own_costs, own_costs, overdue, rows, most, share, row_of, used, of_rows, leaves)
            taken = _placed(own, row_of, scarce)
            if final or not limited or offer[scarce] <= taken + int(1.125 * lookahead * whole):
                break
            for resource in range(resources):  # rows that stop at their share hold less: offer as much
                offer[resource] = _placed(own, row_of, resource) + int(lookahead * rows * most[resource])
        waiting, cursor = waiting_now, stop
        if not level and taken < min(held, whole) - whole // _WIDE_OPEN:
            _fill(own, nothing, own_costs, overdue, rows, most, share, other, used, of_rows, leaves)
            gained = _placed(own, other, scarce)
            if gained > taken + whole // _WIDE_OPEN and _each_holds_one(other, of_rows[0], rows):
                row_of[:], taken = other, gained
        if not level:
            high, mean = _fullest(tokens, row_of, of_rows[0], rows)
            if high > mean + mean // _UNEVEN:
                _fill(own, tokens, own_costs, overdue, rows, most, share, other, used, of_rows, leaves)
                if _placed(own, other, scarce) >= taken and _fullest(tokens, other, of_rows[0], rows)[0] <= high:
                    row_of[:] = other
        _finish(units, own, own_costs, row_of, rows, ranks, most, used, of_rows, counts, keys_of_rows(of_rows), rows_of, step)
        for place in range(size):
            if row_of[place] >= 0:
                done += 1
                for resource in range(resources):
                    left[resource] -= own[place, resource]
        kept = np.int64(0)
        for place in range(waiting):
            pool[kept] = pool[place]
            kept += rows_of[pool[place]] < 0
        waiting, group, step = kept, group + 1, step + steps
    return rows_of

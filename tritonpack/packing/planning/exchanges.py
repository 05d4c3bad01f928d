"""level_rows: exchanges units between the rows of each step until their costs are about equal."""

from __future__ import annotations

from typing import Any

import numpy as np

from tritonpack.packing.heuristics import compiled_without_arrays

UNLIMITED = 2**62  # above all costs
_TOLERANCE = 2.0**-11  # the gap between the costs of two rows, relative to the larger one, that counts as none
_PARTNERS = 3  # the cheapest rows, with which the costliest one tries to exchange units
_OFFERED = 12  # units that a row offers, spread from its largest to its smallest
SETS = 1 + _OFFERED * (_OFFERED + 1) // 2  # of none, one or two of them


@compiled_without_arrays
def level_rows(
    own: Any, costs: Any, row_of: Any, rows: int, ranks: int, limits: Any, level: bool, room: Any, of_rows: Any,
    after: Any, chosen: Any, sets: Any,
) -> None:  # fmt: skip
    """Exchange units between rows of each step until their costs are about equal, in place."""
    cost, head, by_cost = of_rows[0], of_rows[1], of_rows[2]
    for row in range(rows):
        cost[row], head[row] = 0, -1
        for resource in range(len(limits)):
            room[resource, row] = limits[resource]
    for unit in range(len(costs) - 1, -1, -1):  # the units of a row are a list, from large to small
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
                own, costs, row_of, dear, by_cost[partner], room, cost, head, after, chosen, sets
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
    mine, theirs = sets
    num_mine = _make_sets(head[dear], after, own, costs, chosen, mine)
    num_theirs = _make_sets(head[cheap], after, own, costs, chosen, theirs)
    best, give, take = gap, -1, -1
    for one in range(num_mine):
        rest = gap - 2 * mine[2, one]  # the gap if the row gets nothing
        if rest >= best:
            continue
        for other in range(num_theirs):
            distance = abs(rest + 2 * theirs[2, other])
            if distance < best:
                fits = True
                for resource in range(len(room)):
                    moved = mine[3 + resource, one] - theirs[3 + resource, other]
                    fits = fits and -max(room[resource, dear], 0) <= moved <= max(room[resource, cheap], 0)
                if fits:
                    best, give, take = distance, one, other
        if best <= gap >> 3:
            break
    if give < 0:
        return False
    for row, to, side, number in ((dear, cheap, mine, give), (cheap, dear, theirs, take)):
        cost[row] -= side[2, number]
        cost[to] += side[2, number]
        for resource in range(len(room)):
            room[resource, row] += side[3 + resource, number]
            room[resource, to] -= side[3 + resource, number]
        for member in range(2):
            if side[member, number] >= 0:
                row_of[side[member, number]] = to
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
        sets: (3 + resources, sets) int64: the first and the second unit of each set, or -1; its cost; what it takes.
    """
    count = 0
    while unit >= 0:  # of a cost only two
        if count < 2 or costs[chosen[count - 2]] != costs[unit]:
            chosen[count] = unit
            count += 1
        unit = after[unit]
    offers, found = min(count, _OFFERED), 1
    sets[0, 0] = sets[1, 0] = -1
    for entry in range(2, len(sets)):
        sets[entry, 0] = 0
    for first in range(offers):
        one = chosen[first * count // offers]
        for second in range(first, offers):
            is_pair, other = second > first, chosen[second * count // offers]
            sets[0, found], sets[1, found] = one, other if is_pair else -1
            sets[2, found] = costs[one] + (costs[other] if is_pair else 0)
            for resource in range(own.shape[1]):
                sets[3 + resource, found] = own[one, resource] + (own[other, resource] if is_pair else 0)
            found += 1
    return found

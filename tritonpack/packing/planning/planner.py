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

from tritonpack.packing.heuristics import compiled, sort_by_bytes

PATIENCE = 2  # how many steps a unit may be deferred
# Units of more than half a row that a step is offered, per row. A row takes one; of more, some would wait too long.
_HALF_ROWS = 1.25
_CLOSE = 2.0**-11  # the share of a step that its offer may lack
_BEYOND = 0.1  # the largest share of a step that is passed over to complete its offer
UNLIMITED = 2**62
_CHOICES = 64  # deferred units that are looked at to exchange one of a row
# Shares of a step, as divisors:
_OPEN = 1024  # rows that leave more open exchange units for larger ones
_WIDE_OPEN = 128  # rows that leave more open are packed anew, if that gains as much
_LOW = 2**32 - 1


@compiled
def fill_steps(
    lengths: Any, others: Any, kinds: Any, costs: Any, ranks: int, capacity: int, budgets: Any, target: int,
    lookahead: float, together: int, level: bool, last_step: int,
) -> Any:  # fmt: skip
    """The row of each unit. The arguments are those of `plan_steps`.

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
    left, others_left = lengths.sum(), others.sum(axis=0)
    # Memory that is used for every step anew, because small steps would take longer to allocate than to plan.
    keys, own = np.empty((2, count), dtype=np.int64), np.empty((2, count), dtype=np.int64)
    every_unit, every_overdue = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.bool_)
    every_others, every_row = np.empty((count, len(budgets)), dtype=np.int64), np.empty(count, dtype=np.int32)
    of_rows = np.empty((7, 2), dtype=np.int64)
    wholes, spares, offers = budgets.copy(), budgets.copy(), budgets.copy()
    scratch = np.empty((3, 1 + len(budgets)), dtype=np.int64)
    digits = 1 + int(np.log2(kinds.max() + 1) / 8)  # bytes of the largest kind, or one more
    done = waiting = cursor = turn = step = 0
    while done < count:
        last = step == last_step
        fill = capacity if last else target
        steps = left // (ranks * fill)  # the steps that the remaining units fill
        for resource in range(len(budgets)):
            steps = max(steps, others_left[resource] // (ranks * budgets[resource]))
        steps = max(1, min(together, steps, last_step - step, waiting + count - cursor))
        rows = ranks * steps
        whole = rows * fill
        spare = int(lookahead * whole)
        offer = UNLIMITED if last else whole + spare
        for resource in range(len(budgets)):
            wholes[resource] = rows * budgets[resource]
            spares[resource] = int(lookahead * wholes[resource])
            offers[resource] = UNLIMITED if last else wholes[resource] + spares[resource]
        if of_rows.shape[1] < 4 * rows:
            of_rows = np.empty((7, 4 * rows), dtype=np.int64)
        for final in (False, True):
            pooled, stop = _offer(
                lengths, others, budgets, pool, offered, waiting, cursor, rows, fill, whole, wholes, offer, offers,
                scratch,
            )  # fmt: skip
            arrived[cursor:stop] = turn
            size = _largest_first(kinds, pool[:pooled], offered, digits, keys, every_unit)
            units, overdue, row_of = every_unit[:size], every_overdue[:size], every_row[:size]
            own_lengths, own_costs, own_others = own[0, :size], own[1, :size], every_others[:size]
            for place in range(size):
                unit = units[place]
                own_lengths[place], own_costs[place] = lengths[unit], costs[unit]
                overdue[place] = turn - arrived[unit] >= PATIENCE
                for resource in range(len(budgets)):
                    own_others[place, resource] = others[unit, resource]
            # Whether rows are full is said by the resource of which the offer has most, relative to what rows hold.
            scarce = _scarcest(own_lengths, own_others, fill, budgets)
            amounts = own_lengths if scarce < 0 else own_others[:, scarce].copy()
            full = fill if scarce < 0 else budgets[scarce]
            held, cost = amounts.sum(), own_costs.sum()
            # The share of a row is the cost of a full row of units like the offered ones. If one unit costs more, the
            # share is the cost of that unit. The end of an epoch needs no limit.
            limited = level and (stop < count or held >= rows * full)
            share = max(int(cost / held * full), own_costs.max()) if limited else UNLIMITED
            _place(own_lengths, own_others, own_costs, overdue, rows, fill, budgets, share, row_of, of_rows)
            taken = _placed_sum(amounts, row_of)
            margin = spare if scarce < 0 else spares[scarce]
            if final or not limited or (offer if scarce < 0 else offers[scarce]) <= taken + margin + margin // 8:
                break
            # Rows that stop at their share hold less: offer as much.
            offer = _placed_sum(own_lengths, row_of) + spare
            for resource in range(len(budgets)):
                offers[resource] = _placed_sum(own_others[:, resource].copy(), row_of) + spares[resource]
        waiting, cursor = pooled, stop
        if not level and taken < held and taken < rows * full - rows * full // _OPEN:
            row_of = _fuller(own_lengths, own_others, amounts, overdue, row_of, rows, fill, budgets, full, taken)
        groups[turn, 0], groups[turn, 1], groups[turn, 2], groups[turn, 3] = done, step, steps, fill
        for place in range(size):
            if row_of[place] >= 0:
                rows_of[units[place]] = step * ranks + row_of[place]
                order[done] = units[place]
                done += 1
                left -= own_lengths[place]
                for resource in range(len(budgets)):
                    others_left[resource] -= own_others[place, resource]
        kept = 0
        for place in range(waiting):
            pool[kept] = pool[place]
            kept += rows_of[pool[place]] < 0
        waiting, turn, step = kept, turn + 1, step + steps
    return rows_of, order, groups[:turn]


@compiled
def _placed_sum(amounts: Any, row_of: Any) -> int:
    """The sum over units that have a row."""
    total = np.int64(0)
    for unit in range(len(row_of)):
        if row_of[unit] >= 0:
            total += amounts[unit]
    return total


@compiled
def _scarcest(lengths: Any, others: Any, fill: int, budgets: Any) -> int:
    """The resource of which units need the most rows, -1 for tokens."""
    scarce, most = -1, lengths.sum() / fill
    for resource in range(len(budgets)):
        rows = others[:, resource].sum() / budgets[resource]
        if rows > most:
            scarce, most = resource, rows
    return scarce


@compiled
def has_room(used: Any, row: int, others: Any, unit: int, budgets: Any) -> bool:
    """Whether a row has room for a unit in every resource but tokens."""
    fits = True
    for resource in range(len(budgets)):
        fits = fits and used[row, resource] + others[unit, resource] <= budgets[resource]
    return fits


@compiled
def _use(used: Any, row: int, others: Any, unit: int, sign: int) -> None:
    """Add what a unit takes of each resource but tokens to a row, or take it away with sign -1."""
    for resource in range(used.shape[1]):
        used[row, resource] += sign * others[unit, resource]


@compiled
def _fuller(
    lengths: Any, others: Any, amounts: Any, overdue: Any, row_of: Any, rows: int, fill: int, budgets: Any, full: int,
    taken: int,
) -> Any:  # fmt: skip
    """Rows that hold more of the scarcest resource than those of `_place`.

    Args:
        amounts, full: (units,) what units take of that resource, and what a row holds.
        taken: what rows hold now.
    """
    whole = rows * full
    if taken < whole - whole // _WIDE_OPEN:
        if len(budgets):
            packed = _match(lengths, others, overdue, rows, fill, budgets)
        else:
            packed = _first_fit(lengths, overdue, rows, fill)
        held = _placed_sum(amounts, packed)
        used = np.zeros(rows, dtype=np.bool_)
        for row in packed:
            used[row] |= row >= 0
        if held > taken and used.all():
            held += _exchange(lengths, others, amounts, overdue, packed, rows, fill, budgets, full)
            if held > taken + whole // _WIDE_OPEN:
                return packed
    _exchange(lengths, others, amounts, overdue, row_of, rows, fill, budgets, full)
    return row_of


@compiled
def _first_fit(lengths: Any, overdue: Any, rows: int, fill: int) -> Any:
    """Put each unit into the first row with room, overdue units first, and the largest first among both."""
    leaves = 1
    while leaves < rows:
        leaves *= 2
    # The children of node i are 2 i and 2 i + 1; node 1 is the root, and row r is leaf leaves + r.
    room = np.zeros(2 * leaves, dtype=np.int64)
    room[leaves : leaves + rows] = fill
    for node in range(leaves - 1, 0, -1):
        room[node] = max(room[2 * node], room[2 * node + 1])
    row_of = np.full(len(lengths), -1, dtype=np.int32)
    for turn in (True, False):
        for unit in range(len(lengths)):
            length = lengths[unit]
            if overdue[unit] != turn or room[1] < length:
                continue
            node = 1
            while node < leaves:
                node *= 2
                if room[node] < length:
                    node += 1
            row_of[unit] = node - leaves
            room[node] -= length
            while node > 1:
                node //= 2
                room[node] = max(room[2 * node], room[2 * node + 1])
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
            best, chosen = -1.0, -1
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
                _use(used, chosen, others, unit, 1)
    return row_of


@compiled
def _exchange(
    lengths: Any, others: Any, amounts: Any, overdue: Any, row_of: Any, rows: int, fill: int, budgets: Any, full: int
) -> int:
    """Exchange units of rows with room for deferred ones that take more of the scarcest resource; return the gain."""
    gained = np.int64(0)
    tokens, held_in = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)
    used = np.zeros((rows, len(budgets)), dtype=np.int64)
    first = np.zeros(rows + 1, dtype=np.int64)  # where the units of each row begin in `held`
    keys = np.empty(len(lengths), dtype=np.int64)
    left = 0
    for unit in range(len(lengths)):
        row = row_of[unit]
        if row >= 0:
            tokens[row] += lengths[unit]
            held_in[row] += amounts[unit]
            first[row + 1] += 1
            _use(used, row, others, unit, 1)
        else:
            keys[left] = (np.int64(2**31) - amounts[unit]) << 32 | unit
            left += 1
    out = keys[:left]  # deferred units, those first that take most
    out.sort()
    first = np.cumsum(first)
    held, cursor = np.empty(first[rows], dtype=np.int64), first.copy()
    for unit in range(len(lengths)):
        if row_of[unit] >= 0:
            held[cursor[row_of[unit]]] = unit
            cursor[row_of[unit]] += 1
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
                _use(used, row, others, own, -1)
                for turn in range(low, min(left, low + _CHOICES)):
                    new = out[turn] & _LOW
                    gain = amounts[new] - amounts[own]
                    if gain <= best:
                        break
                    if tokens[row] - lengths[own] + lengths[new] <= fill and has_room(used, row, others, new, budgets):
                        best, best_out, best_place = gain, turn, place
                        break
                _use(used, row, others, own, 1)
            if best == 0:
                break
            own, new = held[best_place], out[best_out] & _LOW
            row_of[new], row_of[own] = row, -1
            held[best_place] = new
            tokens[row] += lengths[new] - lengths[own]
            held_in[row] += best
            _use(used, row, others, own, -1)
            _use(used, row, others, new, 1)
            gained += best
            key = (np.int64(2**31) - amounts[own]) << 32 | own
            place = best_out
            while place + 1 < left and out[place + 1] < key:
                out[place] = out[place + 1]
                place += 1
            out[place] = key
    return gained


@compiled
def _largest_first(kinds: Any, pool: Any, offered: Any, digits: int, scratch: Any, units: Any) -> int:
    """Write the offered units of the pool to `units`, from large to small; those of one kind keep their order.

    Args:
        digits: the bytes of the largest kind; each is a pass of a radix sort.

    Returns:
        Their number.
    """
    keys, sorted_keys = scratch[0], scratch[1]
    count = 0
    for place in range(len(pool)):
        if offered[place]:
            keys[count] = kinds[pool[place]] << 32 | pool[place]
            count += 1
    keys = sort_by_bytes(keys, sorted_keys, count, 32, digits, np.empty(257, dtype=np.int64))
    for place in range(count):
        units[place] = keys[place] & _LOW
    return count


@compiled
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
    given = place = 0
    scratch[:] = 0
    held, passed_others, halves = scratch[0], scratch[1], scratch[2]  # halves: units of more than half a row
    passed = np.int64(0)
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
        for resource in range(len(budgets)):
            fits = fits and held[resource] + others[unit, resource] <= mosts[resource]
        offered[place] = fits or given < rows
        if offered[place]:
            tokens += lengths[unit]
            given += 1
            halves[0] += lengths[unit] > fill // 2
            stopping |= halves[0] >= most_halves
            for resource in range(len(budgets)):
                held[resource] += others[unit, resource]
                halves[1 + resource] += others[unit, resource] > budgets[resource] // 2
                stopping |= halves[1 + resource] >= most_halves
        else:
            passed += lengths[unit]
            stopping |= passed >= beyond
            for resource in range(len(budgets)):
                passed_others[resource] += others[unit, resource]
                stopping |= passed_others[resource] >= max(1, int(_BEYOND * wholes[resource]))
        place += 1
    return waiting, cursor


@compiled
def _place(
    lengths: Any, others: Any, costs: Any, overdue: Any, ranks: int, fill: int, budgets: Any, share: int,
    row_of: Any, scratch: Any,
) -> None:  # fmt: skip
    """Set the row of each unit, -1 for a deferred one: overdue units first, and the largest first among both.

    A unit goes to the cheapest row with room. Only an overdue unit, or one alone in its row, may bring the cost of a
    row above `share`. A row that has too many tokens for a unit is parked until units are short enough.
    """
    row_of[:] = -1
    cost, tokens, aside = scratch[0, :ranks], scratch[1, :ranks], scratch[2]  # aside: rows without room for a unit
    cost[:], tokens[:] = 0, 0
    used = np.zeros((ranks, len(budgets)), dtype=np.int64)
    leaves = 1
    while leaves < ranks:
        leaves *= 2
    # Of two trees, each node holds the row below it with the smallest key, and of equal ones the first. Keys are the
    # costs of open rows, and the tokens of parked ones.
    open_keys, parked_keys = scratch[3, :leaves], scratch[4, :leaves]
    cheapest, emptiest = scratch[5, : 2 * leaves], scratch[6, : 2 * leaves]
    for turn in (True, False):
        if turn and not overdue.any():
            continue
        open_keys[:ranks], open_keys[ranks:], parked_keys[:] = cost, UNLIMITED, UNLIMITED
        for row in range(leaves):
            cheapest[leaves + row] = emptiest[leaves + row] = row
        for node in range(leaves - 1, 0, -1):
            left, right = cheapest[2 * node], cheapest[2 * node + 1]
            cheapest[node] = left if open_keys[left] <= open_keys[right] else right
            emptiest[node] = emptiest[2 * node]
        for unit in range(len(lengths)):
            if overdue[unit] != turn:
                continue
            length = lengths[unit]
            while parked_keys[emptiest[1]] + length <= fill:
                row = emptiest[1]
                open_keys[row], parked_keys[row] = cost[row], UNLIMITED
                update(cheapest, open_keys, row)
                update(emptiest, parked_keys, row)
            put_aside = 0
            while True:
                row = cheapest[1]
                if open_keys[row] == UNLIMITED or not tokens[row]:
                    break
                if tokens[row] + length > fill:
                    parked_keys[row] = tokens[row]
                    update(emptiest, parked_keys, row)
                elif not has_room(used, row, others, unit, budgets):
                    aside[put_aside] = row
                    put_aside += 1
                else:
                    break
                open_keys[row] = UNLIMITED
                update(cheapest, open_keys, row)
            if open_keys[row] < UNLIMITED and (turn or not tokens[row] or cost[row] + costs[unit] <= share):
                row_of[unit] = row
                tokens[row] += length
                cost[row] += costs[unit]
                _use(used, row, others, unit, 1)
                open_keys[row] = cost[row]
                update(cheapest, open_keys, row)
            for place in range(put_aside):
                open_keys[aside[place]] = cost[aside[place]]
                update(cheapest, open_keys, aside[place])


@compiled
def update(tree: Any, keys: Any, row: int) -> None:
    """Set the nodes of a tournament above a row whose key has changed."""
    node = (len(tree) // 2 + row) >> 1
    while node:
        left, right = tree[2 * node], tree[2 * node + 1]
        tree[node] = left if keys[left] <= keys[right] else right
        node >>= 1

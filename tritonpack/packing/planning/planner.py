"""Plans the steps of an epoch, one after the other: full rows with about equal costs.

The planner offers each step a little more than it holds: first the documents that earlier steps deferred, then the
next ones of the shuffled stream. It passes over documents that would exceed the offer, so every step is offered the
same number of tokens. The longest documents of the offer are placed first, each in the cheapest row with room. The
documents that fit nowhere are deferred to the next step. Documents that were deferred twice are placed before all
others. So a document moves by two steps at most. Packing a whole epoch at once would destroy the order.

Rows that aren't full then exchange documents for longer ones that would be deferred. If they still leave much open,
first-fit packs the offer anew. If documents can't fill the rows of a step, their tokens are evened out. In the end the
rows of each step trade documents until their costs are about equal (trades.py).

Several steps can be planned as one group, which has more documents to combine. Its rows are divided among its steps.

Costs are integers, and the other sums are rounded alike everywhere, so every machine computes the same plan.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.heuristics import compiled
from tritonpack.packing.planning.demands import Demands
from tritonpack.packing.planning.trades import balance

PATIENCE = 2  # how many steps a document may be deferred
# Documents longer than half a row that a step is offered, per row. A row takes one; of more, some would wait too long.
_HALF_ROWS = 1.25
_CLOSE = 2.0**-11  # the share of a step that its offer may lack
_BEYOND = 0.1  # the largest share of a step that is passed over to complete its offer
_UNLIMITED = 2**62
_CHOICES = 64  # deferred units that are looked at to exchange one of a row
# Shares of a step's tokens, as divisors:
_OPEN = 1024  # rows that leave more open exchange documents for longer ones
_WIDE_OPEN = 128  # rows that leave more open are packed by first-fit, if that gains as much
_UNEVEN = 64  # rows whose fullest is so much fuller than their mean are evened out
_HALF_EMPTY = 16  # groups of steps that leave more open are evened out before they are divided
# The steps of a group may differ in their mean lengths by this many times the variance of random steps.
_CHANCE = 1.0


def plan_steps(
    demands: Demands,
    costs: NDArray[np.int64],
    ranks: int,
    *,
    target: int,
    lookahead: float,
    together: int,
    level: bool,
    last_step: int | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Plan steps until every unit is placed.

    Args:
        demands: what the units take, in the shuffled order.
        costs: (units,) at least 1.
        ranks: rows of a step.
        target: tokens up to which rows are filled, at most the capacity; a single unit may be longer.
        lookahead: the share of its tokens that a step is offered in addition.
        together: how many steps are planned as one large step; its rows are then divided among them.
        level: a row takes no more units once it has its share of the step's cost, even if it has room.
        last_step: the step that is offered all remaining units; its rows are filled up to the capacity.

    Returns:
        step_of and rank_of, (units,) int32 each.
    """
    last = _UNLIMITED if last_step is None else last_step
    lengths, others, budgets = demands.lengths, demands.others, demands.budgets
    rows, fills = _rows(
        lengths, others, demands.sizes, costs, ranks, demands.capacity, budgets, target,
        float(lookahead), together, level, last,
    )  # fmt: skip
    if ranks > 1:
        balance(lengths, others, demands.kinds, costs, rows, ranks, fills, budgets)
    step_of, rank_of = np.divmod(rows, ranks)
    return step_of.astype(np.int32), rank_of.astype(np.int32)


@compiled
def _rows(
    lengths: Any, others: Any, sizes: Any, costs: Any, ranks: int, capacity: int, budgets: Any, target: int,
    lookahead: float, together: int, level: bool, last_step: int,
) -> Any:  # fmt: skip
    """The row of each unit, (units,), and the tokens up to which the rows of each step may grow, (steps,).

    The arguments are those of `plan_steps`.
    """
    count = len(lengths)
    placed_in = np.full(count, -1, dtype=np.int64)
    arrived = np.empty(count, dtype=np.int32)  # the turn that read a unit from the stream
    pool = np.empty(count, dtype=np.int32)  # units that were read and not placed, in the order of the stream
    offered = np.empty(count, dtype=np.bool_)  # for each of them, whether this step is offered it
    left = np.int64(0)
    for length in lengths:
        left += length
    others_left = _sums(others)
    fills = np.empty(count, dtype=np.int64)  # by step; no step is empty
    waiting = cursor = turn = step = 0
    while waiting or cursor < count:
        last = step == last_step
        fill = capacity if last else target
        steps = left // (ranks * fill)  # the steps that the remaining units fill
        for resource in range(len(budgets)):
            steps = max(steps, others_left[resource] // (ranks * budgets[resource]))
        steps = max(1, min(together, steps, last_step - step, waiting + count - cursor))
        rows = ranks * steps
        whole, wholes = rows * fill, rows * budgets
        spare, spares = int(lookahead * whole), (lookahead * wholes).astype(np.int64)
        offer = _UNLIMITED if last else whole + spare
        offers = np.full(len(budgets), _UNLIMITED, dtype=np.int64) if last else wholes + spares
        for final in (False, True):
            pooled, stop = _offer(
                lengths, others, budgets, pool, offered, waiting, cursor, rows, fill, whole, wholes, offer, offers
            )
            arrived[cursor:stop] = turn
            units = _largest_first(sizes, pool[:pooled], offered)
            own_lengths = lengths[units].astype(np.int64)
            own_others = _rows_of(others, units)
            own_costs = costs[units]
            overdue = turn - arrived[units] >= PATIENCE
            # Whether rows are full is said by the resource of which the offer has most, relative to what rows hold.
            scarce = _scarcest(own_lengths, own_others, fill, budgets)
            amounts = own_lengths if scarce < 0 else own_others[:, scarce].copy()
            full = fill if scarce < 0 else budgets[scarce]
            held, cost = amounts.sum(), own_costs.sum()
            # The share of a row is the cost of a full row of units like the offered ones. If one unit costs more, the
            # share is the cost of that unit. The end of an epoch needs no limit.
            limited = level and (stop < count or held >= rows * full)
            share = max(int(cost / held * full), own_costs.max()) if limited else _UNLIMITED
            row_of = _place(own_lengths, own_others, own_costs, overdue, rows, fill, budgets, share)
            taken = _placed_sum(amounts, row_of)
            if final or not limited:
                break
            margin = spare if scarce < 0 else spares[scarce]
            if (offer if scarce < 0 else offers[scarce]) <= taken + margin + margin // 8:
                break
            # Rows that stop at their share hold less: offer as much.
            offer = _placed_sum(own_lengths, row_of) + spare
            for resource in range(len(budgets)):
                offers[resource] = _placed_sum(own_others[:, resource].copy(), row_of) + spares[resource]
        waiting, cursor = pooled, stop
        if not level and taken < held and taken < rows * full - rows * full // _OPEN:
            row_of = _fuller(own_lengths, own_others, amounts, overdue, row_of, rows, fill, budgets, full, taken)
        taken = _placed_sum(own_lengths, row_of)
        if steps > 1:
            if not level and taken < whole - whole // _HALF_EMPTY:
                _even_out(own_lengths, own_others, row_of, np.flatnonzero(row_of >= 0), 0, rows, fill, budgets)
            _deal(own_lengths, units, row_of, rows, ranks)
        fills[step : step + steps] = fill
        if not level and ranks > 1 and taken < whole - whole // _UNEVEN:
            by_step, starts = _group(row_of, ranks, steps)
            for number in range(steps):
                own = by_step[starts[number] : starts[number + 1]]
                fills[step + number] = _even_out(
                    own_lengths, own_others, row_of, own, number * ranks, ranks, fill, budgets
                )
        for place in range(len(units)):
            if row_of[place] >= 0:
                placed_in[units[place]] = step * ranks + row_of[place]
                for resource in range(len(budgets)):
                    others_left[resource] -= own_others[place, resource]
        kept = 0
        for place in range(waiting):
            if placed_in[pool[place]] < 0:
                pool[kept] = pool[place]
                kept += 1
        waiting = kept
        left -= taken
        turn += 1
        step += steps
    return placed_in, fills[: placed_in.max() // ranks + 1]


@compiled
def _sums(others: Any) -> Any:
    """The sum of each column, (resources,)."""
    sums = np.zeros(others.shape[1], dtype=np.int64)
    for unit in range(len(others)):
        for resource in range(others.shape[1]):
            sums[resource] += others[unit, resource]
    return sums


@compiled
def _rows_of(others: Any, units: Any) -> Any:
    """The rows of these units."""
    own = np.empty((len(units), others.shape[1]), dtype=np.int64)
    for place in range(len(units)):
        for resource in range(others.shape[1]):
            own[place, resource] = others[units[place], resource]
    return own


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
    sums = _sums(others)
    for resource in range(len(budgets)):
        if sums[resource] / budgets[resource] > most:
            scarce, most = resource, sums[resource] / budgets[resource]
    return scarce


@compiled
def _has_room(used: Any, row: int, others: Any, unit: int, budgets: Any) -> bool:
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
        if held > taken and len(np.unique(packed[packed >= 0])) == rows:
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
                if lengths[unit] <= room[row] and _has_room(used, row, others, unit, budgets):
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
    """Exchange units of rows with room for deferred ones that take more of the scarcest resource, in place.

    Returns:
        What is gained of that resource.
    """
    gained = np.int64(0)
    tokens, held_in = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)
    used = np.zeros((rows, len(budgets)), dtype=np.int64)
    keys = np.empty(len(lengths), dtype=np.int64)
    left = 0
    for unit in range(len(lengths)):
        row = row_of[unit]
        if row >= 0:
            tokens[row] += lengths[unit]
            held_in[row] += amounts[unit]
            _use(used, row, others, unit, 1)
        else:
            keys[left] = (np.int64(2**31) - amounts[unit]) << 32 | unit
            left += 1
    out = keys[:left]  # deferred units, those first that take most
    out.sort()
    held, first = _group(row_of, 1, rows)
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
                    new = out[turn] & (2**32 - 1)
                    gain = amounts[new] - amounts[own]
                    if gain <= best:
                        break
                    if tokens[row] - lengths[own] + lengths[new] <= fill and _has_room(used, row, others, new, budgets):
                        best, best_out, best_place = gain, turn, place
                        break
                _use(used, row, others, own, 1)
            if best == 0:
                break
            own, new = held[best_place], out[best_out] & (2**32 - 1)
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
def _largest_first(sizes: Any, pool: Any, offered: Any) -> Any:
    """The offered units of the pool from large to small; equal sizes keep their order."""
    keys = np.empty(len(pool), dtype=np.int64)
    count = 0
    for place in range(len(pool)):
        if offered[place]:
            keys[count] = (np.int64(2**31) - sizes[pool[place]]) << 32 | pool[place]
            count += 1
    keys = keys[:count]
    keys.sort()
    return (keys & (2**32 - 1)).astype(np.int32)


@compiled
def _deal(lengths: Any, documents: Any, row_of: Any, rows: int, ranks: int) -> None:
    """Divide the rows of a group among its steps, in place, so that steps differ in their mean lengths as by chance.

    Similar rows in one step have similar costs, but make steps of long documents and steps of short ones. So divisions
    are tried in this order, until one is as even as chance: first by the rows' mean lengths, then more and more by
    their places in the stream, at last with equally many rows of each stratum, where strata are ranges of mean lengths.
    A row's place is that of one of its documents, drawn by a hash: the mean place, or that of the longest document,
    would collect rows of some lengths at the begin or in the middle.

    Args:
        lengths, documents: (documents,) from long to short, and their places in the stream.
    """
    steps = rows // ranks
    size, place_of = np.zeros(rows, dtype=np.int64), np.empty(rows, dtype=np.int64)
    tokens, drawn = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)
    squares = 0.0
    for place in range(len(row_of) - 1, -1, -1):
        row = row_of[place]
        if row >= 0:
            size[row] += 1
            tokens[row] += lengths[place]
            hashed = (documents[place] * 2654435761) % 2**32
            if hashed >= drawn[row]:
                drawn[row], place_of[row] = hashed, documents[place]
            squares += float(lengths[place]) * lengths[place]
    if size.min() == 0:  # fewer documents than rows: the last rows are empty
        return
    count = size.sum()
    mean = tokens.sum() / count
    by_mean = np.argsort(tokens / size, kind="mergesort")
    rank_by_mean, rank_by_place = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.int64)
    rank_by_mean[by_mean] = np.arange(rows)
    rank_by_place[np.argsort(place_of, kind="mergesort")] = np.arange(rows)
    number = np.empty(rows, dtype=np.int64)
    strata, weight = 1, 32 if ranks > 1 else 0
    while True:
        for stratum in range(strata):
            first, last = stratum * ranks // strata, (stratum + 1) * ranks // strata  # the ranks that get its rows
            own = by_mean[first * steps : last * steps]
            own = own[np.argsort(8 * rank_by_place[own] + weight * rank_by_mean[own], kind="mergesort")]
            for place in range(len(own)):
                number[own[place]] = place // (last - first) * ranks + first + place % (last - first)
        sums, held = np.zeros(steps, dtype=np.int64), np.zeros(steps, dtype=np.int64)
        for row in range(rows):
            sums[number[row] // ranks] += tokens[row]
            held[number[row] // ranks] += size[row]
        between = chance = 0.0
        for step in range(steps):
            between += (sums[step] / held[step] - mean) ** 2
            chance += 1 / held[step]
        chance *= (squares / count - mean * mean) * (steps - 1) / steps
        if between <= _CHANCE * chance or strata == ranks:
            break
        if weight:
            weight //= 2
        else:
            strata = min(2 * strata, ranks)
    places = np.zeros(steps, dtype=np.int64)  # steps come in the order of the stream, too
    for row in range(rows):
        places[number[row] // ranks] += rank_by_place[row]
    step_of = np.empty(steps, dtype=np.int64)
    step_of[np.argsort(places, kind="mergesort")] = np.arange(steps)
    for place in range(len(row_of)):
        if row_of[place] >= 0:
            row = number[row_of[place]]
            row_of[place] = step_of[row // ranks] * ranks + row % ranks


@compiled
def _offer(
    lengths: Any, others: Any, budgets: Any, pool: Any, offered: Any, waiting: int, cursor: int, rows: int, fill: int,
    whole: int, wholes: Any, most: int, mosts: Any,
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
    held, passed_others = np.zeros(len(budgets), dtype=np.int64), np.zeros(len(budgets), dtype=np.int64)
    halves = np.zeros(1 + len(budgets), dtype=np.int64)  # units that take more than half a row, by resource
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
    lengths: Any, others: Any, costs: Any, overdue: Any, ranks: int, fill: int, budgets: Any, share: int
) -> Any:  # fmt: skip
    """The row of each unit, -1 for a deferred one: overdue units first, and the largest first among both.

    A unit goes to the cheapest row with room. Only an overdue unit, or one alone in its row, may bring the cost of a
    row above `share`. A row that has too many tokens for a unit is parked until units are short enough.
    """
    row_of = np.full(len(lengths), -1, dtype=np.int32)
    cost = np.zeros(ranks, dtype=np.int64)
    tokens = np.zeros(ranks, dtype=np.int64)
    used = np.zeros((ranks, len(budgets)), dtype=np.int64)
    aside = np.empty(ranks, dtype=np.int64)  # rows that have room for the tokens of a unit, but not for the unit
    for turn in (True, False):
        open_rows = [(cost[row], row) for row in range(ranks)]  # the cheapest on top
        heapify(open_rows)
        parked = [(tokens[row], row) for row in range(0)]  # the emptiest on top
        for unit in range(len(lengths)):
            if overdue[unit] != turn:
                continue
            length = lengths[unit]
            while parked and parked[0][0] + length <= fill:
                row = heappop(parked)[1]
                heappush(open_rows, (cost[row], row))
            put_aside = 0
            while open_rows and tokens[open_rows[0][1]]:
                row = open_rows[0][1]
                if tokens[row] + length > fill:
                    heappop(open_rows)
                    heappush(parked, (tokens[row], row))
                elif not _has_room(used, row, others, unit, budgets):
                    heappop(open_rows)
                    aside[put_aside] = row
                    put_aside += 1
                else:
                    break
            if open_rows:
                row = open_rows[0][1]
                if turn or not tokens[row] or cost[row] + costs[unit] <= share:
                    row_of[unit] = row
                    tokens[row] += length
                    cost[row] += costs[unit]
                    _use(used, row, others, unit, 1)
                    heapreplace(open_rows, (cost[row], row))
            for place in range(put_aside):
                heappush(open_rows, (cost[aside[place]], aside[place]))
    return row_of


@compiled
def _group(row_of: Any, ranks: int, steps: int) -> Any:
    """The documents of each group of `ranks` rows, ascending, and where they start."""
    starts = np.zeros(steps + 1, dtype=np.int64)
    for row in row_of:
        if row >= 0:
            starts[row // ranks + 1] += 1
    for step in range(steps):
        starts[step + 1] += starts[step]
    grouped = np.empty(starts[steps], dtype=np.int64)
    cursor = starts.copy()
    for document in range(len(row_of)):
        if row_of[document] >= 0:
            step = row_of[document] // ranks
            grouped[cursor[step]] = document
            cursor[step] += 1
    return grouped, starts


@compiled
def _even_out(lengths: Any, others: Any, row_of: Any, own: Any, first: int, rows: int, fill: int, budgets: Any) -> int:
    """Place documents of rows that aren't full anew, so that rows hold more equal numbers of tokens, in place.

    The ranks of a step wait for the fullest row.

    Args:
        own: (documents,) those of the rows from `first` on, from long to short.

    Returns:
        The tokens up to which rows may grow.
    """
    tokens = np.zeros(rows, dtype=np.int64)
    for document in own:
        tokens[row_of[document] - first] += lengths[document]
    fullest = tokens.max()
    if rows * fullest - tokens.sum() <= rows * fullest // _UNEVEN or len(own) <= rows:
        return fullest
    own_lengths = lengths[own]
    everything = np.ones(len(own), dtype=np.bool_)
    placed = _place(own_lengths, _rows_of(others, own), own_lengths, everything, rows, fill, budgets, _UNLIMITED)
    if placed.min() < 0:
        return fullest
    tokens[:] = 0
    for place in range(len(own)):
        tokens[placed[place]] += own_lengths[place]
    if tokens.max() < fullest:
        for place in range(len(own)):
            row_of[own[place]] = first + placed[place]
    return min(tokens.max(), fullest)

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
from tritonpack.packing.planning.trades import balance

PATIENCE = 2  # how many steps a document may be deferred
# Documents longer than half a row that a step is offered, per row. A row takes one; of more, some would wait too long.
_HALF_ROWS = 1.25
_CLOSE = 2.0**-11  # the share of a step that its offer may lack
_BEYOND = 0.1  # the largest share of a step that is passed over to complete its offer
_UNLIMITED = 2**62
# Shares of a step's tokens, as divisors:
_OPEN = 1024  # rows that leave more open exchange documents for longer ones
_WIDE_OPEN = 128  # rows that leave more open are packed by first-fit, if that gains as much
_UNEVEN = 64  # rows whose fullest is so much fuller than their mean are evened out
_HALF_EMPTY = 16  # groups of steps that leave more open are evened out before they are divided
# The steps of a group may differ in their mean lengths by this many times the variance of random steps.
_CHANCE = 1.0


def plan_steps(
    lengths: NDArray[np.int32],
    costs: NDArray[np.int64],
    ranks: int,
    capacity: int,
    *,
    target: int,
    lookahead: float,
    together: int,
    level: bool,
    last_step: int | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Plan steps until every document is placed.

    Args:
        lengths: (documents,) from 1 to `capacity`, in the shuffled order.
        costs: (documents,) at least 1.
        ranks: rows of a step.
        capacity: tokens that fit into a row.
        target: tokens up to which rows are filled, at most `capacity`; a single document may be longer.
        lookahead: the share of its tokens that a step is offered in addition.
        together: how many steps are planned as one large step; its rows are then divided among them.
        level: a row takes no more documents once it has its share of the step's cost, even if it has room.
        last_step: the step that is offered all remaining documents; its rows are filled up to `capacity`.

    Returns:
        step_of and rank_of, (documents,) int32 each.
    """
    last = _UNLIMITED if last_step is None else last_step
    rows, fills = _rows(lengths, costs, ranks, capacity, target, float(lookahead), together, level, last)
    if ranks > 1:
        balance(lengths, costs, rows, ranks, fills)
    step_of, rank_of = np.divmod(rows, ranks)
    return step_of.astype(np.int32), rank_of.astype(np.int32)


@compiled
def _rows(
    lengths: Any, costs: Any, ranks: int, capacity: int, target: int, lookahead: float, together: int, level: bool,
    last_step: int,
) -> Any:  # fmt: skip
    """The row of each document, (documents,), and the tokens up to which the rows of each step may grow, (steps,).

    The arguments are those of `plan_steps`.
    """
    count = len(lengths)
    placed_in = np.full(count, -1, dtype=np.int64)
    arrived = np.empty(count, dtype=np.int32)  # the turn that read a document from the stream
    pool = np.empty(count, dtype=np.int32)  # documents that were read and not placed, in the order of the stream
    offered = np.empty(count, dtype=np.bool_)  # for each of them, whether this step is offered it
    left = np.int64(0)
    for length in lengths:
        left += length
    fills = np.empty(count, dtype=np.int64)  # by step; no step is empty
    waiting = cursor = turn = step = 0
    while waiting or cursor < count:
        last = step == last_step
        fill = capacity if last else target
        steps = max(1, min(together, left // (ranks * fill), last_step - step, waiting + count - cursor))
        rows = ranks * steps
        whole = rows * fill
        spare = int(lookahead * whole)
        offer = _UNLIMITED if last else whole + spare
        for final in (False, True):
            pooled, stop = _offer(lengths, pool, offered, waiting, cursor, rows, fill, whole, offer)
            arrived[cursor:stop] = turn
            documents = _longest_first(lengths, pool[:pooled], offered)
            own_lengths = lengths[documents].astype(np.int64)
            own_costs = costs[documents]
            overdue = turn - arrived[documents] >= PATIENCE
            tokens, cost = own_lengths.sum(), own_costs.sum()
            # The share of a row is the cost of a full row of documents like the offered ones. If one document costs
            # more, the share is the cost of that document. The end of an epoch needs no limit.
            limited = level and (stop < count or tokens >= whole)
            share = max(int(cost / tokens * fill), own_costs.max()) if limited else _UNLIMITED
            row_of = _place(own_lengths, own_costs, overdue, rows, fill, share)
            taken = np.int64(0)
            for document in range(len(documents)):
                if row_of[document] >= 0:
                    taken += own_lengths[document]
            if final or not limited or offer <= taken + spare + spare // 8:
                break
            offer = taken + spare  # rows that stop at their share hold fewer tokens: offer that number
        waiting, cursor = pooled, stop
        if not level and taken < tokens and taken < whole - whole // _OPEN:
            row_of, taken = _fuller(own_lengths, overdue, row_of, rows, fill, taken)
        if steps > 1:
            if not level and taken < whole - whole // _HALF_EMPTY:
                _even_out(own_lengths, row_of, np.flatnonzero(row_of >= 0), 0, rows, fill)
            _deal(own_lengths, documents, row_of, rows, ranks)
        fills[step : step + steps] = fill
        if not level and ranks > 1 and taken < whole - whole // _UNEVEN:
            by_step, starts = _group(row_of, ranks, steps)
            for number in range(steps):
                own = by_step[starts[number] : starts[number + 1]]
                fills[step + number] = _even_out(own_lengths, row_of, own, number * ranks, ranks, fill)
        for place in range(len(documents)):
            if row_of[place] >= 0:
                placed_in[documents[place]] = step * ranks + row_of[place]
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
def _fuller(lengths: Any, overdue: Any, row_of: Any, rows: int, fill: int, taken: int) -> Any:
    """Rows that hold more tokens than those of `_place`."""
    whole = rows * fill
    if taken < whole - whole // _WIDE_OPEN:
        packed, tokens, empty = _first_fit(lengths, overdue, rows, fill)
        if not empty and tokens > taken:
            tokens += _exchange(lengths, overdue, packed, rows, fill)
            if tokens > taken + whole // _WIDE_OPEN:
                return packed, tokens
    return row_of, taken + _exchange(lengths, overdue, row_of, rows, fill)


@compiled
def _first_fit(lengths: Any, overdue: Any, rows: int, fill: int) -> Any:
    """Put each document into the first row with room, overdue documents first, and the longest first among both."""
    leaves = 1
    while leaves < rows:
        leaves *= 2
    # The children of node i are 2 i and 2 i + 1; node 1 is the root, and row r is leaf leaves + r.
    room = np.zeros(2 * leaves, dtype=np.int64)
    room[leaves : leaves + rows] = fill
    for node in range(leaves - 1, 0, -1):
        room[node] = max(room[2 * node], room[2 * node + 1])
    row_of = np.full(len(lengths), -1, dtype=np.int32)
    tokens = np.int64(0)
    highest = -1
    for turn in (True, False):
        for document in range(len(lengths)):
            length = lengths[document]
            if overdue[document] != turn or room[1] < length:
                continue
            node = 1
            while node < leaves:
                node *= 2
                if room[node] < length:
                    node += 1
            row_of[document] = node - leaves
            highest = max(highest, node - leaves)
            tokens += length
            room[node] -= length
            while node > 1:
                node //= 2
                room[node] = max(room[2 * node], room[2 * node + 1])
    return row_of, tokens, highest < rows - 1


@compiled
def _exchange(lengths: Any, overdue: Any, row_of: Any, rows: int, fill: int) -> int:
    """Exchange documents of rows with room for longer ones that are deferred, in place; return the tokens gained."""
    gained = np.int64(0)
    room = np.full(rows, fill, dtype=np.int64)
    out = np.empty(len(lengths), dtype=np.int32)  # deferred documents, from long to short
    left = 0
    for document in range(len(lengths)):
        if row_of[document] >= 0:
            room[row_of[document]] -= lengths[document]
        else:
            out[left] = document
            left += 1
    held, first = _group(row_of, 1, rows)
    for row in range(rows):
        while room[row] > 0:
            best = best_out = best_place = np.int64(0)
            for place in range(first[row], first[row + 1]):
                own = held[place]
                if overdue[own]:
                    continue
                most = lengths[own] + room[row]
                low, high = 0, left  # the first deferred document that isn't longer than `most`
                while low < high:
                    middle = (low + high) // 2
                    if lengths[out[middle]] > most:
                        low = middle + 1
                    else:
                        high = middle
                if low < left and lengths[out[low]] - lengths[own] > best:
                    best, best_out, best_place = lengths[out[low]] - lengths[own], low, place
            if best == 0:
                break
            own, new = held[best_place], out[best_out]
            row_of[new], row_of[own] = row, -1
            held[best_place] = new
            room[row] -= best
            gained += best
            place = best_out
            while place + 1 < left and out[place + 1] < own:
                out[place] = out[place + 1]
                place += 1
            out[place] = own
    return gained


@compiled
def _longest_first(lengths: Any, pool: Any, offered: Any) -> Any:
    """The offered documents of the pool from long to short; equal lengths keep their order."""
    keys = np.empty(len(pool), dtype=np.int64)
    count = 0
    for place in range(len(pool)):
        if offered[place]:
            keys[count] = (np.int64(2**31) - lengths[pool[place]]) << 32 | pool[place]
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
    lengths: Any, pool: Any, offered: Any, waiting: int, cursor: int, rows: int, fill: int, whole: int, most: int
) -> tuple[int, int]:
    """Choose what a step is offered from the pool; documents of the stream are added to the pool as needed.

    Args:
        whole: tokens that the rows hold.
        most: tokens that the offer doesn't exceed, except to give every row a document.

    Returns:
        The number of documents in the pool now, and the position up to which the stream is read.
    """
    complete, beyond = most - int(_CLOSE * whole), int(_BEYOND * whole)
    half, most_halves = fill // 2, int(_HALF_ROWS * rows)
    tokens = passed = np.int64(0)
    given = halves = place = 0
    while place < waiting or cursor < len(lengths):
        if place == waiting:
            if given >= rows and (tokens >= complete or passed >= beyond or halves >= most_halves):
                break
            pool[waiting] = cursor
            waiting += 1
            cursor += 1
        length = lengths[pool[place]]
        offered[place] = tokens + length <= most or given < rows
        if offered[place]:
            tokens += length
            given += 1
            halves += length > half
        else:
            passed += length
        place += 1
    return waiting, cursor


@compiled
def _place(lengths: Any, costs: Any, overdue: Any, ranks: int, fill: int, share: int) -> Any:
    """The row of each document, -1 for a deferred one: overdue documents first, and the longest first among both.

    A document goes to the cheapest row with room. Only an overdue document, or one alone in its row, may bring the
    cost of a row above `share`. A row that is too full for a document is parked until documents are short enough.
    """
    row_of = np.full(len(lengths), -1, dtype=np.int32)
    cost = np.zeros(ranks, dtype=np.int64)
    tokens = np.zeros(ranks, dtype=np.int64)
    for turn in (True, False):
        open_rows = [(cost[row], row) for row in range(ranks)]  # the cheapest on top
        heapify(open_rows)
        parked = [(tokens[row], row) for row in range(0)]  # the emptiest on top
        for position in range(len(lengths)):
            if overdue[position] != turn:
                continue
            length = lengths[position]
            while parked and parked[0][0] + length <= fill:
                row = heappop(parked)[1]
                heappush(open_rows, (cost[row], row))
            while open_rows and tokens[open_rows[0][1]] and tokens[open_rows[0][1]] + length > fill:
                row = heappop(open_rows)[1]
                heappush(parked, (tokens[row], row))
            if not open_rows:
                continue
            row = open_rows[0][1]
            if turn or not tokens[row] or cost[row] + costs[position] <= share:
                row_of[position] = row
                tokens[row] += length
                cost[row] += costs[position]
                heapreplace(open_rows, (cost[row], row))
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
def _even_out(lengths: Any, row_of: Any, own: Any, first: int, rows: int, fill: int) -> int:
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
    placed = _place(own_lengths, own_lengths, everything, rows, fill, _UNLIMITED)
    if placed.min() < 0:
        return fullest
    tokens[:] = 0
    for place in range(len(own)):
        tokens[placed[place]] += own_lengths[place]
    if tokens.max() < fullest:
        for place in range(len(own)):
            row_of[own[place]] = first + placed[place]
    return min(tokens.max(), fullest)

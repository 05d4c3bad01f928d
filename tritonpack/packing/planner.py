"""Plans the steps of an epoch, one after the other: full rows with about equal costs.

The planner offers each step a little more than it holds: first the documents that earlier steps deferred, then the
next ones of the shuffled stream. It passes over documents that would exceed the offer, so every step is offered the
same number of tokens. The longest documents of the offer are placed first, each in the cheapest row with room. The
documents that fit nowhere are deferred to the next step. Documents that were deferred twice are placed before all
others. So a document moves by two steps at most. Packing a whole epoch at once would destroy the order.

Then the rows trade documents. The costliest row gives up to two documents and gets up to two of a cheaper row, so that
about half the gap between their costs moves over and neither exceeds its room. Full rows can trade too, because two
pairs of documents may have equal lengths and different squares.

Costs are integers, so every machine computes the same plan.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.heuristics import compiled

PATIENCE = 2  # how many steps a document may be deferred
# Documents longer than half a row that a step is offered, per row. A row takes one; of more, some would wait too long.
_HALF_ROWS = 2
_CLOSE = 2.0**-11  # the share of a step that its offer may lack
_BEYOND = 0.1  # the largest share of a step that is passed over to complete its offer
_UNLIMITED = 2**62
# Of trades:
_TOLERANCE = 2.0**-11  # the gap, relative to the costliest row, at which two rows count as balanced
_PARTNERS = 8  # the cheapest rows that the costliest one tries to trade with before trading ends
_TRADES_PER_RANK = 4
_OFFERED = 24  # documents that a row offers, spread from its longest to its shortest
_GROUPS = 1 + _OFFERED + _OFFERED * (_OFFERED - 1) // 2  # none of them, one or two
_LOOKS = 4096  # pairs of groups that are compared for one trade
_NONE = -1


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
    count = len(lengths)
    step_of = np.full(count, -1, dtype=np.int32)
    rank_of = np.full(count, -1, dtype=np.int32)
    arrived = np.empty(count, dtype=np.int32)  # the turn that read a document from the stream
    pool = np.empty(count, dtype=np.int32)  # documents that were read and not placed, in the order of the stream
    offered = np.empty(count, dtype=np.bool_)  # for each of them, whether this step is offered it
    left = int(lengths.sum(dtype=np.int64))
    waiting = cursor = turn = step = 0
    while waiting or cursor < count:
        last = step == last_step
        fill = capacity if last else target
        steps = max(1, min(together, left // (ranks * fill)))
        if last_step is not None:
            steps = max(1, min(steps, last_step - step))
        rows = ranks * steps
        whole = rows * fill
        spare = int(lookahead * whole)
        offer = _UNLIMITED if last else whole + spare
        for last_offer in (False, True):
            limits = (offer - int(_CLOSE * whole), offer, int(_BEYOND * whole), _HALF_ROWS * rows)
            pooled, stop = _offer(lengths, pool, offered, waiting, cursor, rows, fill // 2, limits)
            arrived[cursor:stop] = turn
            documents = pool[:pooled][offered[:pooled]]
            documents = documents[np.argsort(-lengths[documents], kind="stable")]  # from long to short
            own_lengths, own_costs = lengths[documents].astype(np.int64), costs[documents]
            tokens, cost = int(own_lengths.sum()), int(own_costs.sum())
            # The share of a row is the cost of a full row of documents like the offered ones. If one document costs
            # more, the share is the cost of that document. The end of an epoch needs no limit.
            limited = level and (stop < count or tokens >= whole)
            share = max(int(cost / tokens * fill), int(own_costs.max())) if limited else _UNLIMITED
            row_of = _place(own_lengths, own_costs, turn - arrived[documents] >= PATIENCE, rows, fill, share)
            taken = int(own_lengths[row_of >= 0].sum())
            if last_offer or not limited or offer <= taken + spare + spare // 8:
                break
            offer = taken + spare  # rows that stop at their share hold fewer tokens: offer that number
        waiting, cursor = pooled, stop
        balance(own_lengths, own_costs, row_of, rows, fill)

        placed = row_of >= 0
        documents, row_of = documents[placed], row_of[placed]
        place = _in_stream_order(documents, row_of, rows)[row_of] if steps > 1 else row_of
        step_of[documents] = step + place // ranks
        rank_of[documents] = place % ranks
        kept = pool[:waiting][step_of[pool[:waiting]] < 0]
        waiting = len(kept)
        pool[:waiting] = kept
        left -= taken
        turn += 1
        step += steps
    return step_of, rank_of


def _in_stream_order(documents: NDArray[np.int32], row_of: NDArray[np.int32], rows: int) -> NDArray[np.int32]:
    """The place of each row when rows are sorted by the mean position of their documents in the stream."""
    middle = np.bincount(row_of, weights=documents, minlength=rows) / np.bincount(row_of, minlength=rows)
    place = np.empty(rows, dtype=np.int32)
    place[np.argsort(middle, kind="stable")] = np.arange(rows, dtype=np.int32)
    return place


@compiled
def _offer(
    lengths: Any, pool: Any, offered: Any, waiting: int, cursor: int, ranks: int, half: int, limits: Any
) -> tuple[int, int]:
    """Choose what a step is offered from the pool; documents of the stream are added to the pool as needed.

    Args:
        limits: the tokens at which the offer is complete; the tokens that it doesn't exceed, except to give every row
            a document; the tokens passed over that end it; the documents longer than `half` that end it.

    Returns:
        The number of documents in the pool now, and the position up to which the stream is read.
    """
    complete, most, beyond, most_halves = limits
    tokens = passed = np.int64(0)
    given = halves = place = 0
    while place < waiting or cursor < len(lengths):
        if place == waiting:
            if given >= ranks and (tokens >= complete or passed >= beyond or halves >= most_halves):
                break
            pool[waiting] = cursor
            waiting += 1
            cursor += 1
        length = lengths[pool[place]]
        offered[place] = tokens + length <= most or given < ranks
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
def balance(lengths: Any, costs: Any, row_of: Any, ranks: int, fill: int) -> None:
    """Narrow the gap between the costliest and the cheapest row by trading documents.

    Args:
        lengths: (documents,) int64, from long to short.
        costs: (documents,) int64, the longer the higher.
        row_of: (documents,) int32, the row of each document, -1 for none; changed in place.
        fill: tokens up to which a row may grow; a row that is longer already doesn't grow.
    """
    room = np.full(ranks, fill, dtype=np.int64)
    cost = np.zeros(ranks, dtype=np.int64)
    size = np.zeros(ranks, dtype=np.int64)  # documents of each row
    # The documents of each row come first, ascending, so from long to short; the rest is spare.
    held = np.empty((ranks, 2 * np.bincount(row_of + 1)[1:].max() + 2), dtype=np.int32)
    for document in range(len(lengths)):
        row = row_of[document]
        if row != _NONE:
            held[row, size[row]] = document
            size[row] += 1
            room[row] -= lengths[document]
            cost[row] += costs[document]
    by_cost = np.argsort(cost, kind="mergesort")
    # The groups that each row offers, by ascending tokens: two documents, their tokens, their cost. 0: not made yet.
    offers = np.empty((ranks, _GROUPS, 4), dtype=np.int64)
    num_offers = np.zeros(ranks, dtype=np.int64)
    deal = np.empty(4, dtype=np.int64)
    for _ in range(_TRADES_PER_RANK * ranks):
        dear = by_cost[-1]
        for partner in range(min(_PARTNERS, ranks - 1)):
            cheap = by_cost[partner]
            gap = cost[dear] - cost[cheap]
            if gap <= _TOLERANCE * cost[dear]:
                return
            if max(size[dear], size[cheap]) + 2 > held.shape[1]:
                continue
            for row in (dear, cheap):
                if num_offers[row] == 0:
                    num_offers[row] = _make_offers(held[row, : size[row]], lengths, costs, offers[row])
            dear_offers, cheap_offers = offers[dear, : num_offers[dear]], offers[cheap, : num_offers[cheap]]
            if not _find_deal(dear_offers, cheap_offers, room[dear], room[cheap], gap, deal):
                continue
            for place in range(4):
                document = deal[place]
                if document != _NONE:
                    giver, taker = (dear, cheap) if place < 2 else (cheap, dear)
                    _hand_over(held, size, document, giver, taker)
                    row_of[document] = taker
                    room[giver] += lengths[document]
                    room[taker] -= lengths[document]
                    cost[giver] -= costs[document]
                    cost[taker] += costs[document]
            num_offers[dear] = num_offers[cheap] = 0
            _settle(by_cost, cost)
            break
        else:
            return  # no row trades with the costliest


@compiled
def _make_offers(documents: Any, lengths: Any, costs: Any, offers: Any) -> int:
    """Write the groups of up to two documents that a row offers to `offers`, (groups, 4); return their number."""
    num_offered = min(len(documents), _OFFERED)
    offered = np.empty(num_offered + 1, dtype=np.int64)
    tokens = np.zeros(num_offered + 1, dtype=np.int64)
    cost = np.zeros(num_offered + 1, dtype=np.int64)
    for place in range(num_offered):
        offered[place] = documents[place * len(documents) // num_offered]
        tokens[place] = lengths[offered[place]]
        cost[place] = costs[offered[place]]
    offered[num_offered] = _NONE

    count = 0
    keys = np.empty(_GROUPS, dtype=np.int64)
    for first in range(num_offered + 1):
        for second in range(first + (first < num_offered), num_offered + 1):
            keys[count] = (tokens[first] + tokens[second]) << 16 | first << 8 | second
            count += 1
    keys = keys[:count]
    keys.sort()
    for group in range(count):
        first, second = (keys[group] >> 8) & 255, keys[group] & 255
        offers[group, 0] = offered[first]
        offers[group, 1] = offered[second]
        offers[group, 2] = keys[group] >> 16
        offers[group, 3] = cost[first] + cost[second]
    return count


@compiled
def _find_deal(dear: Any, cheap: Any, dear_room: int, cheap_room: int, gap: int, deal: Any) -> bool:
    """Write the trade that brings the costs of two rows closest to each other to `deal`; False if none does."""
    best = gap  # the gap after the trade
    looks = 0
    lowest = 0
    for mine in range(len(dear)):
        least = dear[mine, 2] - max(cheap_room, 0)
        most = dear[mine, 2] + max(dear_room, 0)
        while lowest < len(cheap) and cheap[lowest, 2] < least:
            lowest += 1
        theirs = lowest
        while theirs < len(cheap) and cheap[theirs, 2] <= most:
            distance = abs(gap - 2 * (dear[mine, 3] - cheap[theirs, 3]))
            if distance < best:
                best = distance
                deal[0], deal[1], deal[2], deal[3] = dear[mine, 0], dear[mine, 1], cheap[theirs, 0], cheap[theirs, 1]
            theirs += 1
        looks += theirs - lowest
        if best <= gap >> 3 or looks > _LOOKS:
            break
    return best < gap


@compiled
def _hand_over(held: Any, size: Any, document: int, giver: int, taker: int) -> None:
    """Move a document from the list of one row to the list of another; both stay ascending."""
    place = 0
    while held[giver, place] != document:
        place += 1
    size[giver] -= 1
    for later in range(place, size[giver]):
        held[giver, later] = held[giver, later + 1]
    place = size[taker]
    while place and held[taker, place - 1] > document:
        held[taker, place] = held[taker, place - 1]
        place -= 1
    held[taker, place] = document
    size[taker] += 1


@compiled
def _settle(by_cost: Any, cost: Any) -> None:
    """Sort rows by cost again after two of them have changed."""
    for place in range(1, len(by_cost)):
        row = by_cost[place]
        hole = place
        while hole and cost[by_cost[hole - 1]] > cost[row]:
            by_cost[hole] = by_cost[hole - 1]
            hole -= 1
        by_cost[hole] = row

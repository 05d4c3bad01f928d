"""The steps of an epoch, planned one after the other: full rows, equally expensive on every rank.

A step is offered a little more than it holds: documents that earlier steps deferred, then the next ones of the
shuffled stream, passing over those that would exceed the offer. So every step is offered the same, and what it defers,
the shortest of the offer, is the same for all. Of the offer, the longest go first, each to the cheapest rank with room
for it; what fits nowhere waits for the next step, and what has waited twice goes before all others. Then the ranks
trade documents (`rebalance.py`) while that narrows the gap between the costliest and the cheapest. So the stream's
order survives but for two steps, which packing a whole epoch at once would destroy.

Costs are whole numbers, so every machine computes the same plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.compiled import compiled
from tritonpack.packing.rebalance import balance

PATIENCE = 2  # steps that a document may be deferred
_HALF_ROWS = 2  # documents longer than half a row that a step is offered, per rank: it takes one each
_CLOSE = 2.0**-11  # the share of a step that its offer may lack
_BEYOND = 0.1  # the share of a step that is passed over, at most, to complete its offer
_UNLIMITED = 2**62


def plan_steps(
    lengths: NDArray[np.int32],
    costs: NDArray[np.int64],
    ranks: int,
    capacity: int,
    *,
    target: int,
    lookahead: float,
    together: int,
    last_step: int | None,
    level: bool,
    advance: Callable[[int], object] | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Plan steps until every document has its place.

    Args:
        lengths: (documents,) from 1 to `capacity`, in the order in which documents should be seen.
        costs: (documents,) at least 1.
        ranks: rows of a step.
        capacity: tokens that fit into a row.
        target: tokens up to which rows are filled, at most `capacity`; a single document may be longer.
        lookahead: the share of its tokens that a step is offered in addition.
        together: steps planned as one of so many times the rows, which are then divided among them.
        last_step: the step that is offered all that is left and whose rows are filled up to `capacity`.
        level: whether a row that has its share of the step's cost takes nothing more, however much room it has.
        advance: called after every step with the number of documents placed.

    Returns:
        step_of and rank_of, (documents,) each.
    """
    count = len(lengths)
    step_of = np.full(count, -1, dtype=np.int32)
    rank_of = np.full(count, -1, dtype=np.int32)
    arrived = np.empty(count, dtype=np.int32)  # the turn in which a document was come upon
    pool = np.empty(count, dtype=np.int32)  # documents that steps came upon and haven't placed, in the stream's order
    offered = np.empty(count, dtype=np.bool_)  # of those, whether to this step
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
            documents = _longest_first(pool[:pooled][offered[:pooled]], lengths)
            own_lengths, own_costs = lengths[documents].astype(np.int64), costs[documents]
            tokens, cost = int(own_lengths.sum()), int(own_costs.sum())
            # What a row costs that is full of documents like those offered, or the costliest of them alone, which the
            # step takes in any case. The rest of an epoch needs no limit.
            limited = level and (stop < count or tokens >= whole)
            share = max(int(cost / tokens * fill), int(own_costs.max())) if limited else _UNLIMITED
            row_of = _place(own_lengths, own_costs, turn - arrived[documents] >= PATIENCE, rows, fill, share)
            taken = int(own_lengths[row_of >= 0].sum())
            if last_offer or not limited or offer <= taken + spare + spare // 8:
                break
            offer = taken + spare  # rows that stop at their share hold less than a step: offer that instead
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
        if advance is not None:
            advance(len(documents))
    return step_of, rank_of


def _in_stream_order(documents: NDArray[np.int32], row_of: NDArray[np.int32], rows: int) -> NDArray[np.int32]:
    """Each row's place among rows by where in the stream their documents lie in the mean, which no length decides."""
    middle = np.bincount(row_of, weights=documents, minlength=rows) / np.bincount(row_of, minlength=rows)
    place = np.empty(rows, dtype=np.int32)
    place[np.argsort(middle, kind="stable")] = np.arange(rows, dtype=np.int32)
    return place


@compiled
def _offer(
    lengths: Any, pool: Any, offered: Any, waiting: int, cursor: int, ranks: int, half: int, limits: Any
) -> tuple[int, int]:
    """Choose what a step is offered from the pool and, added to it, the stream.

    Of documents longer than half a row each rank takes one a step, so an offer of more than two per rank would let some
    wait too long.

    Args:
        limits: the tokens at which the offer is complete, those that it doesn't exceed, but to give every rank a
            document; the tokens passed over and the documents longer than `half` that end it.

    Returns:
        The documents in the pool now, and up to where the stream is read.
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
def _longest_first(pool: Any, lengths: Any) -> Any:
    """Documents from long to short; of equally long ones the one that comes first in the stream."""
    keys = np.empty(len(pool), dtype=np.int64)
    for position in range(len(pool)):
        keys[position] = (np.int64(-lengths[pool[position]]) << 32) | np.int64(position)
    keys.sort()
    documents = np.empty(len(pool), dtype=np.int32)
    for position in range(len(pool)):
        documents[position] = pool[keys[position] & 0xFFFFFFFF]
    return documents


@compiled
def _place(lengths: Any, costs: Any, overdue: Any, ranks: int, fill: int, share: int) -> Any:
    """Each document's row, -1 where it has to wait: the overdue first, and among both the longest first.

    A document goes to the cheapest row with room. None but an overdue one, or one that is alone, brings a row's cost
    above `share`. A row that is too full for a document is parked until documents are short enough for it again, so
    each document costs a few moves in two heaps, however many ranks there are.
    """
    row_of = np.full(len(lengths), -1, dtype=np.int32)
    cost = np.zeros(ranks, dtype=np.int64)
    tokens = np.zeros(ranks, dtype=np.int64)
    open_rows = np.empty(ranks, dtype=np.int32)
    parked_rows = np.empty(ranks, dtype=np.int32)
    for turn in (True, False):
        num_open, num_parked = 0, 0
        for row in range(ranks):
            num_open = _push(open_rows, num_open, cost, row)
        for position in range(len(lengths)):
            if overdue[position] != turn:
                continue
            length = lengths[position]
            while num_parked and tokens[parked_rows[0]] + length <= fill:
                row, num_parked = _pop(parked_rows, num_parked, tokens)
                num_open = _push(open_rows, num_open, cost, row)
            while num_open and tokens[open_rows[0]] and tokens[open_rows[0]] + length > fill:
                row, num_open = _pop(open_rows, num_open, cost)
                num_parked = _push(parked_rows, num_parked, tokens, row)
            if not num_open:
                continue
            row = open_rows[0]
            if turn or not tokens[row] or cost[row] + costs[position] <= share:
                row_of[position] = row
                tokens[row] += length
                cost[row] += costs[position]
                _sink(open_rows, num_open, cost, 0)
    return row_of


@compiled
def _push(heap: Any, size: int, key: Any, row: int) -> int:
    """Add a row to a heap with the smallest key on top (of equal keys, the smallest row); its new size."""
    place = size
    while place:
        parent = (place - 1) >> 1
        if not _before(key, row, heap[parent]):
            break
        heap[place] = heap[parent]
        place = parent
    heap[place] = row
    return size + 1


@compiled
def _pop(heap: Any, size: int, key: Any) -> Any:
    """The row on top, taken out, and the heap's new size."""
    top = heap[0]
    heap[0] = heap[size - 1]
    _sink(heap, size - 1, key, 0)
    return top, size - 1


@compiled
def _sink(heap: Any, size: int, key: Any, place: int) -> None:
    """Restore the order below a place whose key has grown."""
    row = heap[place]
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and _before(key, heap[child + 1], heap[child]):
            child += 1
        if not _before(key, heap[child], row):
            break
        heap[place] = heap[child]
        place = child
    heap[place] = row


@compiled
def _before(key: Any, row: int, other: int) -> bool:
    return key[row] < key[other] or (key[row] == key[other] and row < other)

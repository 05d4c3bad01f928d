"""The steps of an epoch, planned one after the other: full rows, equally expensive on every rank.

A step is planned from a pool: documents that earlier steps deferred, then the next ones of the shuffled stream, a
little more than the step holds. The longest go first, each to the cheapest rank with room for it; what fits nowhere
waits for the next step, and what has waited twice goes before all others. Then the ranks trade documents
(`trading.py`) while that narrows the gap between the costliest and the cheapest. So the stream's order survives but for
two steps, which packing a whole epoch at once would destroy.

Costs are whole numbers, so every machine computes the same plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.trading import balance

PATIENCE = 2  # steps that a document may be deferred
_HALF_ROWS = 2  # documents longer than half a row that a pool may hold, per rank: a step takes one each
_UNLIMITED = 2**62


def plan_steps(
    lengths: NDArray[np.int32],
    costs: NDArray[np.int64],
    ranks: int,
    capacity: int,
    *,
    target: int,
    ahead: int,
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
        ahead: tokens that the pool holds beyond `ranks * target`.
        last_step: the step whose pool is all that is left and whose rows are filled up to `capacity`.
        level: whether a row that has its share of the step's cost takes nothing more, however much room it has.
        advance: called after every step with the number of documents placed.

    Returns:
        step_of and rank_of, (documents,) each.
    """
    count = len(lengths)
    step_of = np.full(count, -1, dtype=np.int32)
    rank_of = np.full(count, -1, dtype=np.int32)
    arrived = np.empty(count, dtype=np.int32)  # the step into whose pool a document came
    pool = np.empty(0, dtype=np.int32)
    cursor = step = 0
    while len(pool) or cursor < count:
        last = step == last_step
        fill = capacity if last else target
        stop = count if last else _pool_end(lengths, pool, cursor, ranks, ranks * fill + ahead, fill // 2)
        arrived[cursor:stop] = step
        pool = np.concatenate([pool, np.arange(cursor, stop, dtype=np.int32)])
        cursor = stop

        documents = _longest_first(pool, lengths)
        pool_lengths, pool_costs = lengths[documents].astype(np.int64), costs[documents]
        tokens, cost = int(pool_lengths.sum()), int(pool_costs.sum())
        # What a row costs that is full of documents like the pool's; a pool that can't fill its rows needs no limit.
        share = int(cost / tokens * fill) if level and tokens >= ranks * fill else _UNLIMITED
        row_of = _place(pool_lengths, pool_costs, step - arrived[documents] >= PATIENCE, ranks, fill, share)
        balance(pool_lengths, pool_costs, row_of, ranks, fill)

        placed = row_of >= 0
        step_of[documents[placed]] = step
        rank_of[documents[placed]] = row_of[placed]
        pool = pool[step_of[pool] < 0]
        step += 1
        if advance is not None:
            advance(int(placed.sum()))
    return step_of, rank_of


@numba.njit(cache=True, nogil=True)
def _pool_end(lengths: Any, deferred: Any, cursor: int, ranks: int, wanted: int, half: int) -> int:
    """Up to where a step's pool reads the stream: `wanted` tokens, but at least a document for every rank.

    Of documents longer than half a row each rank takes one a step, so a pool with more than two per rank would let
    some wait too long.
    """
    waiting = len(deferred)
    tokens = np.int64(0)
    halves = 0
    for document in deferred:
        tokens += lengths[document]
        halves += lengths[document] > half
    while cursor < len(lengths) and (waiting < ranks or (tokens < wanted and halves < _HALF_ROWS * ranks)):
        tokens += lengths[cursor]
        halves += lengths[cursor] > half
        waiting += 1
        cursor += 1
    return cursor


@numba.njit(cache=True, nogil=True)
def _longest_first(pool: Any, lengths: Any) -> Any:
    """The pool from long to short; of equally long documents the one that has waited longest comes first."""
    keys = np.empty(len(pool), dtype=np.int64)
    for position in range(len(pool)):
        keys[position] = (np.int64(-lengths[pool[position]]) << 32) | np.int64(position)
    keys.sort()
    documents = np.empty(len(pool), dtype=np.int32)
    for position in range(len(pool)):
        documents[position] = pool[keys[position] & 0xFFFFFFFF]
    return documents


@numba.njit(cache=True, nogil=True)
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


@numba.njit(cache=True, nogil=True)
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


@numba.njit(cache=True, nogil=True)
def _pop(heap: Any, size: int, key: Any) -> Any:
    """The row on top, taken out, and the heap's new size."""
    top = heap[0]
    heap[0] = heap[size - 1]
    _sink(heap, size - 1, key, 0)
    return top, size - 1


@numba.njit(cache=True, nogil=True)
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


@numba.njit(cache=True, nogil=True)
def _before(key: Any, row: int, other: int) -> bool:
    return key[row] < key[other] or (key[row] == key[other] and row < other)

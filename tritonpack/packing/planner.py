"""The steps of an epoch, planned one after the other, compiled by numba: full rows, equally expensive on every rank.

A step is planned from a pool: documents that earlier steps deferred, then the next ones of the shuffled stream, a
little more than the step holds. The longest go first, each to the cheapest rank with room for it; what fits nowhere
waits for the next step, and what has waited twice goes before all others. Then the ranks trade documents
(`trading.py`) while that narrows the gap between the costliest and the cheapest. So the stream's order survives but for
two steps, which packing a whole epoch at once would destroy.

Costs are whole numbers, `per_token * length + per_square * length**2`, so every machine computes the same plan.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from tritonpack.packing.trading import balance, cost_of

UNLIMITED = 2**62
PATIENCE = 2  # steps that a document may be deferred
_HALF_ROWS = 2  # documents longer than half a row that a pool may hold, per rank: a step takes one each


@numba.njit(cache=True, nogil=True)
def plan_steps(
    lengths: Any, ranks: int, capacity: int, target: int, ahead: int, last_step: int, weights: Any, level: bool
) -> Any:
    """Plan steps until every document has its place.

    Args:
        lengths: (documents,) int32, from 1 to `capacity`, in the order in which documents should be seen.
        ranks: rows of a step.
        capacity: tokens that fit into a row.
        target: tokens up to which rows are filled, at most `capacity`; a single document may be longer.
        ahead: tokens that the pool holds beyond `ranks * target`.
        last_step: the step whose pool is all that is left and whose rows are filled up to `capacity`; -1 for none.
        weights: (2,) int64, `per_token` and `per_square`.
        level: whether a row that has its share of the step's cost takes nothing more, however much room it has.

    Returns:
        step_of and rank_of, (documents,) int32 each.
    """
    count = len(lengths)
    step_of = np.full(count, -1, dtype=np.int32)
    rank_of = np.full(count, -1, dtype=np.int32)
    arrived = np.zeros(count, dtype=np.int32)  # the step into whose pool a document came
    pool = np.empty(count, dtype=np.int32)
    waiting = 0
    cursor = 0
    step = 0
    while waiting or cursor < count:
        fill = capacity if step == last_step else target
        tokens = np.int64(0)
        halves = 0
        for position in range(waiting):
            tokens += lengths[pool[position]]
            halves += 2 * lengths[pool[position]] > fill
        while cursor < count and (
            step == last_step or waiting < ranks or (tokens < ranks * fill + ahead and halves < _HALF_ROWS * ranks)
        ):
            arrived[cursor] = step
            tokens += lengths[cursor]
            halves += 2 * lengths[cursor] > fill
            pool[waiting] = cursor
            waiting += 1
            cursor += 1

        documents = _longest_first(pool[:waiting], lengths)
        sorted_lengths = np.empty(waiting, dtype=np.int64)
        overdue = np.empty(waiting, dtype=np.bool_)
        for position in range(waiting):
            sorted_lengths[position] = lengths[documents[position]]
            overdue[position] = step - arrived[documents[position]] >= PATIENCE
        share = _fair_share(sorted_lengths, ranks, fill, weights) if level else UNLIMITED
        row_of = _place(sorted_lengths, overdue, ranks, fill, weights, share)
        balance(sorted_lengths, row_of, ranks, fill, weights)
        for position in range(waiting):
            if row_of[position] >= 0:
                step_of[documents[position]] = step
                rank_of[documents[position]] = row_of[position]
        still = 0
        for position in range(waiting):
            if step_of[pool[position]] < 0:
                pool[still] = pool[position]
                still += 1
        waiting = still
        step += 1
    return step_of, rank_of


@numba.njit(cache=True, nogil=True)
def _fair_share(lengths: Any, ranks: int, fill: int, weights: Any) -> int:
    """What a row of `fill` tokens costs if it is like the pool as a whole, or, of a smaller pool, each rank's part."""
    cost = np.int64(0)
    tokens = np.int64(0)
    for length in lengths:
        cost += cost_of(length, weights)
        tokens += length
    return np.int64(min(cost / tokens * fill, cost / ranks))


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
def _place(lengths: Any, overdue: Any, ranks: int, fill: int, weights: Any, share: int) -> Any:
    """Each document's row, -1 where no row has room: the overdue first, and among both the longest first.

    No document but an overdue one brings a row's cost above `share`, unless it is alone.

    A row that is too full for a document is parked until documents are short enough for it again, so each document
    costs a few moves in two heaps, however many ranks there are.
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
            price = cost_of(length, weights)
            while num_parked and tokens[parked_rows[0]] + length <= fill:
                row, num_parked = _pop(parked_rows, num_parked, tokens)
                num_open = _push(open_rows, num_open, cost, row)
            while num_open and tokens[open_rows[0]] and tokens[open_rows[0]] + length > fill:
                row, num_open = _pop(open_rows, num_open, cost)
                num_parked = _push(parked_rows, num_parked, tokens, row)
            if num_open and (turn or not tokens[open_rows[0]] or cost[open_rows[0]] + price <= share):
                row = open_rows[0]
                row_of[position] = row
                tokens[row] += length
                cost[row] += price
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

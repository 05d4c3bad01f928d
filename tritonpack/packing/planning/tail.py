"""The end of an epoch: which documents make a last step, and how every rank gets a document in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Tail = Literal["drop", "spread", "keep"]

FULL = 0.95  # tail="drop" keeps a last step that is filled to this share
# Under "spread" a step may hold this many times its part of all tokens. The values are tried in this order: smaller
# ones make more equal steps, and more often leave documents over.
_SLACK = (1.002, 1.005, 1.01, 1.02, 1.05, 1.1)
_TRIES = 200_000  # rooms that a search for a packing looks at


def check_tail(lengths: NDArray[Any], capacity: int, num_ranks: int, tail: Tail) -> None:
    """ValueError if `tail="drop"` leaves out every document. This depends on the lengths alone, not on their order."""
    tokens = int(lengths.sum(dtype=np.int64))
    if tail == "drop" and tokens < FULL * num_ranks * capacity:
        raise ValueError(
            f"{tokens} tokens don't fill one step of {num_ranks} ranks with {capacity} tokens each to {FULL:.0%}, and "
            "tail='drop' leaves out what doesn't. Use tail='keep' or 'spread', fewer ranks or shorter rows."
        )


def drop_last_step(step_of: NDArray[np.int32], lengths: NDArray[np.int32], capacity: int, num_ranks: int) -> int:
    """The number of steps without a last one that isn't full; at least 1 after `check_tail`."""
    last = int(step_of.max())
    tokens = int(lengths[step_of == last].sum(dtype=np.int64))
    return last + (tokens >= FULL * num_ranks * capacity)


def spread(
    steps: Callable[..., Any], lengths: NDArray[np.int32], capacity: int, num_ranks: int, least_steps: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Plan all documents in as few steps as found, but at least `least_steps`, about equally full.

    Args:
        steps: `plan_steps` without `target` and `last_step`.

    Returns:
        step_of and rank_of, as `plan_steps` returns them.
    """
    tokens = int(lengths.sum(dtype=np.int64))
    num_steps = max(-(-tokens // (num_ranks * capacity)), min(least_steps, len(lengths) // num_ranks))
    while True:
        part = -(-tokens // (num_ranks * num_steps))
        for target in [int(part * slack) for slack in _SLACK if part * slack < capacity] + [capacity]:
            step_of, rank_of = steps(target=target, last_step=num_steps - 1)
            needed = int(step_of.max()) + 1
            if needed <= num_steps:
                return step_of, rank_of
        num_steps = needed  # the number of steps with full rows


def whole_steps(
    rows: NDArray[np.int64], lengths: NDArray[np.int32], capacity: int, num_ranks: int, least_steps: int
) -> tuple[NDArray[np.int64], int, int]:
    """Give every rank a document in the last step, and in the steps that are missing to `least_steps`.

    The missing documents come from rows with more than one, from the latest steps first. Where no row has more than
    one, the shortest documents are packed together, if that saves a step. Where it doesn't, rows of the last ranks stay
    empty.

    Args:
        rows: (documents,) `step * num_ranks + rank` of each document, in the order of the stream. Only rows of the last
            step may be empty.
        lengths: (documents,) from 1 to `capacity`.

    Returns:
        Their rows now, the number of steps, and the number of empty rows.

    Raises:
        ValueError: too few documents for `least_steps`.
    """
    num_steps = int(rows.max()) // num_ranks + 1
    most = len(rows) // num_ranks  # steps in which every row has a document
    if 0 < most < num_steps:
        packed = _in_rows(lengths, most * num_ranks, capacity)
        if packed is not None:
            rows, num_steps = packed, most
    if num_steps < least_steps and least_steps * num_ranks >= len(rows) + num_ranks:
        raise ValueError(
            f"{len(rows)} documents can't make least_steps={least_steps} steps in which each of {num_ranks} ranks has "
            "one. Ask for fewer steps, use fewer ranks or more documents."
        )
    num_steps = max(num_steps, least_steps)
    num_rows = num_steps * num_ranks
    held = np.bincount(rows, minlength=num_rows)
    empty = np.flatnonzero(held == 0)
    if len(empty):
        rows = rows.copy()
        given = _spare_documents(rows, lengths, held, num_ranks, len(empty))
        rows[given] = empty[: len(given)]
        # The rows that are still empty go to the last ranks.
        place = np.arange(num_rows)
        order = np.argsort(np.bincount(rows, minlength=num_rows)[-num_ranks:] == 0, kind="stable")
        place[num_rows - num_ranks + order] = np.arange(num_rows - num_ranks, num_rows)
        rows = place[rows]
    return rows, num_steps, max(0, num_rows - len(rows))


def _spare_documents(
    rows: NDArray[np.int64], lengths: NDArray[np.int32], held: NDArray[np.int64], num_ranks: int, missing: int
) -> NDArray[np.int64]:
    """Up to `missing` documents of rows with more than one: from the latest steps and there from the fullest rows."""
    spare = np.maximum(held - 1, 0).reshape(-1, num_ranks).sum(axis=1)  # by step
    steps = min(int(np.searchsorted(np.cumsum(spare[::-1]), missing)) + 1, len(spare))  # enough of the latest steps
    documents = np.flatnonzero(rows >= (len(spare) - steps) * num_ranks)
    documents = documents[np.lexsort((-documents, rows[documents]))]  # by row, the latest of the stream first
    row = rows[documents]
    turn = np.arange(len(row)) - np.searchsorted(row, row)  # 0 for the document that its row gives first
    tokens = np.bincount(rows, weights=lengths)[row]
    order = np.lexsort((-tokens, turn, -(row // num_ranks)))
    return documents[order[turn[order] < held[row[order]] - 1]][:missing]


def _in_rows(lengths: NDArray[np.int32], num_rows: int, capacity: int) -> NDArray[np.int64] | None:
    """The rows of documents in at most `num_rows` rows, fewer than documents and more than half; None if not found.

    Rows come in the order of their first documents. `len(lengths) - num_rows` documents must join a row of others. If
    this is possible at all, it is possible within twice as many of the shortest documents.
    """
    joined = len(lengths) - num_rows
    shortest = np.argsort(lengths, kind="stable")[: 2 * joined][::-1]
    bins = _fit(lengths[shortest].tolist(), joined, capacity)
    if bins is None:
        return None
    row = np.arange(len(lengths))
    row[shortest] = len(lengths) + np.array(bins, dtype=np.int64)
    _, first, row = np.unique(row, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[row]


def _fit(lengths: list[int], num_bins: int, capacity: int) -> list[int] | None:
    """The bin of each document, found by a depth-first search; None if there is none, or none was found in time.

    The first branch of the search is best-fit-decreasing.

    Args:
        lengths: from long to short.
    """
    if sum(lengths) > num_bins * capacity:
        return None
    room = [capacity] * num_bins
    bins: list[int] = []

    def choices() -> Iterator[int]:
        length = lengths[len(bins)]
        fitting = {each: place for place, each in enumerate(room) if each >= length}  # one of bins with equal room
        return iter([fitting[each] for each in sorted(fitting)])

    if not lengths:
        return bins
    left = [choices()]
    for _ in range(max(2 * len(lengths), _TRIES // num_bins)):
        chosen = next(left[-1], None)
        if chosen is not None:
            room[chosen] -= lengths[len(bins)]
            bins.append(chosen)
            if len(bins) == len(lengths):
                return bins
            left.append(choices())
            continue
        left.pop()
        if not left:
            return None
        chosen = bins.pop()
        room[chosen] += lengths[len(bins)]
    return None

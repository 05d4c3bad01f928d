"""The end of an epoch: which documents make a last step, and how every rank gets a document in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.lengths import count

Tail = Literal["drop", "spread", "keep"]
Takes = NDArray[np.int64]  # (units, resources) what units take of a row; the first resource is tokens
Limits = NDArray[np.int64]  # (resources,) what a row holds

FULL = 0.95  # tail="drop" keeps a last step that is filled to this share
_RESERVES = (0.01, 0.05)  # shares of its part that the last step may lack under "spread", tried in this order
_TRIES = 200_000  # rooms that a search for a packing looks at
_MOST_SEARCHED = 256  # units that it may move if rows hold more than tokens


def is_full(takes: Takes, limits: Limits, num_ranks: int) -> bool:
    """Whether units fill a step: they take 95% of one of its resources."""
    return bool(((takes.sum(axis=0) >= FULL * num_ranks * limits) & (limits > 0)).any())


def check_tail(takes: Takes, limits: Limits, num_ranks: int, tail: Tail) -> None:
    """ValueError if `tail="drop"` leaves out every unit. This depends on what units take alone, not on their order."""
    if tail == "drop" and not is_full(takes, limits, num_ranks):
        raise ValueError(
            f"{count(takes[:, 0].sum(), 'token')} can't fill one step of {count(num_ranks, 'rank')} with "
            f"{count(limits[0], 'token')} each to {FULL:.0%}, and tail='drop' leaves out what doesn't. Use tail='keep' "
            "or 'spread', fewer ranks or shorter rows."
        )


def spread(
    steps: Callable[..., NDArray[np.int64]], takes: Takes, limits: Limits, num_ranks: int, least_steps: int
) -> NDArray[np.int64]:
    """Plan all units in as few steps as found, but at least `least_steps`, about equally full of the scarcest resource.

    Full rows tell how many steps are needed; then all but the last step get rows that are just large enough. If no such
    plan is found, the rows stay full.

    Args:
        steps: plans with limits of rows, the scarcest one of which is smaller in steps before `last_step`.

    Returns:
        The row of each unit, `step * num_ranks + rank`.
    """
    rows = steps(limits)
    num_steps = int(rows.max()) // num_ranks + 1
    totals = takes.sum(axis=0)
    scarce = int(np.argmax(totals / limits))
    amounts = takes[:, scarce]
    full = amounts[rows < (num_steps - 1) * num_ranks].sum() / max(num_steps - 1, 1)  # what a step of full rows holds
    wanted = max(num_steps, min(least_steps, len(takes) // num_ranks))
    for reserve in _RESERVES if full else ():
        part = totals[scarce] / (wanted - reserve) / full
        smaller = limits.copy()
        smaller[scarce] = max(int(part * limits[scarce]), amounts.max() if scarce else 1)
        found = steps(smaller, last_step=wanted - 1) if part < 1 else rows
        if int(found.max()) < wanted * num_ranks:
            return found
    return rows


def whole_steps(
    rows: NDArray[np.int64], takes: Takes, limits: Limits, num_ranks: int, least_steps: int
) -> tuple[NDArray[np.int64], int, int]:
    """Give every rank a document in the last step, and in the steps that are missing to `least_steps`.

    The missing documents come from rows with more than one, from the latest steps first. Where no row has more than
    one, the shortest documents are packed together, if that saves a step. Where it doesn't, rows of the last ranks stay
    empty.

    Args:
        rows: (documents,) `step * num_ranks + rank` of each document. Only rows of the last step may be empty.

    Returns:
        Their rows now, the number of steps, and the number of empty rows.

    Raises:
        ValueError: too few documents for `least_steps`.
    """
    num_steps = int(rows.max()) // num_ranks + 1
    most = len(rows) // num_ranks  # steps in which every row has a document
    if 0 < most < num_steps:
        packed = _in_rows(takes, limits, most * num_ranks)
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
        given = _spare_documents(rows, takes[:, 0], held, num_ranks, len(empty))
        rows[given] = empty[: len(given)]
        # The rows that are still empty go to the last ranks.
        place = np.arange(num_rows)
        order = np.argsort(np.bincount(rows, minlength=num_rows)[-num_ranks:] == 0, kind="stable")
        place[num_rows - num_ranks + order] = np.arange(num_rows - num_ranks, num_rows)
        rows = place[rows]
    return rows, num_steps, max(0, num_rows - len(rows))


def _spare_documents(
    rows: NDArray[np.int64], lengths: NDArray[np.int64], held: NDArray[np.int64], num_ranks: int, missing: int
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


def _in_rows(takes: Takes, limits: Limits, num_rows: int) -> NDArray[np.int64] | None:
    """The rows of units in at most `num_rows` rows, fewer than units and more than half; None if not found.

    Rows come in the order of their first units. `len(takes) - num_rows` units must join a row of others. If rows hold
    tokens alone, and this is possible at all, it is possible within twice as many of the shortest units. Two large
    units may share a row if they take different resources, so then more and more units are tried.
    """
    count = len(takes)
    joined = count - num_rows
    smallest = np.argsort((takes / limits).max(axis=1), kind="stable")
    most = min(count, _MOST_SEARCHED) if len(limits) > 1 else 2 * joined
    tried = 2 * joined
    while True:
        chosen = smallest[:tried][::-1]
        bins = _fit(takes[chosen].tolist(), tried - joined, limits.tolist())
        if bins is not None or tried >= most:
            break
        tried = min(2 * tried, most)
    if bins is None:
        return None
    row = np.arange(count)
    row[chosen] = count + np.array(bins, dtype=np.int64)
    _, first, row = np.unique(row, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[row]


def _fit(takes: list[list[int]], num_bins: int, limits: list[int]) -> list[int] | None:
    """The bin of each unit, found by a depth-first search; None if there is none, or none was found in time.

    The first branch of the search is best-fit-decreasing.

    Args:
        takes: what each unit takes of each resource, from large to small.
        limits: what a bin holds of each resource.
    """
    if any(sum(column) > num_bins * most for column, most in zip(zip(*takes, strict=True), limits, strict=True)):
        return None
    room = [list(limits) for _ in range(num_bins)]
    bins: list[int] = []

    def choices() -> Iterator[int]:
        fitting = {  # one of bins with equal room
            tuple(each): place
            for place, each in enumerate(room)
            if all(has >= needs for has, needs in zip(each, takes[len(bins)], strict=True))
        }
        return iter([fitting[each] for each in sorted(fitting)])

    def change(place: int, sign: int) -> None:
        room[place] = [has + sign * needs for has, needs in zip(room[place], takes[len(bins)], strict=True)]

    left = [choices()]
    for _ in range(max(2 * len(takes), _TRIES // num_bins)):
        place: Any = next(left[-1], None)
        if place is not None:
            change(place, -1)
            bins.append(place)
            if len(bins) == len(takes):
                return bins
            left.append(choices())
            continue
        left.pop()
        if not left:
            return None
        place = bins.pop()
        change(place, 1)
    return None

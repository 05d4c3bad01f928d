"""The end of an epoch: which documents make a last step, and how every rank gets a document in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.lengths import count

Tail = Literal["drop", "spread", "keep"]
Tokens = NDArray[np.int64]  # (units,) the tokens of units

FULL = 0.95  # tail="drop" keeps a last step that is filled to this share
_RESERVES = (0.01, 0.05)  # shares of its part that the last step may lack under "spread", tried in this order
_TRIES = 200_000  # rooms that a search for a packing looks at


def is_full(tokens: Tokens, capacity: int, num_ranks: int) -> bool:
    """Return whether units fill a step to 95%."""
    return bool(tokens.sum() >= FULL * num_ranks * capacity)


def check_tail(tokens: Tokens, capacity: int, num_ranks: int, tail: Tail) -> None:
    """ValueError if `tail="drop"` leaves out every unit."""
    if tail == "drop" and not is_full(tokens, capacity, num_ranks):
        raise ValueError(
            f"{count(tokens.sum(), 'token')} can't fill one step of {count(num_ranks, 'rank')} with "
            f"{count(capacity, 'token')} each to {FULL:.0%}, and tail='drop' leaves out what doesn't. Use tail='keep' "
            "or 'spread', fewer ranks or shorter rows."
        )


def spread(
    steps: Callable[..., NDArray[np.int64]], tokens: Tokens, capacity: int, num_ranks: int, least_steps: int
) -> NDArray[np.int64]:
    """The row of each unit, `step * num_ranks + rank`, in as few steps as found, which are about equally full.

    Full rows tell how many steps are needed; then all but the last step get rows that are just large enough, if a plan
    is found. `steps` plans with rows of a capacity, which is smaller in steps before `last_step`.
    """
    rows = steps(capacity)
    num_steps = int(rows.max()) // num_ranks + 1
    full = tokens[rows < (num_steps - 1) * num_ranks].sum() / max(num_steps - 1, 1)  # what a step of full rows holds
    wanted = max(num_steps, min(least_steps, len(tokens) // num_ranks))
    for reserve in _RESERVES if full else ():
        part = tokens.sum() / (wanted - reserve) / full
        found = steps(max(int(part * capacity), 1), last_step=wanted - 1) if part < 1 else rows
        if int(found.max()) < wanted * num_ranks:
            return found
    return rows


def whole_steps(
    rows: NDArray[np.int64], tokens: Tokens, capacity: int, num_ranks: int, least_steps: int
) -> tuple[NDArray[np.int64], int, int]:
    """Give every rank a document in the last step, and in the steps that are missing to `least_steps`.

    The missing documents come from rows with more than one, from the latest steps first. Where no row has more than
    one, the shortest documents are packed together, if that saves a step. Where it doesn't, rows of the last ranks stay
    empty. Before, only rows of the last step may be empty.

    Returns:
        The row of each document, the number of steps, and the number of empty rows.

    Raises:
        ValueError: too few documents for `least_steps`.
    """
    num_steps = int(rows.max()) // num_ranks + 1
    most = len(rows) // num_ranks  # steps in which every row has a document
    if 0 < most < num_steps:
        packed = _in_rows(tokens, capacity, most * num_ranks)
        if packed is not None:
            rows, num_steps = packed, most
    if num_steps < least_steps and least_steps * num_ranks >= len(rows) + num_ranks:
        few = f"{len(rows)} documents can't make least_steps={least_steps} steps in which each of {num_ranks} ranks has"
        raise ValueError(f"{few} one. Ask for fewer steps, or use fewer ranks.")
    num_steps = max(num_steps, least_steps)
    num_rows = num_steps * num_ranks
    held = np.bincount(rows, minlength=num_rows)
    empty = np.flatnonzero(held == 0)
    if len(empty):
        rows = rows.copy()
        given = _spare_documents(rows, tokens, held, num_ranks, len(empty))
        rows[given] = empty[: len(given)]
        # The rows that are still empty go to the last ranks.
        place = np.arange(num_rows)
        order = np.argsort(np.bincount(rows, minlength=num_rows)[-num_ranks:] == 0, kind="stable")
        place[num_rows - num_ranks + order] = np.arange(num_rows - num_ranks, num_rows)
        rows = place[rows]
    return rows, num_steps, max(0, num_rows - len(rows))


def _spare_documents(
    rows: NDArray[np.int64], tokens: Tokens, held: NDArray[np.int64], num_ranks: int, missing: int
) -> NDArray[np.int64]:
    """Up to `missing` documents of rows with more than one: from the latest steps and there from the fullest rows."""
    spare = np.maximum(held - 1, 0).reshape(-1, num_ranks).sum(axis=1)  # by step
    steps = min(int(np.searchsorted(np.cumsum(spare[::-1]), missing)) + 1, len(spare))  # enough of the latest steps
    documents = np.flatnonzero(rows >= (len(spare) - steps) * num_ranks)
    documents = documents[np.lexsort((-documents, rows[documents]))]  # by row, the latest of the stream first
    row = rows[documents]
    turn = np.arange(len(row)) - np.searchsorted(row, row)  # 0 for the document that its row gives first
    of_row = np.bincount(rows, weights=tokens)[row]
    order = np.lexsort((-of_row, turn, -(row // num_ranks)))
    return documents[order[turn[order] < held[row[order]] - 1]][:missing]


def _in_rows(tokens: Tokens, capacity: int, num_rows: int) -> NDArray[np.int64] | None:
    """The row of each unit in `num_rows` rows, of fewer than units and more than half; None if not found.

    Rows come in the order of their first units. `len(tokens) - num_rows` units must join others. If this is possible,
    it is possible within twice as many of the shortest units.
    """
    joined = len(tokens) - num_rows
    chosen = np.argsort(tokens, kind="stable")[: 2 * joined][::-1]
    bins = _fit(tokens[chosen].tolist(), joined, capacity)
    if bins is None:
        return None
    row = np.arange(len(tokens))
    row[chosen] = len(tokens) + np.array(bins, dtype=np.int64)
    _, first, row = np.unique(row, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[row]


def _fit(tokens: list[int], num_bins: int, capacity: int) -> list[int] | None:
    """The bin of each unit, from large to small, by a depth-first search; None if none is found in _TRIES.

    The first branch of the search is best-fit-decreasing.
    """
    if sum(tokens) > num_bins * capacity:
        return None
    room = [capacity] * num_bins
    bins: list[int] = []

    def choices() -> Iterator[int]:
        place_of = {has: place for place, has in enumerate(room) if has >= tokens[len(bins)]}  # one of equal bins
        return iter([place_of[has] for has in sorted(place_of)])

    left = [choices()]
    for _ in range(max(2 * len(tokens), _TRIES // num_bins)):
        place = next(left[-1], None)
        if place is not None:
            room[place] -= tokens[len(bins)]
            bins.append(place)
            if len(bins) == len(tokens):
                return bins
            left.append(choices())
            continue
        left.pop()
        if not left:
            return None
        place = bins.pop()
        room[place] += tokens[len(bins)]
    return None


def whole_rounds(bins: list[list[int]], held: Mapping[int, Any], ranks: int) -> list[list[int]]:
    """The last bins, halved until every rank has the same number of them, if they hold enough documents for that."""
    missing = -len(bins) % ranks
    if len(bins) + missing > sum(map(len, bins)):
        return bins
    for _ in range(missing):
        tokens = [sum(held[item][1] for item in items) if len(items) > 1 else 0 for items in bins]
        at = int(np.argmax(tokens))  # the fullest
        ends = np.cumsum([held[item][1] for item in bins[at]])
        cut = 1 + int(np.argmin(np.abs(ends[:-1] - ends[-1] / 2)))
        bins = [*bins[:at], bins[at][:cut], bins[at][cut:], *bins[at + 1 :]]
    return bins

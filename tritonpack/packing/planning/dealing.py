"""Divides the rows of each group of steps among its steps, and evens out the tokens of rows that can't be full."""

from __future__ import annotations

from typing import Any

import numpy as np

from tritonpack.packing.heuristics import compiled
from tritonpack.packing.planning.planner import has_room, update

# Shares of a step's tokens, as divisors:
_UNEVEN = 64  # rows whose fullest is so much fuller than their mean are evened out
_CROWDED = 16  # rows that hold so much more than the mean row share steps, if they are at most this share of the rows
_HALF_EMPTY = 16  # groups of steps that leave more open are evened out before they are divided
# The steps of a group may differ in their mean lengths by this many times the variance of random steps.
_CHANCE = 1.0
_UNLIMITED = 2**62
_ROW_BITS = 26  # 64 steps of 2**20 ranks
_ROW = 2**_ROW_BITS - 1


@compiled
def divide(
    lengths: Any, others: Any, rows: Any, order: Any, groups: Any, ranks: int, budgets: Any, level: bool
) -> Any:  # fmt: skip
    """Give each step of a group its rows, and even out rows that aren't full unless they are `level`, in place.

    Args:
        lengths, others: (units,) and (units, resources), as in `Demands`.
        rows, order, groups: those of `fill_steps`; `rows` is changed.

    Returns:
        The tokens up to which the rows of each step may grow, (steps,).
    """
    fills = np.empty(groups[-1, 1] + groups[-1, 2], dtype=np.int64)
    for group in range(len(groups)):
        begin, step, steps, fill = groups[group]
        end = groups[group + 1, 0] if group + 1 < len(groups) else len(order)
        units, first = order[begin:end], step * ranks
        row_of, own_lengths = np.empty(len(units), dtype=np.int32), np.empty(len(units), dtype=np.int64)
        taken = np.int64(0)
        for place in range(len(units)):
            row_of[place], own_lengths[place] = rows[units[place]] - first, lengths[units[place]]
            taken += own_lengths[place]
        fills[step : step + steps] = fill
        whole = ranks * steps * fill
        if steps > 1:
            uneven = not level and taken < whole - whole // _HALF_EMPTY
            if uneven:
                _even_out(own_lengths, others, units, row_of, np.arange(len(units)), 0, ranks * steps, fill, budgets)
            _deal(own_lengths, units, row_of, ranks * steps, ranks, uneven)
        if not level and ranks > 1 and taken < whole - whole // _UNEVEN:
            by_step, starts = _group(row_of, ranks, steps)
            for number in range(steps):
                own = by_step[starts[number] : starts[number + 1]]
                fills[step + number] = _even_out(
                    own_lengths, others, units, row_of, own, number * ranks, ranks, fill, budgets
                )
        for place in range(len(units)):
            rows[units[place]] = first + row_of[place]
    return fills


@compiled
def _deal(lengths: Any, documents: Any, row_of: Any, rows: int, ranks: int, uneven: bool) -> None:
    """Divide the rows of a group among its steps, in place, so that steps differ in their mean lengths as by chance.

    Similar rows in one step have similar costs, but make steps of long documents and steps of short ones. So divisions
    are tried in this order, until one is as even as chance: first by the rows' mean lengths, then more and more by
    their places in the stream, at last with equally many rows of each stratum, where strata are ranges of mean lengths.
    A row's place is that of one of its documents, drawn by a hash: the mean place, or that of the longest document,
    would collect rows of some lengths at the begin or in the middle.

    All ranks wait for the fullest row of a step. So if rows can't be full, but a few hold much more than the others,
    these few share steps: as many of them in a step as is possible with steps that differ as by chance.

    Args:
        lengths, documents: (documents,) from long to short, and their places in the stream.
        uneven: whether rows can't be full, and were evened out.
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
    count, taken = size.sum(), tokens.sum()
    mean = taken / count
    # Sorts are of integers with the row in their last bits, which is fast and the same everywhere.
    by_mean, by_place = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.int64)
    for row in range(rows):
        by_mean[row] = (tokens[row] * 64 // size[row]) << _ROW_BITS | row
        by_place[row] = place_of[row] << _ROW_BITS | row
    by_mean.sort()
    by_place.sort()
    by_mean &= _ROW
    rank_by_mean, rank_by_place = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.int64)
    for rank in range(rows):
        rank_by_mean[by_mean[rank]] = rank_by_place[by_place[rank] & _ROW] = rank
    crowded = tokens * rows > taken + taken // _CROWDED
    number = np.empty(rows, dtype=np.int64)
    # The variance of the steps' mean lengths, as a sum over steps: by chance, and as it is.
    chance = between = 0.0
    few = uneven and 0 < crowded.sum() <= rows // _CROWDED
    together = ranks if few else 0  # crowded rows that may share a step
    while True:
        strata, weight = 1, 32 if ranks > 1 else 0
        while True:
            _deal_strata(by_mean, rank_by_mean, rank_by_place, strata, weight, ranks, number)
            _gather(number, crowded, ranks, together)
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
        if between <= _CHANCE * chance or not together:
            break
        together //= 2
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
def _deal_strata(
    by_mean: Any, rank_by_mean: Any, rank_by_place: Any, strata: int, weight: int, ranks: int, number: Any
) -> None:  # fmt: skip
    """Write `step * ranks + rank` of each row to `number`: equally many rows of each stratum for every step.

    Args:
        by_mean: (rows,) rows by their mean lengths.
        rank_by_mean, rank_by_place: (rows,) the place of each row in `by_mean`, and in the order of places.
        weight: how much mean lengths count within a stratum; places count 8.
    """
    steps = len(by_mean) // ranks
    for stratum in range(strata):
        first, last = stratum * ranks // strata, (stratum + 1) * ranks // strata  # the ranks that get its rows
        own = by_mean[first * steps : last * steps]
        keys = np.empty(len(own), dtype=np.int64)
        for place in range(len(own)):
            row = own[place]
            keys[place] = (8 * rank_by_place[row] + weight * rank_by_mean[row]) << _ROW_BITS | place
        keys.sort()
        for place in range(len(own)):
            row = own[keys[place] & _ROW]
            number[row] = place // (last - first) * ranks + first + place % (last - first)


@compiled
def _gather(number: Any, crowded: Any, ranks: int, together: int) -> None:
    """Interchange rows between steps, in place, so that few steps have crowded rows, each at most `together` of them.

    The steps that have most of them already get the others.
    """
    if not together:
        return
    steps = len(number) // ranks
    row_at = np.empty(len(number), dtype=np.int64)
    in_step = np.zeros(steps, dtype=np.int64)
    for row in range(len(number)):
        row_at[number[row]] = row
        in_step[number[row] // ranks] += crowded[row]
    by_number = np.argsort(-in_step, kind="mergesort")
    giver, taker = steps - 1, 0  # places in `by_number`
    while giver > taker:
        give, take = by_number[giver], by_number[taker]
        if not in_step[give]:
            giver -= 1
        elif in_step[take] >= together:
            taker += 1
        else:
            there, here = give * ranks, take * ranks
            while not crowded[row_at[there]]:
                there += 1
            while crowded[row_at[here]]:
                here += 1
            row_at[there], row_at[here] = row_at[here], row_at[there]
            number[row_at[there]], number[row_at[here]] = there, here
            in_step[give] -= 1
            in_step[take] += 1


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
def _even_out(
    lengths: Any, others: Any, units: Any, row_of: Any, own: Any, first: int, rows: int, fill: int, budgets: Any
) -> int:  # fmt: skip
    """Place units of rows that aren't full anew, so that rows hold more equal numbers of tokens, in place.

    The ranks of a step wait for the fullest row.

    Args:
        lengths, units, row_of: those of a group.
        own: places in these arrays, those of the rows from `first` on, from large to small.

    Returns:
        The tokens up to which rows may grow.
    """
    tokens = np.zeros(rows, dtype=np.int64)
    for place in own:
        tokens[row_of[place] - first] += lengths[place]
    fullest = tokens.max()
    if rows * fullest - tokens.sum() <= rows * fullest // _UNEVEN or len(own) <= rows:
        return fullest
    tokens[:] = 0
    used = np.zeros((rows, len(budgets)), dtype=np.int64)
    placed = np.empty(len(own), dtype=np.int32)
    leaves = 1
    while leaves < rows:
        leaves *= 2
    # Each node of a tree holds the emptiest row below it; tokens of rows that don't exist or were tried are unlimited.
    keys, emptiest = np.full(leaves, _UNLIMITED), np.empty(2 * leaves, dtype=np.int32)
    keys[:rows] = 0
    for row in range(leaves):
        emptiest[leaves + row] = row
    for node in range(leaves - 1, 0, -1):
        emptiest[node] = emptiest[2 * node]
    tried = np.empty(rows, dtype=np.int32)  # rows without room for the other resources of a unit
    for place in range(len(own)):
        length, unit = lengths[own[place]], units[own[place]]
        row, count = emptiest[1], 0
        while keys[row] < _UNLIMITED and not has_room(used, row, others, unit, budgets):
            keys[row], tried[count] = _UNLIMITED, row
            count += 1
            update(emptiest, keys, row)
            row = emptiest[1]
        if keys[row] and keys[row] + length > fill:
            return fullest
        placed[place] = row
        tokens[row] += length
        keys[row] = tokens[row]
        update(emptiest, keys, row)
        for resource in range(len(budgets)):
            used[row, resource] += others[unit, resource]
        for number in range(count):
            keys[tried[number]] = tokens[tried[number]]
            update(emptiest, keys, tried[number])
    if tokens.max() < fullest:
        for place in range(len(own)):
            row_of[own[place]] = first + placed[place]
    return min(tokens.max(), fullest)

"""Divides the rows of each group of steps among its steps, and evens out the tokens of rows that can't be full."""

from __future__ import annotations

from typing import Any

import numpy as np

from tritonpack.packing.heuristics import compiled, compiled_without_arrays, sort_by_bytes
from tritonpack.packing.planning.filling import has_room, total, use
from tritonpack.packing.planning.tournament import UNLIMITED, begin_tournament, num_leaves, set_key

# Shares of a step's tokens, as divisors:
_UNEVEN = 64  # rows whose fullest is so much fuller than their mean are evened out
_CROWDED = 16  # rows that hold so much more than the mean row share steps, if they are at most this share of the rows
_HALF_EMPTY = 16  # groups of steps that leave more open are evened out before they are divided
# The steps of a group may differ in their mean lengths by this many times the variance of random steps.
_CHANCE = 1.0
_ROW_BITS = 26  # 64 steps of 2**20 ranks
_ROW = 2**_ROW_BITS - 1


@compiled
def divide(
    lengths: Any, others: Any, rows: Any, order: Any, groups: Any, ranks: int, budgets: Any, level: bool
) -> Any:  # fmt: skip
    """Give each step of a group its rows, and even out rows that aren't full unless they are `level`, in place.

    Args:
        lengths, others, budgets: as in `Demands`; the last two are None without resources.
        rows, order, groups: those of `fill_steps`; `rows` is changed.

    Returns:
        The tokens up to which the rows of each step may grow, (steps,).
    """
    fills = np.empty(groups[-1, 1] + groups[-1, 2], dtype=np.int64)
    # Memory that is used for every group and step anew, because small steps would take longer to allocate than to deal.
    every_row, every_length = np.empty(len(order), dtype=np.int32), np.empty(len(order), dtype=np.int64)
    most_steps = np.int64(0)
    for group in range(len(groups)):
        most_steps = max(most_steps, groups[group, 2])
    most_rows = most_steps * ranks
    none, one = np.int64(0), np.int64(1)  # numba compiles a function once more for each literal number
    scratch = np.empty((5, max(len(order), 2 * num_leaves(most_rows))), dtype=np.int64)
    used = others  # None without resources
    if budgets is not None:
        used = np.empty((most_rows, len(budgets)), dtype=np.int64)
    grouped, step_of = np.empty(len(order), dtype=np.int64), np.empty(most_rows, dtype=np.int64)
    starts = np.empty(most_rows // ranks + 2, dtype=np.int64)
    for group in range(len(groups)):
        begin, step, steps, fill = groups[group, 0], groups[group, 1], groups[group, 2], groups[group, 3]
        end = groups[group + 1, 0] if group + 1 < len(groups) else len(order)
        first, num_rows = step * ranks, steps * ranks
        units, row_of, own_lengths = order[begin:end], every_row[begin:end], every_length[begin:end]
        taken = np.int64(0)
        for place in range(len(units)):
            row_of[place], own_lengths[place] = rows[units[place]] - first, lengths[units[place]]
            taken += own_lengths[place]
        fills[step : step + steps] = fill
        whole = num_rows * fill
        half_empty = not level and taken < whole - whole // _HALF_EMPTY
        uneven = not level and ranks > 1 and taken < whole - whole // _UNEVEN
        if steps > 1:
            if half_empty:
                _group(row_of, num_rows, one, grouped, starts, step_of)
                _even_out(
                    own_lengths, others, units, row_of, grouped, none, starts[1], none, num_rows, fill, budgets,
                    scratch, used,
                )  # fmt: skip
            _deal(own_lengths, units, row_of, num_rows, ranks, half_empty)
        if uneven:
            _group(row_of, ranks, steps, grouped, starts, step_of)
            for number in range(steps):
                fills[step + number] = _even_out(
                    own_lengths, others, units, row_of, grouped, starts[number], starts[number + 1], number * ranks,
                    ranks, fill, budgets, scratch, used,
                )  # fmt: skip
        if steps > 1 or uneven:
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
    for row in range(rows):
        if size[row] == 0:  # fewer documents than rows: the last rows are empty
            return
    count, taken = total(size), total(tokens)
    mean = taken / count
    # Sorts are of integers with the row in their last bits, which is fast and the same everywhere.
    keys, spare, starts = np.empty(rows, np.int64), np.empty(rows, np.int64), np.empty(257, np.int64)
    shift, step_bits = np.int64(_ROW_BITS), np.int64(0)
    while 1 << step_bits < steps:
        step_bits += 1
    by_mean, rank_by_place = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.int64)
    most = np.int64(0)
    for row in range(rows):
        of_row = tokens[row] * 64 // size[row]
        most = max(most, of_row)
        keys[row] = of_row << _ROW_BITS | row
    sort_by_bytes(keys, spare, starts, rows, shift, most)
    for rank in range(rows):
        by_mean[rank] = keys[rank] & _ROW
    most = np.int64(0)
    for row in range(rows):
        most = max(most, place_of[row])
        keys[row] = place_of[row] << _ROW_BITS | row
    sort_by_bytes(keys, spare, starts, rows, shift, most)
    for rank in range(rows):
        rank_by_place[keys[rank] & _ROW] = rank
    crowded, num_crowded = np.empty(rows, dtype=np.bool_), 0
    for row in range(rows):
        crowded[row] = tokens[row] * rows > taken + taken // _CROWDED
        num_crowded += crowded[row]
    row_at = np.empty(rows, dtype=np.int64)  # the row that becomes `step * ranks + rank`
    variance = squares / count - mean * mean
    few = uneven and 0 < num_crowded <= rows // _CROWDED
    together = ranks if few else np.int64(0)  # crowded rows that may share a step
    while True:
        strata, weight = np.int64(1), np.int64(32 if ranks > 1 else 0)
        while True:
            _deal_strata(by_mean, rank_by_place, strata, weight, ranks, keys, spare, starts, row_at)
            if together:
                _gather(row_at, crowded, ranks, together, keys, spare, starts, step_bits)
            even = _is_even(row_at, tokens, size, ranks, mean, variance)
            if even or strata == ranks:
                break
            if weight:
                weight //= 2
            else:
                strata = min(2 * strata, ranks)
        if even or not together:
            break
        together //= 2
    # Steps come in the order of the stream, too.
    most = np.int64(0)
    for step in range(steps):
        place = np.int64(0)
        for number in range(step * ranks, (step + 1) * ranks):
            place += rank_by_place[row_at[number]]
        keys[step] = place << step_bits | step
        most = max(most, place)
    sort_by_bytes(keys, spare, starts, steps, step_bits, most)
    for step in range(steps):
        dealt = keys[step] & ((1 << step_bits) - 1)
        for rank in range(ranks):
            place_of[row_at[dealt * ranks + rank]] = step * ranks + rank
    for place in range(len(row_of)):
        if row_of[place] >= 0:
            row_of[place] = place_of[row_of[place]]


@compiled_without_arrays
def _deal_strata(
    by_mean: Any, rank_by_place: Any, strata: int, weight: int, ranks: int, keys: Any, spare: Any, starts: Any,
    row_at: Any,
) -> None:  # fmt: skip
    """Write the row that becomes `step * ranks + rank` to `row_at`: equally many of each stratum for every step.

    Args:
        by_mean: (rows,) rows by their mean lengths.
        rank_by_place: (rows,) the place of each row in the order of places.
        weight: how much mean lengths count within a stratum; places count 8.
        keys, spare, starts: see `sort_by_bytes`; their values don't matter.
    """
    steps = len(by_mean) // ranks
    for stratum in range(strata):
        first, last = stratum * ranks // strata, (stratum + 1) * ranks // strata  # the ranks that get its rows
        for place in range((last - first) * steps):
            rank_by_mean = first * steps + place
            keys[place] = (8 * rank_by_place[by_mean[rank_by_mean]] + weight * rank_by_mean) << _ROW_BITS | place
        most = (8 + weight) * len(by_mean)
        sort_by_bytes(keys, spare, starts, (last - first) * steps, np.int64(_ROW_BITS), most)
        place = 0
        for step in range(steps):
            for rank in range(first, last):
                row_at[step * ranks + rank] = by_mean[first * steps + (keys[place] & _ROW)]
                place += 1


@compiled_without_arrays
def _is_even(row_at: Any, tokens: Any, size: Any, ranks: int, mean: float, variance: float) -> bool:
    """Whether steps differ in their mean lengths as by chance.

    Args:
        row_at: see `_deal_strata`.
        tokens, size: (rows,) the tokens and the documents of each row.
        mean, variance: those of the lengths of all documents.
    """
    steps = len(row_at) // ranks
    between = chance = 0.0  # the variance of the steps' mean lengths, as a sum over steps: as it is, and by chance
    for step in range(steps):
        taken = held = np.int64(0)
        for number in range(step * ranks, (step + 1) * ranks):
            taken += tokens[row_at[number]]
            held += size[row_at[number]]
        between += (taken / held - mean) ** 2
        chance += 1 / held
    chance *= variance * (steps - 1) / steps
    return between <= _CHANCE * chance


@compiled
def _gather(
    row_at: Any, crowded: Any, ranks: int, together: int, keys: Any, spare: Any, starts: Any, step_bits: int
) -> None:  # fmt: skip
    """Interchange rows between steps, in place, so that few steps have crowded rows, each at most `together` of them.

    The steps that have most of them already get the others.

    Args:
        keys, spare, starts: as in `_deal_strata`.
        step_bits: the bits of a step's number.
    """
    steps = len(row_at) // ranks
    in_step = np.zeros(steps, dtype=np.int64)
    for step in range(steps):
        for number in range(step * ranks, (step + 1) * ranks):
            in_step[step] += crowded[row_at[number]]
        keys[step] = (ranks - in_step[step]) << step_bits | step  # those with most first
    sort_by_bytes(keys, spare, starts, steps, step_bits, ranks)
    giver, taker = steps - 1, 0  # places in `keys`
    while giver > taker:
        give, take = keys[giver] & ((1 << step_bits) - 1), keys[taker] & ((1 << step_bits) - 1)
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
            in_step[give] -= 1
            in_step[take] += 1


@compiled_without_arrays
def _group(row_of: Any, ranks: int, steps: int, grouped: Any, starts: Any, step_of: Any) -> None:
    """Write the documents of each group of `ranks` rows, ascending, to `grouped`, and where they start to `starts`.

    Args:
        starts: (steps + 2 or more,) int64.
        step_of: (rows or more,) int64, whose values don't matter. A table takes less time than divisions.
    """
    for step in range(steps):
        for row in range(step * ranks, (step + 1) * ranks):
            step_of[row] = step
    for step in range(steps + 2):  # where groups start, from the second number on
        starts[step] = 0
    for row in row_of:
        if row >= 0:
            starts[step_of[row] + 2] += 1
    for step in range(steps):
        starts[step + 2] += starts[step + 1]
    for document in range(len(row_of)):
        if row_of[document] >= 0:
            step = step_of[row_of[document]] + 1
            grouped[starts[step]] = document
            starts[step] += 1


@compiled_without_arrays
def _even_out(
    lengths: Any, others: Any, units: Any, row_of: Any, own: Any, begin: int, end: int, first: int, rows: int,
    fill: int, budgets: Any, scratch: Any, used: Any,
) -> int:  # fmt: skip
    """Place units of rows that aren't full anew, so that rows hold more equal numbers of tokens, in place.

    The ranks of a step wait for the fullest row.

    Args:
        lengths, units, row_of: those of a group.
        own: `own[begin:end]` are places in these arrays, those of the rows from `first` on, from large to small.
        scratch: (5, units and 2 * leaves or more) int64, whose values don't matter; so is `used`, (rows or more,
            resources).

    Returns:
        The tokens up to which rows may grow.
    """
    tokens, keys, emptiest, placed = scratch[0], scratch[1], scratch[2], scratch[3]
    tried = scratch[4]  # rows without room for the other resources of a unit
    for row in range(rows):
        tokens[row] = 0
    held = np.int64(0)
    for turn in range(begin, end):
        tokens[row_of[own[turn]] - first] += lengths[own[turn]]
        held += lengths[own[turn]]
    fullest = np.int64(0)
    for row in range(rows):
        fullest = max(fullest, tokens[row])
    if rows * fullest - held <= rows * fullest // _UNEVEN or end - begin <= rows:
        return fullest
    leaves, unlimited = num_leaves(rows), np.int64(UNLIMITED)
    # The tokens of rows, UNLIMITED of those that don't exist or were tried. Each row gets one of the first units.
    for row in range(rows):
        place = own[begin + row]
        placed[row], tokens[row], keys[leaves + row] = row, lengths[place], lengths[place]
        if budgets is not None:
            for resource in range(len(budgets)):
                used[row, resource] = others[units[place], resource]
    for leaf in range(leaves + rows, 2 * leaves):
        keys[leaf] = unlimited
    begin_tournament(keys, emptiest, leaves)
    for turn in range(begin + rows, end):
        length, unit = lengths[own[turn]], np.int64(units[own[turn]])
        count = 0
        while keys[1] < UNLIMITED and not has_room(used, emptiest[1], others, unit, budgets):
            tried[count] = emptiest[1]
            set_key(keys, emptiest, leaves, tried[count], unlimited)
            count += 1
        row = emptiest[1]
        if keys[1] + length > fill:
            return fullest
        placed[turn - begin] = row
        tokens[row] = keys[1] + length
        set_key(keys, emptiest, leaves, row, tokens[row])
        use(used, row, others, unit, np.int64(1))
        for number in range(count):
            set_key(keys, emptiest, leaves, tried[number], tokens[tried[number]])
    highest = np.int64(0)
    for row in range(rows):
        highest = max(highest, tokens[row])
    if highest < fullest:
        for turn in range(begin, end):
            row_of[own[turn]] = first + placed[turn - begin]
    return min(highest, fullest)

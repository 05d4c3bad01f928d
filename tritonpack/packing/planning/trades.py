"""Balances the steps of a plan: the rows of a step trade documents until their costs are about equal.

The costliest row gives up to two documents and gets up to two of a cheaper row, so that about half the gap between
their costs moves over and neither exceeds its room. Full rows can trade too, because two pairs of documents may have
equal lengths and different squares.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tritonpack.packing.heuristics import compiled, sort_by_bytes

_TOLERANCE = 2.0**-11  # the gap, relative to the costliest row, at which two rows count as balanced
_PARTNERS = 3  # the cheapest rows that the costliest one tries to trade with before trading ends
_TRADES_PER_RANK = 2
_OFFERED = 16  # documents that a row offers, spread from its longest to its shortest
_GROUPS = 1 + _OFFERED + _OFFERED * (_OFFERED - 1) // 2  # none of them, one or two
_LOOKS = 4096  # pairs of groups that are compared for one trade
_NONE = -1


@compiled
def balance(
    lengths: Any, others: Any, kinds: Any, costs: Any, rows: Any, order: Any, ranks: int, fills: Any, budgets: Any
) -> None:  # fmt: skip
    """Narrow the gap between the costliest and the cheapest row of each step by trading documents.

    Args:
        lengths: (documents,) int32.
        others: (documents, resources) int64, what they take of other resources.
        kinds: (documents,) int64; documents of one kind are interchangeable.
        costs: (documents,) int64.
        rows: (documents,) int64, `step * ranks + rank` of each document; changed in place.
        order: (documents,) int32, all documents; those of a step come from large to small.
        fills: (steps,) int64, tokens up to which rows of each step may grow; a row that is longer already doesn't grow.
        budgets: (resources,) int64, what a row holds of other resources.
    """
    steps = len(fills)
    starts = np.zeros(steps + 1, dtype=np.int64)
    for row in rows:
        starts[row // ranks + 1] += 1
    for step in range(steps):
        starts[step + 1] += starts[step]
    cursor = starts.copy()
    by_step = np.empty(len(rows), dtype=np.int64)
    for document in order:
        step = rows[document] // ranks
        by_step[cursor[step]] = document
        cursor[step] += 1
    own_lengths, own_kinds, own_costs = lengths[by_step], kinds[by_step], costs[by_step]
    own_others = np.empty((len(rows), len(budgets)), dtype=np.int64)
    size = np.zeros(steps * ranks, dtype=np.int64)
    for place in range(len(rows)):
        size[rows[by_step[place]]] += 1
        for resource in range(len(budgets)):
            own_others[place, resource] = others[by_step[place], resource]
    # These are used for each step anew, because small steps would take longer to allocate than to balance.
    held = np.empty((ranks, 2 * size.max() + 2), dtype=np.int32)
    # The groups that each row offers, by ascending tokens: two documents, their tokens, their cost, other resources.
    offers = np.empty((ranks, _GROUPS, 4 + len(budgets)), dtype=np.int64)
    sums = np.empty((4, ranks), dtype=np.int64)
    spare = np.empty((ranks, len(budgets)), dtype=np.int64)
    scratch = np.empty((6, max(held.shape[1], _GROUPS, 257)), dtype=np.int64)
    for step in range(steps):
        begin, end = starts[step], starts[step + 1]
        _trade(
            own_lengths[begin:end], own_others[begin:end], own_kinds[begin:end], own_costs[begin:end],
            by_step[begin:end], rows, step * ranks, ranks, fills[step], budgets, held, offers, sums, spare, scratch,
        )  # fmt: skip


@compiled
def _trade(
    lengths: Any, others: Any, kinds: Any, costs: Any, documents: Any, rows: Any, first: int, ranks: int, fill: int,
    budgets: Any, held: Any, offers: Any, sums: Any, spare: Any, scratch: Any,
) -> None:  # fmt: skip
    """Balance the rows of one step, the first of which is `first`.

    Args:
        lengths, others, kinds, costs, documents: (documents, ...) those of the step, from large to small.
        held: for each row the places of its documents, ascending, so from large to small.
        offers: for each row the groups that it offers.
        sums, spare: for each row the numbers below, and its room for other resources.
        scratch: see `_make_offers`.
    """
    room, cost, size, num_offers = sums[0], sums[1], sums[2], sums[3]  # no offers: not made yet
    room[:], cost[:], size[:], num_offers[:] = fill, 0, 0, 0
    spare[:] = budgets
    for document in range(len(documents)):
        row = rows[documents[document]] - first
        held[row, size[row]] = document
        size[row] += 1
        room[row] -= lengths[document]
        cost[row] += costs[document]
        for resource in range(len(budgets)):
            spare[row, resource] -= others[document, resource]
    by_cost = np.argsort(cost, kind="mergesort")
    deal = np.empty(4, dtype=np.int64)
    for _ in range(_TRADES_PER_RANK * ranks):
        dear = by_cost[-1]
        for partner in range(min(_PARTNERS, ranks - 1)):
            cheap = by_cost[partner]
            gap = cost[dear] - cost[cheap]
            if gap <= _TOLERANCE * cost[dear]:
                return
            if size[dear] + size[cheap] == 2 or max(size[dear], size[cheap]) + 2 > held.shape[1]:
                continue
            for row in (dear, cheap):
                if num_offers[row] == 0:
                    own = held[row, : size[row]]
                    num_offers[row] = _make_offers(own, lengths, others, kinds, costs, offers[row], scratch)
            dear_offers, cheap_offers = offers[dear, : num_offers[dear]], offers[cheap, : num_offers[cheap]]
            if not _find_deal(dear_offers, cheap_offers, room[dear], room[cheap], spare[dear], spare[cheap], gap, deal):
                continue
            for place in range(4):
                document = deal[place]
                if document != _NONE:
                    giver, taker = (dear, cheap) if place < 2 else (cheap, dear)
                    _hand_over(held, size, document, giver, taker)
                    rows[documents[document]] = first + taker
                    room[giver] += lengths[document]
                    room[taker] -= lengths[document]
                    cost[giver] -= costs[document]
                    cost[taker] += costs[document]
                    for resource in range(len(budgets)):
                        spare[giver, resource] += others[document, resource]
                        spare[taker, resource] -= others[document, resource]
            num_offers[dear] = num_offers[cheap] = 0
            _settle(by_cost, cost)
            break
        else:
            return  # no row trades with the costliest


@compiled
def _make_offers(
    documents: Any, lengths: Any, others: Any, kinds: Any, costs: Any, offers: Any, scratch: Any
) -> int:  # fmt: skip
    """Write the groups of up to two documents that a row offers to `offers`, (groups, ...); return their number.

    Args:
        scratch: (6, ...) int64, whose values don't matter.
    """
    offered, tokens, cost, starts = scratch[0], scratch[1], scratch[2], scratch[3]
    count = 0
    for document in documents:  # of one kind only two
        if count < 2 or kinds[offered[count - 2]] != kinds[document]:
            offered[count] = document
            count += 1
    num_offered = min(count, _OFFERED)
    for place in range(num_offered):
        offered[place] = offered[place * count // num_offered]
        tokens[place] = lengths[offered[place]]
        cost[place] = costs[offered[place]]
    offered[num_offered], tokens[num_offered], cost[num_offered] = _NONE, 0, 0

    # Sort the groups by their tokens.
    count = 0
    keys, sorted_keys = scratch[4], scratch[5]
    most = np.int64(0)
    for first in range(num_offered + 1):
        for second in range(first + (first < num_offered), num_offered + 1):
            total = tokens[first] + tokens[second]
            keys[count] = total << 16 | first << 8 | second
            most = max(most, total)
            count += 1
    digits = 0
    while most:
        most >>= 8
        digits += 1
    keys = sort_by_bytes(keys, sorted_keys, count, 16, digits, starts)
    for group in range(count):
        first, second = (keys[group] >> 8) & 255, keys[group] & 255
        offers[group, 0] = offered[first]
        offers[group, 1] = offered[second]
        offers[group, 2] = keys[group] >> 16
        offers[group, 3] = cost[first] + cost[second]
        for resource in range(others.shape[1]):
            offers[group, 4 + resource] = 0
            for member in (first, second):
                if member < num_offered:
                    offers[group, 4 + resource] += others[offered[member], resource]
    return count


@compiled
def _find_deal(
    dear: Any, cheap: Any, dear_room: int, cheap_room: int, dear_spare: Any, cheap_spare: Any, gap: int, deal: Any
) -> bool:  # fmt: skip
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
            if distance < best and _fits(dear[mine], cheap[theirs], dear_spare, cheap_spare):
                best = distance
                deal[0], deal[1], deal[2], deal[3] = dear[mine, 0], dear[mine, 1], cheap[theirs, 0], cheap[theirs, 1]
            theirs += 1
        looks += theirs - lowest
        if best <= gap >> 3 or looks > _LOOKS:
            break
    return best < gap


@compiled
def _fits(mine: Any, theirs: Any, own_spare: Any, their_spare: Any) -> bool:
    """Whether two rows have room for each other's groups in every resource but tokens."""
    for resource in range(len(own_spare)):
        more = theirs[4 + resource] - mine[4 + resource]
        if more > own_spare[resource] or -more > their_spare[resource]:
            return False
    return True


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

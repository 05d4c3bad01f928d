"""Balances the steps of a plan: the rows of a step trade documents until their costs are about equal.

The costliest row gives up to two documents and gets up to two of a cheaper row, so that about half the gap between
their costs moves over and neither exceeds its room. Full rows can trade too, because two pairs of documents may have
equal lengths and different squares.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tritonpack.packing.heuristics import compiled, compiled_without_arrays, sort_by_bytes
from tritonpack.packing.planning.tournament import UNLIMITED, begin_tournament, num_leaves, set_key

_TOLERANCE = 2.0**-11  # the gap, relative to the costliest row, at which two rows count as balanced
_PARTNERS = 3  # the cheapest rows that the costliest one tries to trade with before trading ends
_TRADES_PER_RANK = 2
_OFFERED = 16  # documents that a row offers, spread from its longest to its shortest
_GROUPS = 1 + _OFFERED + _OFFERED * (_OFFERED - 1) // 2  # none of them, one or two
_LOOKS = 4096  # pairs of groups that are compared for one trade
_NONE = -1
_FEW_RANKS = 32  # whose rows are sorted by insertion


@compiled
def balance(
    lengths: Any, others: Any, kinds: Any, costs: Any, rows: Any, order: Any, ranks: int, fills: Any, budgets: Any
) -> None:  # fmt: skip
    """Narrow the gap between the costliest and the cheapest row of each step by trading documents.

    Args:
        lengths: (documents,) int32.
        others: (documents, resources) int64, what they take of other resources; None without resources, as budgets.
        kinds: (documents,) int64; documents of one kind are interchangeable.
        costs: (documents,) int64.
        rows: (documents,) int64, `step * ranks + rank` of each document; changed in place.
        order: (documents,) int32, all documents; those of a step come from large to small.
        fills: (steps,) int64, tokens up to which rows of each step may grow; a row that is longer already doesn't grow.
        budgets: (resources,) int64, what a row holds of other resources.
    """
    # From here on a document is its place in `order`. So the documents of a row ascend from large to small.
    count, num_rows = len(order), len(fills) * ranks
    own_lengths, own_kinds = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    own_costs, row_of = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    starts = np.zeros(num_rows + 2, dtype=np.int64)  # where rows start in `by_row`, from the second number on
    for place in range(count):
        document = order[place]
        own_lengths[place], own_kinds[place] = lengths[document], kinds[document]
        own_costs[place], row_of[place] = costs[document], rows[document]
        starts[row_of[place] + 2] += 1
    longest = np.int64(0)
    for row in range(num_rows):
        longest = max(longest, starts[row + 2])
        starts[row + 2] += starts[row + 1]
    by_row = np.empty(count, dtype=np.int32)
    for place in range(count):
        row = row_of[place] + 1
        by_row[starts[row]] = place
        starts[row] += 1
    # These are used for each step anew, because small steps would take longer to allocate than to balance.
    held = np.empty((ranks, 2 * longest + 2), dtype=np.int32)
    sums = np.empty((5, ranks), dtype=np.int64)
    tournament = np.empty((2, 2 * num_leaves(ranks)), dtype=np.int64)
    spare = others  # None without resources
    if budgets is not None:
        spare = np.empty((ranks, len(budgets)), dtype=np.int64)
    offered = np.empty((ranks, _OFFERED + 1), dtype=np.int32)
    offers = np.empty((2, ranks, _GROUPS), dtype=np.int64)
    scratch = np.empty((5, max(held.shape[1], _GROUPS, 257)), dtype=np.int64)
    room, cost, size, num_offers, by_cost = sums[0], sums[1], sums[2], sums[3], sums[4]
    keys, key_costs = offers[0], offers[1]
    for step in range(len(fills)):
        first = step * ranks
        for row in range(ranks):
            room[row], cost[row], num_offers[row] = fills[step], 0, 0  # no offers: not made yet
            begin, end = starts[first + row], starts[first + row + 1]
            size[row] = end - begin
            for number in range(end - begin):
                document = by_row[begin + number]
                held[row, number] = document
                room[row] -= own_lengths[document]
                cost[row] += own_costs[document]
            if budgets is not None:
                for resource in range(len(budgets)):
                    spare[row, resource] = budgets[resource]
                    for number in range(begin, end):
                        spare[row, resource] -= others[order[by_row[number]], resource]
        _sort_by_cost(by_cost, cost, tournament[0], tournament[1])
        _trade(
            own_lengths, others, own_kinds, own_costs, order, rows, first, held, offered, keys, key_costs,
            room, cost, size, num_offers, by_cost, spare, scratch,
        )  # fmt: skip


@compiled_without_arrays
def _trade(
    lengths: Any, others: Any, kinds: Any, costs: Any, order: Any, rows: Any, first: int, held: Any, offered: Any,
    keys: Any, key_costs: Any, room: Any, cost: Any, size: Any, num_offers: Any, by_cost: Any, spare: Any,
    scratch: Any,
) -> None:  # fmt: skip
    """Balance the rows of one step, the first of which is `first`.

    Args:
        lengths, kinds, costs: (documents,) by their places in `order`; `others` and `rows` are by their numbers.
        held: (ranks, places) for each row its documents, ascending.
        offered, keys, key_costs: (ranks, ...) what rows offer, see `_make_offers`.
        room, cost, size, num_offers: (ranks,) of each row: tokens by which it may grow, cost, documents, offers.
        by_cost: (ranks,) the rows by ascending cost.
        spare: (ranks, resources) the room of each row for other resources.
    """
    ranks = len(by_cost)
    for _ in range(_TRADES_PER_RANK * ranks):
        dear = by_cost[ranks - 1]
        for partner in range(min(_PARTNERS, ranks - 1)):
            cheap = by_cost[partner]
            gap = cost[dear] - cost[cheap]
            if gap <= _TOLERANCE * cost[dear]:
                return
            if size[dear] + size[cheap] == 2 or max(size[dear], size[cheap]) + 2 > held.shape[1]:
                continue
            for row in (dear, cheap):
                if num_offers[row] == 0:
                    num_offers[row] = _make_offers(
                        row, held, size[row], lengths, kinds, costs, offered, keys, key_costs, scratch
                    )
            deal = _find_deal(
                dear, cheap, keys, key_costs, num_offers[dear], num_offers[cheap], room[dear], room[cheap], gap,
                offered, order, others, spare,
            )  # fmt: skip
            if deal == _NONE:
                continue
            mine, theirs = keys[dear, deal >> 16], keys[cheap, deal & 65535]
            for giver, taker, key in ((dear, cheap, mine), (cheap, dear, theirs)):
                for member in (key >> 8 & 255, key & 255):
                    document = offered[giver, member]
                    if document != _NONE:
                        _hand_over(held, size, document, giver, taker)
                        rows[order[document]] = first + taker
                        room[giver] += lengths[document]
                        room[taker] -= lengths[document]
                        cost[giver] -= costs[document]
                        cost[taker] += costs[document]
                        if spare is not None:
                            for resource in range(spare.shape[1]):
                                spare[giver, resource] += others[order[document], resource]
                                spare[taker, resource] -= others[order[document], resource]
            num_offers[dear] = num_offers[cheap] = 0
            _settle(by_cost, cost)
            break
        else:
            return  # no row trades with the costliest


@compiled_without_arrays
def _make_offers(
    row: int, held: Any, size: int, lengths: Any, kinds: Any, costs: Any, offered: Any, keys: Any, key_costs: Any,
    scratch: Any,
) -> int:  # fmt: skip
    """Write the groups of up to two documents that a row offers, by ascending tokens; return their number.

    Args:
        offered: (ranks, 17) the documents that the row offers, and then _NONE.
        keys: (ranks, groups) of each group `tokens << 16 | first << 8 | second`, with places in `offered`.
        key_costs: (ranks, groups) the cost of each group.
        scratch: (5, ...) int64, whose values don't matter.
    """
    chosen, cost, sums, spare = scratch[0], scratch[1], scratch[2], scratch[3]
    count = 0
    for place in range(size):  # of one kind only two
        document = held[row, place]
        if count < 2 or kinds[chosen[count - 2]] != kinds[document]:
            chosen[count] = document
            count += 1
    num_offered = min(count, _OFFERED)
    if count > num_offered:
        for place in range(num_offered):
            chosen[place] = chosen[place * count // num_offered]
    for place in range(num_offered):
        offered[row, place], cost[place] = chosen[place], costs[chosen[place]]
    offered[row, num_offered], cost[num_offered] = _NONE, 0

    # The longest group comes first, and is the longest document with the next one.
    count = np.int64(0)
    most = np.int64(0)
    for first in range(num_offered + 1):
        own = lengths[offered[row, first]] if first < num_offered else 0
        for second in range(first + (first < num_offered), num_offered + 1):
            total = own + (lengths[offered[row, second]] if second < num_offered else 0)
            sums[count] = total << 16 | first << 8 | second
            most = max(most, total)
            count += 1
    sort_by_bytes(sums, spare, scratch[4], count, np.int64(16), most)
    for group in range(count):
        key = sums[group]
        keys[row, group] = key
        key_costs[row, group] = cost[key >> 8 & 255] + cost[key & 255]
    return count


@compiled_without_arrays
def _find_deal(
    dear: int, cheap: int, keys: Any, key_costs: Any, num_dear: int, num_cheap: int, dear_room: int, cheap_room: int,
    gap: int, offered: Any, order: Any, others: Any, spare: Any,
) -> int:  # fmt: skip
    """The trade that brings the costs of two rows closest to each other, `mine << 16 | theirs`; _NONE if none does."""
    best = gap  # the gap after the trade
    deal = _NONE
    looks = lowest = highest = 0
    for mine in range(num_dear):
        key = keys[dear, mine]
        least = ((key >> 16) - max(cheap_room, 0)) << 16
        beyond = ((key >> 16) + max(dear_room, 0) + 1) << 16
        while lowest < num_cheap and keys[cheap, lowest] < least:
            lowest += 1
        highest = max(lowest, highest)
        while highest < num_cheap and keys[cheap, highest] < beyond:
            highest += 1
        left = gap - 2 * key_costs[dear, mine]  # the gap if the row gets nothing
        if left < best:
            for theirs in range(lowest, highest):
                distance = abs(left + 2 * key_costs[cheap, theirs])
                if distance < best and _fits(dear, cheap, key, keys[cheap, theirs], offered, order, others, spare):
                    best = distance
                    deal = mine << 16 | theirs
        looks += highest - lowest
        if best <= gap >> 3 or looks > _LOOKS:
            break
    return deal


@compiled_without_arrays
def _fits(
    dear: int, cheap: int, mine: int, theirs: int, offered: Any, order: Any, others: Any, spare: Any
) -> bool:  # fmt: skip
    """Whether two rows have room for each other's groups in every resource but tokens."""
    if spare is None:
        return True
    for resource in range(spare.shape[1]):
        more = np.int64(0)  # what the costly row gets
        for row, key, sign in ((dear, mine, -1), (cheap, theirs, 1)):
            for member in (key >> 8 & 255, key & 255):
                if offered[row, member] != _NONE:
                    more += sign * others[order[offered[row, member]], resource]
        if more > spare[dear, resource] or -more > spare[cheap, resource]:
            return False
    return True


@compiled_without_arrays
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


@compiled_without_arrays
def _sort_by_cost(by_cost: Any, cost: Any, keys: Any, winners: Any) -> None:
    """Write the rows by ascending cost to `by_cost`; of equal ones the first comes first.

    Args:
        keys, winners: (2 * leaves,) of a tournament; their values don't matter.
    """
    ranks = np.int64(len(cost))
    if ranks <= _FEW_RANKS:
        for row in range(ranks):
            by_cost[row] = row
        _settle(by_cost, cost)
        return
    leaves = num_leaves(ranks)
    for row in range(leaves):
        keys[leaves + row] = cost[row] if row < ranks else UNLIMITED
    begin_tournament(keys, winners, leaves)
    for place in range(ranks):
        by_cost[place] = winners[1]
        set_key(keys, winners, leaves, winners[1], np.int64(UNLIMITED))


@compiled_without_arrays
def _settle(by_cost: Any, cost: Any) -> None:
    """Sort rows by cost by insertion, which takes few moves after two of them have changed."""
    for place in range(1, len(by_cost)):
        row = by_cost[place]
        hole = place
        while hole and cost[by_cost[hole - 1]] > cost[row]:
            by_cost[hole] = by_cost[hole - 1]
            hole -= 1
        by_cost[hole] = row

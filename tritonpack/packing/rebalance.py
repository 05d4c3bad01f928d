"""Trades documents between the rows of a step until all rows cost about the same.

The costliest row gives up to two documents and gets up to two of a cheaper row, so that about half the gap between
their costs moves over and neither exceeds its room. Full rows can trade too: two pairs of documents may have equal
lengths and different squares.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tritonpack.packing.compiled import compiled

_TOLERANCE = 2.0**-11  # the gap, relative to the costliest row, at which two rows count as balanced
_PARTNERS = 8  # the cheapest rows that the costliest one tries to trade with before trading ends
_TRADES_PER_RANK = 4
_OFFERED = 24  # documents that a row offers, spread from its longest to its shortest
_GROUPS = 1 + _OFFERED + _OFFERED * (_OFFERED - 1) // 2  # none of them, one or two
_LOOKS = 4096  # pairs of groups that are compared for one trade
_NONE = -1


@compiled
def balance(lengths: Any, costs: Any, row_of: Any, ranks: int, fill: int) -> None:
    """Narrow the gap between the costliest and the cheapest row by trading documents.

    Args:
        lengths: (documents,) int64 tokens, from long to short.
        costs: (documents,) int64, the longer the higher.
        row_of: (documents,) int32, the row of each document, -1 for none; changed in place.
        ranks: the number of rows.
        fill: tokens up to which a row may grow; a row that is longer already doesn't grow.
    """
    room = np.full(ranks, fill, dtype=np.int64)
    cost = np.zeros(ranks, dtype=np.int64)
    size = np.zeros(ranks, dtype=np.int64)  # documents of each row
    # The documents of each row come first, ascending, so from long to short; the rest is spare.
    held = np.empty((ranks, 2 * np.bincount(row_of + 1)[1:].max() + 2), dtype=np.int32)
    for document in range(len(lengths)):
        row = row_of[document]
        if row != _NONE:
            held[row, size[row]] = document
            size[row] += 1
            room[row] -= lengths[document]
            cost[row] += costs[document]
    by_cost = np.argsort(cost, kind="mergesort")
    # The groups that each row offers, by ascending tokens: two documents, their tokens, their cost. 0: not made yet.
    offers = np.empty((ranks, _GROUPS, 4), dtype=np.int64)
    num_offers = np.zeros(ranks, dtype=np.int64)
    deal = np.empty(4, dtype=np.int64)
    for _ in range(_TRADES_PER_RANK * ranks):
        dear = by_cost[-1]
        for partner in range(min(_PARTNERS, ranks - 1)):
            cheap = by_cost[partner]
            gap = cost[dear] - cost[cheap]
            if gap <= _TOLERANCE * cost[dear]:
                return
            if max(size[dear], size[cheap]) + 2 > held.shape[1]:
                continue
            for row in (dear, cheap):
                if num_offers[row] == 0:
                    num_offers[row] = _make_offers(held[row, : size[row]], lengths, costs, offers[row])
            dear_offers, cheap_offers = offers[dear, : num_offers[dear]], offers[cheap, : num_offers[cheap]]
            if not _find_deal(dear_offers, cheap_offers, room[dear], room[cheap], gap, deal):
                continue
            for place in range(4):
                document = deal[place]
                if document != _NONE:
                    giver, taker = (dear, cheap) if place < 2 else (cheap, dear)
                    _hand_over(held, size, document, giver, taker)
                    row_of[document] = taker
                    room[giver] += lengths[document]
                    room[taker] -= lengths[document]
                    cost[giver] -= costs[document]
                    cost[taker] += costs[document]
            num_offers[dear] = num_offers[cheap] = 0
            _settle(by_cost, cost)
            break
        else:
            return  # no row trades with the costliest


@compiled
def _make_offers(documents: Any, lengths: Any, costs: Any, offers: Any) -> int:
    """Write the groups of up to two documents that a row offers to `offers`, (groups, 4); return their number."""
    num_offered = min(len(documents), _OFFERED)
    offered = np.empty(num_offered + 1, dtype=np.int64)
    tokens = np.zeros(num_offered + 1, dtype=np.int64)
    cost = np.zeros(num_offered + 1, dtype=np.int64)
    for place in range(num_offered):
        offered[place] = documents[place * len(documents) // num_offered]
        tokens[place] = lengths[offered[place]]
        cost[place] = costs[offered[place]]
    offered[num_offered] = _NONE

    count = 0
    keys = np.empty(_GROUPS, dtype=np.int64)
    for first in range(num_offered + 1):
        for second in range(first + (first < num_offered), num_offered + 1):
            keys[count] = (tokens[first] + tokens[second]) << 16 | first << 8 | second
            count += 1
    keys = keys[:count]
    keys.sort()
    for group in range(count):
        first, second = (keys[group] >> 8) & 255, keys[group] & 255
        offers[group, 0] = offered[first]
        offers[group, 1] = offered[second]
        offers[group, 2] = keys[group] >> 16
        offers[group, 3] = cost[first] + cost[second]
    return count


@compiled
def _find_deal(dear: Any, cheap: Any, dear_room: int, cheap_room: int, gap: int, deal: Any) -> bool:
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
            if distance < best:
                best = distance
                deal[0], deal[1], deal[2], deal[3] = dear[mine, 0], dear[mine, 1], cheap[theirs, 0], cheap[theirs, 1]
            theirs += 1
        looks += theirs - lowest
        if best <= gap >> 3 or looks > _LOOKS:
            break
    return best < gap


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

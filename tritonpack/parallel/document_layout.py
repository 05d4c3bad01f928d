"""The layout "documents": whole documents to ranks, and cuts where they are needed, so that ranks need few other keys.

An *item* is a stretch of rows that no visible pair leaves: a document, a chunk if all layers have chunks, or several
short ones that follow each other. Each rank holds whole items and fractions of items. A fraction of an item is that
fraction of its rows, and nearly of its visible pairs (`Items.cut`). So a rank's shares are sums, and the division is
vector bin packing in two dimensions, visible pairs and rows. First each item goes to the rank with most room for it;
items larger than a rank's share are cut. Then ranks trade items, and fractions of items, until pairs and rows are even.
Every rank computes the same division, in host memory.
"""

from __future__ import annotations

from itertools import starmap

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

EVEN = 0.008  # the excess of the busiest rank over the mean at which pairs, and rows, count as even
ITEMS = 128  # per rank, if documents are shorter than that; then neighbours are joined
SEGMENTS = (1, 2, 4, 8, 16)  # of an item that is cut
PIECE = 64  # rows that pieces have at least on average, if there are more than two segments
# How many more visible pairs a rank takes to need one key less of others. At 0, a document of 131,072 tokens with a
# window of 4,096 would be cut so often that each of 8 ranks needs all keys. From 16 on they need 4,095, and the busiest
# has 2% more pairs.
PAIRS_PER_KEY = 64
TRADES = 100  # for each rank at most
CHEAP = 0.1  # of the mean rows: keys that a cut may bring to a rank without being avoided
LEAST_GAIN = 0.02  # of the squared difference between two ranks, for a trade to be made


class Items:
    """The items of a batch, in its order.

    Args:
        start, stop: (rows,) the first key that each row sees in any layer, at most its own place, and one past the last
            one, at least its own place.
        work: (rows,) how many keys each row sees, summed over layers.
        ranks: the number of ranks.
        layers: the number of layers whose work was summed.

    Attributes:
        bounds: (items + 1,), the first row of each item, and the number of all rows.
        shares: (items, 2), the visible pairs and the rows of each, where 1 is the mean of a rank.
        reach: (items,), the keys that a row may need, relative to a rank's mean rows.
    """

    def __init__(self, start: Ints, stop: Ints, work: Ints, ranks: int, layers: int) -> None:
        self._ranks, total = ranks, start.shape[0]
        rows = np.arange(total)
        # No pair crosses the edge before a row if the rows before it see no later key, and it and the rows after it
        # see no earlier key.
        before = np.concatenate([[0], np.maximum.accumulate(stop)[:-1]])
        after = np.minimum.accumulate(start[::-1])[::-1]
        begins = rows[(before <= rows) & (after >= rows)]
        size = max(total // (ranks * ITEMS), 1)
        long = np.diff(np.append(begins, total)) >= size
        first = np.ones(len(begins), dtype=bool)
        first[1:] = long[1:] | long[:-1] | (begins[1:] // size != begins[:-1] // size)
        self.bounds: Ints = np.append(begins[first], total)
        pairs = np.concatenate([[0], work.cumsum()])
        self._passed: Floats = pairs * (ranks / max(int(pairs[-1]), 1))  # the work before each row
        lengths = np.diff(self.bounds) * (ranks / total)
        self.shares: Floats = np.stack([np.diff(self._passed[self.bounds]), lengths], 1)
        self.reach: Floats = np.maximum.reduceat(stop - start, self.bounds[:-1]) * (ranks / total)
        self._cost_of_keys = PAIRS_PER_KEY * layers * total / max(int(pairs[-1]), 1)  # of a rank's mean rows

    def cut(self, item: int, fractions: Floats, before: Floats) -> tuple[list[Ints], Floats]:
        """The rows of an item, ascending, for several ranks that hold these fractions of it, and their excess of pairs.

        The rows are cut into equal segments, and each of these in the ranks' fractions, in turn forward and backward.
        With one segment, ranks own runs, which is even if all rows see equally many keys, as with windows. Two segments
        are a zigzag, which is even in a causal document. More segments make windows about as long as a rank's share
        more even, but then ranks need more keys. `before` has each rank's excess of pairs from other items, which this
        one may make up for.
        """
        begin, end, ranks = int(self.bounds[item]), int(self.bounds[item + 1]), len(fractions)
        ends = np.append(0.0, fractions.cumsum() / fractions.sum())
        cheapest, best = np.inf, (np.empty((0, ranks, 2), np.int64), before)
        for segments in SEGMENTS:
            if segments > 2 and end - begin < PIECE * segments * ranks:
                break
            edges = begin + np.rint(np.linspace(0, end - begin, segments + 1)).astype(np.int64)
            parts = np.tile(ends, (segments, 1))
            parts[1::2] = 1 - ends[::-1]
            cuts = edges[:-1, None] + np.rint(parts * np.diff(edges)[:, None]).astype(np.int64)
            pieces = np.stack([cuts[:, :-1], cuts[:, 1:]], 2)  # (segments, ranks, 2): first row, end
            pieces[1::2] = pieces[1::2, ::-1]
            excess = np.diff(self._passed[pieces], axis=2).sum((0, 2)) - fractions * self.shares[item, 0]
            # Keys before the pieces, and between them, that their rows may see.
            gaps = pieces[:, :, 0] - np.concatenate([np.full((1, ranks), begin), pieces[:-1, :, 1]])
            keys = np.minimum(gaps * self._ranks / self.bounds[-1], self.reach[item]).sum(0)
            cost = (before + excess).max() + (keys.max() + keys.mean()) / 2 * self._cost_of_keys
            if cost < cheapest:
                cheapest, best = cost, (pieces, excess)
        rows, (pieces, excess) = [], best
        for rank in range(ranks):
            rows.append(np.concatenate(list(starmap(np.arange, pieces[:, rank]))))
        return rows, excess


def divide_documents(start: Ints, stop: Ints, work: Ints, ranks: int, layers: int) -> list[Ints]:
    """For each rank its rows, ascending; arguments as of `Items`. No rank is empty if there are rows for all.

    Sums are of NumPy's own, in a fixed order, because a matrix product may round differently on another machine.
    """
    if not len(start):
        return [np.arange(0) for _ in range(ranks)]
    items = Items(start, stop, work, ranks, layers)
    held, loads = _place(items, ranks)
    _even_out(items, held, loads)
    rows = _rows(items, held)
    for rank in range(ranks):  # of a very short batch
        longest = int(np.argmax(list(map(len, rows))))
        if not len(rows[rank]) and len(rows[longest]) > 1:
            rows[rank], rows[longest] = rows[longest][-1:], rows[longest][:-1]
    return rows


def _place(items: Items, ranks: int) -> tuple[Floats, Floats]:
    """Place each item, the largest first.

    Returns:
        held: (items, ranks), the fraction of each item that each rank holds; they sum to 1 for each item.
        loads: (ranks, 2), the shares of each rank's pairs and rows.
    """
    held, loads = np.zeros((len(items.shares), ranks)), np.zeros((ranks, 2))
    sizes = items.shares.max(1)
    for item in np.argsort(-sizes, kind="stable"):
        left = 1.0
        while left > 0:
            part = min(left, 1 / sizes[item])
            left = left - part if left - part > 1e-9 else 0.0
            room = (loads * items.shares[item]).sum(1)  # smallest where the sum of squared loads grows least
            rank = np.where(held[item] > 0, np.inf, room).argmin()
            held[item, rank] += part
            loads[rank] += part * items.shares[item]
    return held, loads


def _even_out(items: Items, held: Floats, loads: Floats) -> None:
    """Let the busiest rank trade with another one, again and again, until pairs and rows are even."""
    ranks = len(loads)
    even = 1 + max(EVEN, ranks / items.bounds[-1])  # no rank can be more even than by one row
    stuck = np.eye(ranks, dtype=bool)
    for _ in range(TRADES * ranks):
        busiest = int(loads.max(1).argmax())
        if loads.max() <= even:
            return
        gaps = loads[busiest] - loads
        relief = (np.where(gaps > 0, gaps, gaps / 2) * (loads[busiest] > 1)).sum(1)
        other = int(np.where(stuck[busiest], 0, relief).argmax())
        if stuck[busiest, other] or relief[other] <= 0:
            return
        if _trade(items, held, loads, busiest, other):
            both = [busiest, other]
            loads[both] = (held[:, both, None] * items.shares[:, None]).sum(0)
            stuck[both] = stuck[:, both] = False
            np.fill_diagonal(stuck, True)
        else:
            stuck[busiest, other] = stuck[other, busiest] = True


def _trade(items: Items, held: Floats, loads: Floats, one: int, other: int) -> bool:
    """Move an item, or a fraction of one, from one rank to the other or back, with most gain for the keys it brings."""
    wanted = (loads[one] - loads[other]) / 2
    given, taken = held[:, one].nonzero()[0], held[:, other].nonzero()[0]
    where, there = np.append(given, taken), np.arange(len(given) + len(taken)) < len(given)
    sources, targets = np.where(there, one, other), np.where(there, other, one)
    parts = held[where, sources, None] * items.shares[where] * np.where(there, 1, -1)[:, None]
    fractions = np.clip((parts * wanted).sum(1) / np.maximum((parts**2).sum(1), 1e-30), 0, 1)
    gains = 1 - ((wanted - fractions[:, None] * parts) ** 2).sum(1) / (wanted**2).sum()
    keys = np.where(held[where, targets] == 0, items.reach[where], 0)
    best = int((gains / (keys + CHEAP)).argmax())
    if gains[best] < LEAST_GAIN:
        return False
    item, source, target = where[best], sources[best], targets[best]
    part = held[item, source] * fractions[best]
    held[item, target] += part
    held[item, source] = 0.0 if fractions[best] == 1 else held[item, source] - part
    return True


def _rows(items: Items, held: Floats) -> list[Ints]:
    """For each rank its rows, ascending."""
    excess = np.zeros(held.shape[1])
    found: list[list[Ints]] = [[np.arange(0)] for _ in excess]
    for item, fractions in enumerate(held):
        # The first one's pieces are outermost and see most keys, so it should own most of them.
        ranks = np.argsort(-fractions, kind="stable")[: int((fractions > 0).sum())]
        if len(ranks) == 1:
            found[ranks[0]].append(np.arange(items.bounds[item], items.bounds[item + 1]))
            continue
        parts, more = items.cut(item, fractions[ranks], excess[ranks])
        excess[ranks] += more
        for rank, rows in zip(ranks.tolist(), parts, strict=True):
            found[rank].append(rows)
    return list(map(np.concatenate, found))

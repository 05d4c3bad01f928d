"""The layout "documents": whole documents to ranks, and cuts where they are needed, so that ranks need few other keys.

An *item* is a stretch of rows that no visible pair leaves: a document, a tree, a chunk if all layers have chunks, or
several short ones that follow each other. Each rank holds whole items and fractions of items. A fraction of an item is
that fraction of its rows, and nearly of its visible pairs (`Items.cut`). So a rank's shares are sums, and the
division is vector bin packing in two dimensions, visible pairs and rows. First each item goes to the rank with most
room for it; items larger than a rank's share are cut. Then ranks trade items in pairs, and fractions of items where
whole ones are too coarse, until pairs and rows are even. Every rank computes the same division, in host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Piece = tuple[int, int]  # the first row, and one past the last one
KeysOfItem = Callable[[int, int], Callable[[Ints], float]]

EVEN = 0.008  # the excess of the busiest rank over the mean at which pairs, and rows, count as even
ITEMS = 128  # per rank, if documents are shorter than that; then neighbours are joined
SEGMENTS = (1, 2, 4, 8, 16, 32, 64)  # of an item that is cut
PIECE = 64  # rows that pieces have at least on average, if there are more than two segments
NEGLIGIBLE = 0.001  # excess of a rank's pairs that more segments needn't lower
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
        keys_of_item: from the first row of an item and one past its last one to a function, which counts the keys that
            some of its rows, ascending, see in the mean over layers.

    Attributes:
        bounds: (items + 1,), the first row of each item, and the number of all rows.
        shares: (items, 2), the visible pairs and the rows of each, where 1 is the mean of a rank.
        reach: (items,), the keys that a rank may need of others if it holds a fraction, relative to a rank's mean rows.
    """

    def __init__(self, start: Ints, stop: Ints, work: Ints, ranks: int, layers: int, keys_of_item: KeysOfItem) -> None:
        self._keys_of_item = keys_of_item
        total = start.shape[0]
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
        self._cost_of_key = PAIRS_PER_KEY * layers * ranks / max(int(pairs[-1]), 1)  # in means of ranks' pairs

    def cut(self, item: int, fractions: Floats, before: Floats) -> tuple[list[list[Piece]], Floats]:
        """Pieces of an item, ascending, for several ranks that hold these fractions of it, and their excess of pairs.

        The rows are cut into equal segments, and each of these in the ranks' fractions, in turn forward and backward.
        With one segment, ranks own runs, which is even if all rows see equally many keys, as with windows. Two segments
        are a zigzag, which is even in a causal document. More segments suit other masks, but then ranks need more keys.
        `before` has each rank's excess of pairs from other items, which this one may make up for.
        """
        begin, end = int(self.bounds[item]), int(self.bounds[item + 1])
        ends = np.append(0.0, fractions.cumsum() / fractions.sum())
        count, choices = self._keys_of_item(begin, end), []
        for segments in SEGMENTS:
            if segments > 2 and end - begin < PIECE * segments * len(fractions):
                break
            pieces: list[list[Piece]] = [[] for _ in fractions]
            edges = begin + np.rint(np.linspace(0, end - begin, segments + 1)).astype(np.int64)
            for segment, (first, last) in enumerate(pairwise(edges)):
                turned = segment % 2 == 1
                cuts = first + np.rint((1 - ends[::-1] if turned else ends) * (last - first)).astype(np.int64)
                for piece, owner in zip(pairwise(cuts.tolist()), pieces[:: -1 if turned else 1], strict=True):
                    if piece[0] < piece[1]:
                        owner.append(piece)
            pairs = np.array([sum(self._passed[b] - self._passed[a] for a, b in one) for one in pieces])
            excess = pairs - fractions * self.shares[item, 0]
            keys = [_other_keys(count, one) for one in pieces]
            cost = (before + excess).max() + (max(keys) + np.mean(keys)) / 2 * self._cost_of_key
            choices.append((cost, segments, pieces, excess))
            if excess.max() < NEGLIGIBLE:
                break
        return min(choices, key=lambda choice: choice[:2])[2:]


class Division:
    """Which fraction of each item each rank holds.

    Sums here are of NumPy's own, in a fixed order, because a matrix product may round differently on another machine.

    Attributes:
        items: the items.
        held: (items, ranks), the fractions, which sum to 1 for each item.
        loads: (ranks, 2), the shares of each rank's pairs and rows.
    """

    def __init__(self, items: Items, ranks: int) -> None:
        """Place each item, the largest first."""
        self.items, self.held, self.loads = items, np.zeros((len(items.shares), ranks)), np.zeros((ranks, 2))
        sizes = items.shares.max(1)
        for item in np.argsort(-sizes, kind="stable"):
            left = 1.0
            while left > 0:
                part = min(left, 1 / sizes[item])
                left = left - part if left - part > 1e-9 else 0.0
                room = (self.loads * items.shares[item]).sum(1)  # smallest where the sum of squared loads grows least
                rank = np.where(self.held[item] > 0, np.inf, room).argmin()
                self.held[item, rank] += part
                self.loads[rank] += part * items.shares[item]

    def even_out(self) -> None:
        """Let the busiest rank trade with another one, again and again, until pairs and rows are even."""
        ranks = len(self.loads)
        stuck = np.zeros((ranks, ranks), dtype=bool)
        np.fill_diagonal(stuck, True)
        for _ in range(TRADES * ranks):
            busiest = int(self.loads.max(1).argmax())
            over = self.loads[busiest] > 1
            if self.loads.max() <= 1 + EVEN:
                return
            gaps = self.loads[busiest] - self.loads
            relief = np.where(stuck[busiest], 0, (np.where(gaps > 0, gaps, gaps / 2) * over).sum(1))
            other = int(relief.argmax())
            if relief[other] <= 0:
                return
            if self._swap(busiest, other) or self._cut(busiest, other) or self._cut_both(busiest, other):
                both = [busiest, other]
                self.loads[both] = (self.held[:, both, None] * self.items.shares[:, None]).sum(0)
                stuck[both] = stuck[:, both] = False
                np.fill_diagonal(stuck, True)
            else:
                stuck[busiest, other] = stuck[other, busiest] = True

    def _swap(self, one: int, other: int) -> bool:
        """Move all that one rank holds of an item to the other, or back, or both, if it halves their difference."""
        wanted = (self.loads[one] - self.loads[other]) / 2
        (items, parts), (back_items, back_parts) = self._parts(one), self._parts(other)
        nothing = np.zeros((1, 2))
        given, taken = np.concatenate([nothing, parts]), np.concatenate([nothing, back_parts])
        rest = ((wanted - given[:, None] + taken) ** 2).sum(-1)
        give, take = divmod(int(rest.argmin()), len(taken))
        if rest[give, take] >= (wanted**2).sum() / 4:
            return False
        if give:
            self._move(items[give - 1], one, other, 1.0)
        if take:
            self._move(back_items[take - 1], other, one, 1.0)
        return True

    def _cut(self, one: int, other: int) -> bool:
        """Move a fraction of an item from one rank to the other or back, with most gain for the keys it brings."""
        wanted = (self.loads[one] - self.loads[other]) / 2
        (items, parts), (back_items, back_parts) = self._parts(one), self._parts(other)
        parts, where = np.concatenate([parts, -back_parts]), np.concatenate([items, back_items])
        sources = np.repeat([one, other], [len(items), len(back_items)])
        targets = one + other - sources
        fractions = np.clip((parts * wanted).sum(1) / np.maximum((parts**2).sum(1), 1e-30), 0, 1)
        gains = 1 - ((wanted - fractions[:, None] * parts) ** 2).sum(1) / (wanted**2).sum()
        keys = np.where(self.held[where, targets] == 0, self.items.reach[where], 0)
        best = int((gains / (keys + CHEAP)).argmax())
        if gains[best] < LEAST_GAIN:
            return False
        self._move(where[best], sources[best], targets[best], fractions[best])
        return True

    def _cut_both(self, one: int, other: int) -> bool:
        """Trade fractions of two items that make both ranks even, with the fewest keys, if there are such items.

        One rank may have more pairs and the other more rows, so that no single item is a gain.
        """
        x, y = (self.loads[one] - self.loads[other]) / 2
        (items, parts), (back_items, back_parts) = self._parts(one), self._parts(other)
        (a, b), (c, d) = parts.T[:, :, None], back_parts.T[:, None]
        size = a * d - b * c
        size = np.where(np.abs(size) < 1e-12, np.nan, size)
        given, taken = (x * d - y * c) / size, (x * b - y * a) / size  # given (a, b) - taken (c, d) = (x, y)
        possible = (given > 0) & (given <= 1) & (taken > 0) & (taken <= 1) & (items[:, None] != back_items)
        if not possible.any():
            return False
        keys = np.where(self.held[items, other] == 0, self.items.reach[items], 0)[:, None]
        keys = keys + np.where(self.held[back_items, one] == 0, self.items.reach[back_items], 0)
        give, take = divmod(int(np.where(possible, keys, np.inf).argmin()), len(back_items))
        self._move(items[give], one, other, given[give, take])
        self._move(back_items[take], other, one, taken[give, take])
        return True

    def _parts(self, rank: int) -> tuple[Ints, Floats]:
        """The items of which a rank holds some, and the shares of what it holds."""
        items = self.held[:, rank].nonzero()[0]
        return items, self.held[items, rank, None] * self.items.shares[items]

    def _move(self, item: int, source: int, target: int, fraction: float) -> None:
        part = self.held[item, source] * fraction
        self.held[item, target] += part
        self.held[item, source] = 0.0 if fraction == 1 else self.held[item, source] - part

    def pieces(self) -> list[list[Piece]]:
        """For each rank its pieces of rows, ascending."""
        bounds, items = self.items.bounds.tolist(), self.items
        shared, excess = (self.held > 0).sum(1) > 1, np.zeros(len(self.loads))
        found: list[list[Piece]] = [[] for _ in self.loads]
        for item, (rank, several) in enumerate(zip(self.held.argmax(1).tolist(), shared.tolist(), strict=True)):
            if not several:
                found[rank].append((bounds[item], bounds[item + 1]))
                continue
            # The first one's pieces are outermost and see most keys, so it should own most of them.
            ranks = np.argsort(-self.held[item], kind="stable")[: int((self.held[item] > 0).sum())]
            parts, more = items.cut(item, self.held[item, ranks], excess[ranks])
            excess[ranks] += more
            for rank, pieces in zip(ranks.tolist(), parts, strict=True):
                found[rank] += pieces
        return found


def divide_documents(
    start: Ints, stop: Ints, work: Ints, ranks: int, layers: int, keys_of_item: KeysOfItem
) -> list[Ints]:
    """For each rank its rows, ascending; arguments as of `Items`. No rank is empty if there are rows for all."""
    if not len(start):
        return [np.arange(0) for _ in range(ranks)]
    division = Division(Items(start, stop, work, ranks, layers, keys_of_item), ranks)
    division.even_out()
    rows = [np.concatenate([np.arange(0), *(np.arange(*one) for one in pieces)]) for pieces in division.pieces()]
    for rank in range(ranks):  # of a very short batch
        longest = max(range(ranks), key=lambda one: len(rows[one]))
        if not len(rows[rank]) and len(rows[longest]) > 1:
            rows[rank], rows[longest] = rows[longest][-1:], rows[longest][:-1]
    return rows


def _other_keys(count: Callable[[Ints], float], pieces: list[Piece]) -> float:
    """How many keys the rows of these pieces see besides as many as they are."""
    rows = np.concatenate([np.arange(0), *(np.arange(*one) for one in pieces)])
    return count(rows) - len(rows)

"""pack_trees: puts sequences into rows, with those that begin alike in one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tritonpack.packing.bins import Bins, pack
from tritonpack.packing.columns import read_sequences
from tritonpack.packing.lengths import check_integer, fit_lengths
from tritonpack.packing.trees.prefixes import sort_sequences


@dataclass(frozen=True, eq=False)
class TreePacking(Bins):
    """The sequences of each row.

    Two groups in rows of 8 tokens. The first needs 9 tokens, so it is split, and its first two tokens are computed
    twice:

    >>> sequences = [[1, 2, 3, 4, 5], [1, 2, 6, 7], [1, 2, 8, 9], [5, 5], [5, 6]]
    >>> packing = pack_trees(sequences, capacity=8)
    >>> [items.tolist() for items in packing]
    [[0, 1], [2, 3, 4]]
    >>> packing.tokens.tolist()
    [7, 7]
    >>> packing
    TreePacking(5 sequences in 2 rows of 8 tokens: 17 tokens given, 14 computed, 2 more than without splits)

    Attributes:
        items: (sequences,) int32. Row r holds the sequences `items[offsets[r] : offsets[r + 1]]`, ascending.
        offsets: (num_bins + 1,) int64.
        tokens: (num_bins,) int64, the tokens of each row.
        capacity: the tokens that fit into a row.
        tokens_given: the tokens of all sequences.
        tokens_lost: how many of the rows' tokens are computed again, because sequences that share them are split.
    """

    items: NDArray[np.int32]
    offsets: NDArray[np.int64]
    tokens: NDArray[np.int64]
    capacity: int
    tokens_given: int
    tokens_lost: int

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all rows."""
        return int(self.tokens.sum())

    @property
    def efficiency(self) -> float:
        """The share of the capacity of all rows that holds tokens, above 0 and at most 1."""
        return self.num_tokens / (self.num_bins * self.capacity)

    def __repr__(self) -> str:
        rows = f"{len(self.items)} sequences in {self.num_bins} rows of {self.capacity} tokens"
        computed = f"{self.num_tokens} computed, {self.tokens_lost} more than without splits"
        return f"TreePacking({rows}: {self.tokens_given} tokens given, {computed})"


class _Piece(NamedTuple):
    """Sequences that stay together: `ranges` of the sorted order, and the tokens that they add to their node's path."""

    tokens: int
    ranges: list[tuple[int, int]]


class _Node(NamedTuple):
    """Sequences `start` to `stop` of the sorted order, which don't fit into a row together.

    They have `depth` tokens in common, `above` of them with the other sequences of the parent node.
    """

    start: int
    stop: int
    depth: int
    above: int
    parent: int
    pieces: list[_Piece]


def pack_trees(sequences: Sequence[Any], capacity: int) -> TreePacking:
    """Put sequences into rows of at most `capacity` tokens, in which each common begin stands once.

    Sequences that begin alike stay together if they fit into a row. Otherwise they are split where they branch, as late
    as possible, so that few tokens are computed again. The parts fill rows by best-fit-decreasing, first beside the
    sequences with which they share most. Rows of large parts come first, so train on the rows in random order.

    `pack_tree` makes the batch of a row:

        for items in pack_trees(sequences, capacity=16384):
            batch = pack_tree([sequences[i] for i in items])

    Args:
        sequences: see `pack_tree`.
        capacity: tokens per row, at least 1.

    Raises:
        ValueError: what `pack_tree` refuses of sequences; a sequence longer than the capacity; a capacity below 1.
        ImportError: numba can't be imported.
    """
    capacity = check_integer(capacity, "capacity")
    rows = read_sequences(sequences)
    given = np.array([len(row) for row in rows], dtype=np.int64)
    fit_lengths(given, capacity, remedy="cut them, or leave them out")
    order, shared = sort_sequences(torch.cat(rows).numpy(), given)
    pieces = _pieces(given[order], shared, capacity)

    bins = [np.sort(np.concatenate([order[start:stop] for start, stop in piece.ranges])) for piece in pieces]
    tokens = np.array([piece.tokens for piece in pieces], dtype=np.int64)
    return TreePacking(
        items=np.concatenate(bins).astype(np.int32),
        offsets=np.cumsum([0, *map(len, bins)], dtype=np.int64),
        tokens=tokens,
        capacity=capacity,
        tokens_given=int(given.sum()),
        tokens_lost=int(tokens.sum() - given.sum() + shared.sum()),
    )


def _pieces(lengths: NDArray[np.int64], shared: NDArray[np.int64], capacity: int) -> list[_Piece]:
    """The rows, of sorted sequences."""
    before = np.concatenate([[0], np.cumsum(lengths - shared)])  # tokens that the sequences before add to a tree of all
    # From the top, find the nodes that don't fit into a row. The node above all has no tokens.
    nodes = [_Node(0, len(lengths), 0, 0, -1, [])]
    for number, node in enumerate(nodes):  # nodes are appended meanwhile
        borders = node.start + 1 + np.flatnonzero(shared[node.start + 1 : node.stop] == node.depth)
        for start, stop in zip([node.start, *borders.tolist()], [*borders.tolist(), node.stop], strict=True):
            # The first sequence adds all of its tokens but the node's. The others add what they don't share.
            tokens = int(lengths[start] - node.depth + before[stop] - before[start + 1])
            if node.depth + tokens <= capacity:
                node.pieces.append(_Piece(tokens, [(start, stop)]))
            else:
                depth = int(shared[start + 1 : stop].min())
                nodes.append(_Node(start, stop, depth, node.depth, number, []))
    # From the bottom, fill rows with the pieces of each node. Each row repeats the node's path. What it adds to the
    # parent's path is a piece of the parent.
    for node in reversed(nodes):
        rows = _filled(node.pieces, capacity - node.depth)
        if node.parent < 0:
            break
        own = node.depth - node.above
        nodes[node.parent].pieces.extend(_Piece(own + row.tokens, row.ranges) for row in rows)
    return rows


def _filled(pieces: list[_Piece], room: int) -> list[_Piece]:
    """The pieces in as few rows as best-fit-decreasing needs. Pieces without tokens (sequences that begin another) go
    into the first row, because they cost nothing in any."""
    free = [piece for piece in pieces if not piece.tokens]
    others = [piece for piece in pieces if piece.tokens]
    rows = [[others[i] for i in items] for items in pack([piece.tokens for piece in others], room)]
    rows[0] += free
    return [_Piece(sum(piece.tokens for piece in row), [one for piece in row for one in piece.ranges]) for row in rows]

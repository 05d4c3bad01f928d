"""Finds the row with the smallest key among many whose keys change, by a tree in which each node holds the smaller key.

Node 1 is the root, the children of node i are 2 i and 2 i + 1, and row r is the leaf `leaves + r`. Each node holds the
smallest key below it and that key's row, and of equal keys the first row. A path to the root is as long for every
change, and what it compares with doesn't depend on the nodes below, so the processor runs ahead.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tritonpack.packing.heuristics import compiled_without_arrays

UNLIMITED = 2**62  # above all keys


@compiled_without_arrays
def num_leaves(rows: int) -> int:
    """The leaves of a tree of so many rows: a power of two. The tree has twice as many nodes."""
    leaves = np.int64(1)
    while leaves < rows:
        leaves *= 2
    return leaves


@compiled_without_arrays
def begin_tournament(keys: Any, winners: Any, leaves: int) -> None:
    """Set the nodes above the leaves, whose keys are set, and the rows of all.

    Args:
        keys, winners: (2 * leaves or more,) the key and the row of each node.
    """
    for row in range(leaves):
        winners[leaves + row] = row
    for node in range(leaves - 1, 0, -1):
        child = 2 * node + (keys[2 * node + 1] < keys[2 * node])
        keys[node], winners[node] = keys[child], winners[child]


@compiled_without_arrays
def set_key(keys: Any, winners: Any, leaves: int, row: int, key: int) -> None:
    """Change the key of a row."""
    one = np.uint64(1)  # signed indices would be checked for negative ones
    node = np.uint64(leaves + row)
    keys[node] = key
    winner = np.int64(row)
    while node > one:
        other, other_winner = keys[node ^ one], winners[node ^ one]
        # All ones if the other one wins, also with an equal key on the left, or else 0. Branches couldn't be predicted.
        mask = (other - key - np.int64(node & one)) >> 63
        key ^= (key ^ other) & mask
        winner ^= (winner ^ other_winner) & mask
        node >>= one
        keys[node], winners[node] = key, winner

"""Sequences that begin alike become a tree in which each distinct token stands once, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class PrefixTree(NamedTuple):
    """The tree (or trees) of sequences that lie end to end, in depth-first order."""

    sources: NDArray[np.int64]  # (N,): one place of each token of the tree among the tokens of all sequences
    places: NDArray[np.int64]  # (T,): the place in the tree of each token; `places[sources]` is 0, 1, ..., N - 1
    ends: NDArray[np.int64]  # (N,): one past the last token of each token's subtree


def sort_sequences(
    tokens: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sort sequences by their tokens, each before those that it begins; see `prefix_tree`.

    Returns:
        (sequences,) int64 each: the sequence at each place, and how many first tokens it shares with the one before.
    """
    assert tokens.dtype == lengths.dtype == np.int64, f"{tokens.dtype} and {lengths.dtype}"
    assert lengths.min(initial=0) >= 0, f"{lengths}"
    assert tokens.shape == (lengths.sum(),), f"{tokens.shape} for lengths of {lengths.sum()} tokens"
    stops = np.cumsum(lengths)
    starts = stops - lengths
    # All tokens have the same number of bytes, so sequences with common first tokens have common first bytes and are
    # neighbours. Big-endian bytes give the same order on every machine.
    low, high = int(tokens.min(initial=0)), int(tokens.max(initial=0))
    dtype = np.dtype(">u4" if low >= 0 and high < 2**32 else ">i8")
    data, width = tokens.astype(dtype).view(np.uint8).data, dtype.itemsize
    bounds = zip((starts * width).tolist(), (stops * width).tolist(), strict=True)
    keys = [bytes(data[start:stop]) for start, stop in bounds]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    shared = np.zeros(len(order), dtype=np.int64)
    for number, (before, here) in enumerate(pairwise(order), start=1):
        if keys[before][:width] == keys[here][:width]:  # else nothing is shared, as between most groups
            most = min(lengths[before], lengths[here])
            differs = tokens[starts[before] :][:most] != tokens[starts[here] :][:most]
            shared[number] = differs.argmax() if differs.any() else most
    return np.array(order, dtype=np.int64), shared


def prefix_tree(tokens: NDArray[np.int64], lengths: NDArray[np.int64]) -> PrefixTree:
    """Merge the common begins of sequences.

    Two tokens become one if they are equal and all tokens before them in their sequences are equal. The sequences lie
    in the tree in the order of `sort_sequences`. A sequence may be empty, equal to another, or the begin of another.
    The work in Python is per sequence. The work per token is NumPy's, and linear.

    [5, 6, 7], [5, 6] and [5, 8] lie in the tree as 5, 6, 7, 8:

    >>> tree = prefix_tree(np.array([5, 6, 7, 5, 6, 5, 8]), np.array([3, 2, 2]))
    >>> tree.sources.tolist(), tree.places.tolist(), tree.ends.tolist()
    ([3, 4, 2, 6], [0, 1, 2, 0, 1, 0, 3], [4, 3, 3, 4])

    Args:
        tokens: (T,) int64, the tokens of all sequences end to end. If several numbers of a token (its id, its position,
            its type) must be equal to share it, pass `joined(...)` of them.
        lengths: (sequences,) int64, at least 0.
    """
    order, shared = sort_sequences(tokens, lengths)
    starts = np.cumsum(lengths) - lengths
    # A sequence adds to the tree the tokens that it doesn't share with the sequence before it.
    added = lengths[order] - shared
    begins = np.cumsum(added) - added
    total = int(added.sum())
    sources = np.empty(total, dtype=np.int64)
    places = np.empty(len(tokens), dtype=np.int64)
    ends = np.empty(total, dtype=np.int64)
    rows = list(zip(starts[order].tolist(), lengths[order].tolist(), shared.tolist(), begins.tolist(), strict=True))
    before = 0
    for start, length, common, begin in rows:
        places[start : start + common] = places[before : before + common]
        places[start + common : start + length] = np.arange(begin, begin + length - common)
        sources[begin : begin + length - common] = np.arange(start + common, start + length)
        before = start
    # The subtree of a token at depth d ends where the first later sequence begins that shares at most d tokens. So
    # walk backwards with the end for each depth, and set only the depths that the sequence before can read.
    end_at = np.full(lengths.max(initial=0), total, dtype=np.int64)
    for number in reversed(range(len(rows))):
        _, length, common, begin = rows[number]
        ends[begin : begin + length - common] = end_at[common:length]
        if number:
            end_at[common : rows[number - 1][1]] = begin
    return PrefixTree(sources, places, ends)


def joined(channels: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """One number for each token, (T,) int64, which is equal for two tokens exactly if all channels are equal.

    Args:
        channels: at least one (T,) int64, any values; fewer than 2**31 tokens.
    """
    numbers, count = np.zeros_like(channels[0]), 1  # numbers from 0 to count - 1
    for channel in channels if len(numbers) else ():
        low, high = int(channel.min()), int(channel.max())
        if count * (high - low + 1) >= 2**63:  # number the values that occur
            numbers, channel = (np.unique(x, return_inverse=True)[1].reshape(-1) for x in (numbers, channel))
            count, low, high = len(numbers), 0, len(numbers) - 1
        if high > low:
            numbers *= high - low + 1
            numbers += channel - low
            count *= high - low + 1
    return numbers

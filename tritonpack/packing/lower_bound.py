"""How few bins there can be: a bound that no packing of whole documents goes below."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def lower_bound(lengths: NDArray[np.int32], capacity: int, max_items: int | None = None) -> int:
    """Martello and Toth's bound L2, in O(documents + capacity); with `max_items`, at least documents / max_items.

    Documents above half the capacity need a bin each. For a threshold of at most half the capacity, those above
    capacity - threshold share their bin with no document from the threshold up, so documents from the threshold to half
    the capacity go beside the other large ones or, as far as their tokens exceed the room there, into bins of their
    own. L2 is the largest count that a threshold gives; the threshold 0 gives at least tokens / capacity.

    Three documents of 4 and two of 7 tokens in bins of 10: no two of 4 and 7 go together, so two bins for the large
    ones and two for the others, although all 26 tokens would fill fewer than three bins:

    >>> lower_bound([4, 4, 4, 7, 7], capacity=10)
    4

    Args:
        lengths: (documents,) integers, each from 1 to `capacity`.
        capacity: tokens per bin.
        max_items: documents per bin, or None.

    Source: Martello and Toth, Lower bounds and reduction procedures for the bin packing problem, Discrete Applied
    Mathematics 28 (1990).
    """
    counts = np.bincount(lengths, minlength=capacity + 1)
    tokens_up_to = np.cumsum(counts * np.arange(capacity + 1))  # at i: the tokens of documents of at most i tokens
    documents_up_to = np.cumsum(counts)
    half = capacity // 2
    large = len(lengths) - int(documents_up_to[half])

    thresholds = np.arange(half + 1)
    shared = documents_up_to[capacity - thresholds] - documents_up_to[half]  # large ones with room for the threshold
    room = shared * capacity - (tokens_up_to[capacity - thresholds] - tokens_up_to[half])
    below = np.concatenate([[0], tokens_up_to[:half]])  # at a threshold: tokens of documents shorter than it
    excess = int((tokens_up_to[half] - below - room).max())
    bins = large + max(0, -(-excess // capacity))
    return bins if max_items is None else max(bins, -(-len(lengths) // max_items))

"""Processes that share the bins of an epoch: how many they are, and bins divided so that each gets the same number."""

from __future__ import annotations

import os
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from tritonpack.packing.state import has_group


def place_among_processes() -> tuple[int, int]:
    """The number of processes and the number of this one, from torch.distributed or from the launcher (torchrun)."""
    if has_group():
        return dist.get_world_size(), dist.get_rank()
    return int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))


def divide_bins(lengths: NDArray[Any], offsets: NDArray[np.int64], num_bins: int, first: int = 0) -> NDArray[np.int64]:
    """Divide bins until there are `num_bins`: the fullest first, in halves of about equally many tokens.

    Bins [0, 2) and [2, 3) of 3 + 4 and 8 tokens become three:

    >>> divide_bins(np.array([3, 4, 8]), np.array([0, 2, 3]), 3).tolist()
    [0, 1, 2, 3]

    Args:
        lengths: (entries,) integers, the tokens of each entry.
        offsets: (bins + 1,) int64; bin b holds the entries offsets[b] to offsets[b + 1].
        num_bins: at least the number of bins, at most `first` and the number of entries after them.
        first: bins before this one stay whole.

    Returns:
        (num_bins + 1,) int64, offsets of the same entries in the same order.
    """
    tokens = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    ends = offsets.tolist()
    bins = [(int(tokens[start] - tokens[stop]), start, stop) for start, stop in pairwise(ends[first:])]
    heapify(bins)  # the fullest on top
    single = []
    for _ in range(num_bins - len(ends) + 1):
        while bins[0][2] - bins[0][1] == 1:
            single.append(heappop(bins))
        _, start, stop = heappop(bins)
        half = (tokens[start] + tokens[stop]) / 2
        cut = start + 1 + int(np.argmin(np.abs(tokens[start + 1 : stop] - half)))
        for begin, end in ((start, cut), (cut, stop)):
            heappush(bins, (int(tokens[begin] - tokens[end]), begin, end))
    return np.array(ends[: first + 1] + sorted(stop for _, _, stop in single + bins), dtype=np.int64)

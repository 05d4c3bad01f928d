"""Next-fit, compiled by numba: bins of consecutive documents, in input order."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray


def next_fit(lengths: NDArray[np.int32], capacity: int, max_items: int) -> Any:
    """Fill one bin after the other in input order; arguments and result as best_fit_decreasing."""
    return np.arange(len(lengths), dtype=np.int32), _next_fit(lengths, capacity, max_items)


@numba.njit(cache=True, nogil=True)
def _next_fit(lengths: Any, capacity: int, max_items: int) -> Any:
    offsets = np.empty(len(lengths) + 1, dtype=np.int64)
    num_bins = 0
    room = 0
    for item in range(len(lengths)):
        if lengths[item] > room or item - offsets[num_bins - 1] == max_items:
            offsets[num_bins] = item
            num_bins += 1
            room = capacity
        room -= lengths[item]
    offsets[num_bins] = len(lengths)
    return offsets[: num_bins + 1].copy()

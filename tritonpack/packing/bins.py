"""pack: whole documents into bins of a fixed number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.lengths import fit_lengths, positive_integer


@dataclass(frozen=True, eq=False)
class Packing:
    """Which documents each bin holds, as one array of items and the offsets at which bins begin (CSR form).

    Documents of 5, 3, 4 and 2 tokens in bins of 8:

    >>> packing = pack([5, 3, 4, 2], capacity=8)
    >>> [items.tolist() for items in packing]
    [[0, 1], [2, 3]]
    >>> packing.items.tolist(), packing.offsets.tolist()
    ([0, 1, 2, 3], [0, 2, 4])
    >>> packing.num_bins, packing.efficiency
    (2, 0.875)

    Attributes:
        items: (documents,) int32, indices into the lengths that were packed, each exactly once; bin b holds
            `items[offsets[b] : offsets[b + 1]]`, in ascending order.
        offsets: (num_bins + 1,) int64.
        num_tokens: the sum of all lengths.
        capacity: tokens that fit into a bin.
    """

    items: NDArray[np.int32]
    offsets: NDArray[np.int64]
    num_tokens: int
    capacity: int

    @property
    def num_bins(self) -> int:
        return len(self.offsets) - 1

    @property
    def efficiency(self) -> float:
        """The share of the bins' capacity that holds tokens, from 0 to 1; 1 where there is no bin to waste."""
        return self.num_tokens / (self.num_bins * self.capacity) if self.num_bins else 1.0

    def __len__(self) -> int:
        return self.num_bins

    def __getitem__(self, bin_index: int) -> NDArray[np.int32]:
        """The items of one bin, a view; negative indices count from the end."""
        num_bins = self.num_bins
        if not -num_bins <= bin_index < num_bins:
            raise IndexError(f"bin {bin_index} of a packing with {num_bins} bins")
        bin_index %= num_bins
        return self.items[self.offsets[bin_index] : self.offsets[bin_index + 1]]

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        return (self[bin_index] for bin_index in range(self.num_bins))

    def __repr__(self) -> str:
        return (
            f"Packing({len(self.items)} documents in {self.num_bins} bins of {self.capacity} tokens, "
            f"efficiency {self.efficiency:.2%})"
        )


def pack(lengths: Sequence[int] | NDArray[Any], capacity: int) -> Packing:
    """Put whole documents into as few bins as best-fit-decreasing finds, in O(documents + capacity) time and memory.

    Documents are taken from the longest to the shortest, and each goes into the fullest bin that still has room for
    it. The result is exact best-fit-decreasing and depends on nothing but the arguments. The first call compiles the
    loop (seconds); the machine code is cached on disk.

    Args:
        lengths: (documents,) integers, tokens per document, each from 1 to `capacity`: a sequence, an array or a tensor
            in host memory.
        capacity: tokens per bin, at least 1.

    Returns:
        The packing; its arrays are fresh.

    Raises:
        ValueError: no lengths, lengths that aren't a row of integers, an empty document, one longer than `capacity`, or
            a capacity that isn't a positive integer. No document is dropped, cut or split.

    Source: Johnson, Near-optimal bin packing algorithms (MIT, 1973) defines the heuristic.
    """
    capacity = positive_integer(capacity, "capacity")
    checked = fit_lengths(lengths, capacity).lengths
    from tritonpack.packing.best_fit import best_fit_decreasing  # numba, slow to import: only when something is packed

    items, offsets = best_fit_decreasing(checked, capacity)
    return Packing(items, offsets, int(checked.sum(dtype=np.int64)), capacity)

"""pack: puts documents into bins of a fixed number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tritonpack.checks import check_choice
from tritonpack.packing.lengths import Overlong, OverlongReport, check_integer, check_limit, fit_lengths
from tritonpack.removed import refuse_removed

Algorithm = Literal["best_fit_decreasing", "best_fit", "next_fit"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)


@dataclass(frozen=True, eq=False)
class Packing:
    """The entries of each bin: whole documents, or pieces of documents that were too long.

    A document of 12 tokens is split into 8 and 4:

    >>> packing = pack([3, 12], capacity=8, overlong="split")
    >>> [items.tolist() for items in packing], packing.spans(1)
    ([[1], [1, 0]], [(1, 8, 12), (0, 0, 3)])
    >>> packing.items.tolist(), packing.starts.tolist(), packing.lengths.tolist(), packing.offsets.tolist()
    ([1, 1, 0], [0, 8, 0], [8, 4, 3], [0, 1, 3])
    >>> packing.num_bins, packing.lower_bound, packing.efficiency
    (2, 2, 0.9375)
    >>> print(packing.report)
    1 document longer than the capacity split into 2 pieces: no token lost

    Attributes:
        items: (entries,) int32, the document of each entry. Bin b holds `items[offsets[b] : offsets[b + 1]]`:
            ascending, or from long to short after "best_fit_decreasing".
        starts: (entries,) int64, the first token of each entry in its document.
        lengths: (entries,) int32, the tokens of each entry.
        offsets: (num_bins + 1,) int64.
        capacity, max_items: tokens and documents that fit into a bin; None for any number of documents.
        report: what was done with the documents that are longer than the capacity.
    """

    items: NDArray[np.int32]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int32]
    offsets: NDArray[np.int64]
    capacity: int
    max_items: int | None
    report: OverlongReport

    @cached_property
    def num_tokens(self) -> int:
        """The number of tokens in all bins."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def efficiency(self) -> float:
        """The share of the capacity of all bins that holds tokens, above 0 and at most 1."""
        return self.num_tokens / (self.num_bins * self.capacity)

    @cached_property
    def lower_bound(self) -> int:
        """A number of bins that no packing of these entries can go below (Martello and Toth's bound L2)."""
        return lower_bound(self.lengths, self.capacity, self.max_items)

    @property
    def num_bins(self) -> int:
        return len(self.offsets) - 1

    def __len__(self) -> int:
        return self.num_bins

    def __getitem__(self, bin_index: int) -> NDArray[np.int32]:
        """The items of a bin, a view; negative indices count from the end, IndexError for others."""
        return self.items[self._entries(bin_index)]

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        return map(self.__getitem__, range(self.num_bins))

    def _entries(self, bin_index: int) -> slice:
        num_bins, bin_index = self.num_bins, index(bin_index)
        if not -num_bins <= bin_index < num_bins:
            raise IndexError(f"bin {bin_index} of a packing with {num_bins} bins")
        bin_index %= num_bins
        return slice(self.offsets[bin_index], self.offsets[bin_index + 1])

    def spans(self, bin_index: int) -> list[tuple[int, int, int]]:
        """(document, start, stop) of each entry of a bin; the bin holds `tokens[document][start:stop]`."""
        entries = self._entries(bin_index)
        starts, lengths = self.starts[entries], self.lengths[entries]
        return list(zip(self.items[entries].tolist(), starts.tolist(), (starts + lengths).tolist(), strict=True))

    def __repr__(self) -> str:
        entries = f"{len(self.items)} documents{' and pieces of documents' if self.report.documents else ''}"
        return f"Packing({entries} in {self.num_bins} bins of {self.capacity} tokens, efficiency {self.efficiency:.2%})"


def pack(
    lengths: Sequence[int] | NDArray[Any],
    capacity: int,
    *,
    algorithm: Algorithm = "best_fit_decreasing",
    max_items: int | None = None,
    overlong: Overlong = "error",
) -> Packing:
    """Put documents into bins of `capacity` tokens.

    | algorithm | documents are taken | into the | time |
    |---|---|---|---|
    | best_fit_decreasing | from long to short | fullest bin with room | documents + capacity |
    | best_fit | in input order | fullest bin with room | documents x log capacity |
    | next_fit | in input order | last bin, or a new one: bins hold consecutive documents | documents |

    "best_fit_decreasing" needs hardly more bins than any packing must. Its bins go from the longest documents to the
    shortest, so train on the bins in random order.

    Args:
        lengths: (documents,) integers of at least 1, at least one of them; of `Units` their `tokens`.
        capacity: tokens per bin, at least 1.
        algorithm: see above.
        max_items: documents (or pieces) per bin, at least 1; None for any number.
        overlong: "error" refuses documents longer than `capacity`; "truncate" keeps their first `capacity` tokens;
            "split" makes pieces of `capacity` tokens and a rest; "drop" leaves them out. The packing has a `report`.

    Raises:
        ValueError: no lengths, lengths that aren't positive integers, a document longer than `capacity` under "error",
            an unknown option.
        ImportError: numba can't be imported.

    Source: Johnson, Near-optimal bin packing algorithms (MIT, 1973) defines the heuristics.
    """
    capacity = check_integer(capacity, "capacity")
    if algorithm in ("first_fit", "windowed"):
        refuse_removed([algorithm], "pack()")
    check_choice(algorithm, ALGORITHMS, "algorithm")
    limit = check_limit(max_items, "max_items")
    fitted = fit_lengths(lengths, capacity, overlong)

    from tritonpack.packing import heuristics  # imports numba, which is slow

    assign = getattr(heuristics, algorithm)
    entries, offsets = assign(fitted.lengths, capacity, min(limit, len(fitted.lengths)))
    items = entries if fitted.documents is None else fitted.documents[entries]
    starts = np.zeros(len(entries), dtype=np.int64) if fitted.starts is None else fitted.starts[entries]
    return Packing(items, starts, fitted.lengths[entries], offsets, capacity, max_items, fitted.report)


def lower_bound(lengths: NDArray[np.int32], capacity: int, max_items: int | None = None) -> int:
    """Martello and Toth's bound L2, in O(documents + capacity); with `max_items`, at least documents / max_items.

    A document above half the capacity needs a bin of its own. Smaller documents of at least a threshold don't fit
    beside documents above capacity - threshold. They fill the room beside the remaining large ones, and the rest of
    their tokens needs more bins. L2 is the largest number over all thresholds. A 4 doesn't fit beside a 7, so two bins
    hold the 7s, and the three 4s need two more:

    >>> lower_bound([4, 4, 4, 7, 7], capacity=10)
    4

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

"""pack: documents into bins of a fixed number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tritonpack.checks import check_choice
from tritonpack.packing.lengths import (
    MAX_INT32,
    Overlong,
    OverlongReport,
    check_rows,
    fit_lengths,
    positive_integer,
)

Algorithm = Literal["best_fit_decreasing", "first_fit_decreasing", "first_fit", "next_fit", "windowed"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
WINDOW = 1024  # documents that "windowed" packs at a time
CARRY_THRESHOLD = 0.95  # the filled share of a bin below which it leaves its documents to the next window


@dataclass(frozen=True, eq=False)
class Packing:
    """Which documents each bin holds: arrays of entries, and the offsets at which bins begin (CSR form).

    An entry is a run of a document's tokens: nearly always all of them, a piece where the document was too long.

    Documents of 5, 3, 4 and 2 tokens in bins of 8:

    >>> packing = pack([5, 3, 4, 2], capacity=8)
    >>> [items.tolist() for items in packing]
    [[0, 1], [2, 3]]
    >>> packing.items.tolist(), packing.offsets.tolist()
    ([0, 1, 2, 3], [0, 2, 4])
    >>> packing.num_bins, packing.lower_bound, packing.efficiency
    (2, 2, 0.875)

    With a document of 12 tokens, cut into 8 and 4. Document 1's tokens 8 to 12 share a bin with document 0:

    >>> packing = pack([3, 12], capacity=8, overlong="split")
    >>> packing.items.tolist(), packing.starts.tolist(), packing.lengths.tolist(), packing.offsets.tolist()
    ([1, 1, 0], [0, 8, 0], [8, 4, 3], [0, 1, 3])
    >>> [packing.spans(bin_index) for bin_index in range(packing.num_bins)]
    [[(1, 0, 8)], [(1, 8, 12), (0, 0, 3)]]
    >>> print(packing.report)
    1 document longer than the capacity split into 2 pieces: no token lost

    Attributes:
        items: (entries,) int32, each entry's document, an index into the lengths that were packed; bin b holds
            `items[offsets[b] : offsets[b + 1]]`: ascending, but from long to short after the decreasing algorithms.
            Every document occurs once, after splitting once per piece, after dropping perhaps not at all.
        starts: (entries,) int64, the entry's first token within its document: 0 but for later pieces of a split one.
        lengths: (entries,) int32, the entry's tokens.
        offsets: (num_bins + 1,) int64.
        capacity: tokens that fit into a bin.
        max_items: documents that fit into a bin, None for any number.
        report: what became of the documents that are longer than the capacity.

    Raises:
        ValueError: arrays or numbers that aren't as above.
    """

    items: NDArray[np.int32]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int32]
    offsets: NDArray[np.int64]
    capacity: int
    max_items: int | None
    report: OverlongReport

    def __post_init__(self) -> None:
        check_rows(self.items, self.offsets)
        for name in ("starts", "lengths"):
            values = getattr(self, name)
            if not isinstance(values, np.ndarray) or values.shape != self.items.shape or values.dtype.kind not in "iu":
                raise ValueError(
                    f"{name} must be integers, one for each of {len(self.items)} items; got {values!r:.100}."
                )
        positive_integer(self.capacity, "capacity")
        if self.max_items is not None:
            positive_integer(self.max_items, "max_items")
        if not isinstance(self.report, OverlongReport):
            raise ValueError(f"report must be an OverlongReport; got {self.report!r:.100}.")

    @property
    def num_bins(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def num_tokens(self) -> int:
        """The tokens in all bins."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def efficiency(self) -> float:
        """The share of the bins' capacity that holds tokens, above 0 and at most 1."""
        return self.num_tokens / (self.num_bins * self.capacity)

    @cached_property
    def lower_bound(self) -> int:
        """Bins that any packing of these entries needs at least (Martello and Toth's L2, and documents / max_items)."""
        return lower_bound(self.lengths, self.capacity, self.max_items)

    def spans(self, bin_index: int) -> list[tuple[int, int, int]]:
        """What one bin holds: (document, start, stop) of each entry, so that `tokens[document][start:stop]` goes in."""
        entries = self._entries(bin_index)
        stops = self.starts[entries] + self.lengths[entries]
        columns = (self.items[entries].tolist(), self.starts[entries].tolist(), stops.tolist())
        return list(zip(*columns, strict=True))

    def __len__(self) -> int:
        return self.num_bins

    def __getitem__(self, bin_index: int) -> NDArray[np.int32]:
        """The items of one bin, a view; negative indices count from the end."""
        return self.items[self._entries(bin_index)]

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        return (self[bin_index] for bin_index in range(self.num_bins))

    def __repr__(self) -> str:
        entries = "documents" if not self.report.documents else "documents and pieces of documents"
        return (
            f"Packing({len(self.items)} {entries} in {self.num_bins} bins of {self.capacity} tokens, "
            f"efficiency {self.efficiency:.2%})"
        )

    def _entries(self, bin_index: int) -> slice:
        num_bins, bin_index = self.num_bins, index(bin_index)
        if not -num_bins <= bin_index < num_bins:
            raise IndexError(f"bin {bin_index} of a packing with {num_bins} bins")
        bin_index %= num_bins
        return slice(self.offsets[bin_index], self.offsets[bin_index + 1])


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
    | first_fit_decreasing | from long to short | first bin with room | documents x log bins |
    | first_fit | in input order | first bin with room | documents x log bins |
    | next_fit | in input order | last bin, or a new one: bins hold consecutive documents | documents |
    | windowed | in input order by windows of 1024, from long to short in each | fullest bin with room | documents |

    The first two come within a fraction of a percent of the fewest bins that are possible, but their bins go from the
    longest documents to the shortest: train on them in random order. "windowed" is nearly as good and keeps the order
    but for a few windows: bins that it fills to less than 95% are packed again with the next window, up to twice.

    Each is exact, as a test against its plain loop shows, and depends on nothing but the arguments. The first call
    compiles the loop (seconds); the machine code is cached on disk.

    Args:
        lengths: (documents,) integers, at least one, tokens per document, at least 1: a sequence, an array or a tensor
            in host memory.
        capacity: tokens per bin, at least 1.
        algorithm: see above.
        max_items: documents (or pieces) per bin, at least 1; None for any number.
        overlong: what to do with documents longer than `capacity`: "error" refuses them; "truncate" keeps their first
            `capacity` tokens; "split" makes pieces of `capacity` tokens and a rest, which go into bins like documents;
            "drop" leaves them out. `report` tells what was done.

    Returns:
        The packing; its arrays are fresh.

    Raises:
        ValueError: no lengths, lengths that aren't a row of integers, an empty document, one longer than `capacity`
            under "error", an option that isn't one of those allowed.

    Source: Johnson, Near-optimal bin packing algorithms (MIT, 1973) defines the heuristics.
    """
    capacity = positive_integer(capacity, "capacity")
    check_choice(algorithm, ALGORITHMS, "algorithm")
    limit = MAX_INT32 if max_items is None else positive_integer(max_items, "max_items")
    fitted = fit_lengths(lengths, capacity, overlong)

    from tritonpack.packing import heuristics  # imports numba, which is slow: only when something is packed

    assign = getattr(heuristics, algorithm)
    entries, offsets = assign(fitted.lengths, capacity, min(limit, len(fitted.lengths)))
    return Packing(
        items=entries if fitted.documents is None else fitted.documents[entries],
        starts=np.zeros(len(entries), dtype=np.int64) if fitted.starts is None else fitted.starts[entries],
        lengths=heuristics.gather(fitted.lengths, entries),
        offsets=offsets,
        capacity=capacity,
        max_items=max_items,
        report=fitted.report,
    )


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

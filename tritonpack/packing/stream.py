"""pack_stream: bins from documents that come one after the other, for data that doesn't fit in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from typing import Any

import numpy as np

from tritonpack.checks import check_choice, is_number
from tritonpack.packing.bins import CARRY_THRESHOLD, WINDOW
from tritonpack.packing.documents import Length, check_length_function, checked_length, cut, require_iterable
from tritonpack.packing.lengths import MAX_INT32, POLICIES, Overlong, OverlongReport, positive_integer


class PackedStream(Iterator[list[Any]]):
    """What pack_stream returns: an iterator over bins that counts what it has yielded so far.

    Attributes:
        num_bins: bins yielded.
        num_tokens: tokens in them.
        report: what became of documents longer than the capacity, of those that were read.
    """

    def __init__(
        self,
        documents: Iterable[Any],
        capacity: int,
        window: int,
        overlong: Overlong,
        max_items: int,
        length: Length | None,
        carry_threshold: float,
    ) -> None:
        self.num_bins = 0
        self.num_tokens = 0
        self.report = OverlongReport(overlong)
        self._capacity = capacity
        self._length = length
        self._bins = self._pack(self._pieces(documents), window, max_items, carry_threshold)

    @property
    def efficiency(self) -> float:
        """The share of the yielded bins' capacity that holds tokens; 1 where there is no bin yet."""
        return self.num_tokens / (self.num_bins * self._capacity) if self.num_bins else 1.0

    def __next__(self) -> list[Any]:
        return next(self._bins)

    def _pieces(self, documents: Iterable[Any]) -> Iterator[tuple[Any, int]]:
        """Whole documents and pieces of those that are too long, each with its tokens."""
        capacity, policy = self._capacity, self.report.policy
        for number, document in enumerate(documents):
            tokens = checked_length(document, number, self._length)
            if tokens <= capacity:
                yield document, tokens
                continue
            if policy == "error":
                raise ValueError(
                    f"document {number} has {tokens} tokens, longer than the capacity of {capacity}. Raise the "
                    "capacity, or say what to do with such documents: overlong='truncate', 'split' or 'drop'."
                )
            end = {"drop": 0, "truncate": capacity, "split": tokens}[policy]
            spans = [(start, min(start + capacity, end)) for start in range(0, end, capacity)]
            yield from [(cut(document, start, stop, tokens, number), stop - start) for start, stop in spans]
            seen = self.report
            self.report = OverlongReport(
                policy, seen.documents + 1, seen.tokens_lost + tokens - end, seen.pieces + len(spans)
            )

    def _pack(
        self, pieces: Iterator[tuple[Any, int]], window: int, max_items: int, carry_threshold: float
    ) -> Iterator[list[Any]]:
        from tritonpack.packing.heuristics import WindowPacker  # numba, slow to import: only when something is packed

        packer = WindowPacker(self._capacity, max_items, carry_threshold)
        held: dict[int, tuple[Any, int]] = {}
        read = 0
        chunk = list(islice(pieces, window))
        while chunk:
            following = list(islice(pieces, 1))  # tells whether this window is the last
            held |= enumerate(chunk, start=read)
            read += len(chunk)
            lengths = np.array([tokens for _, tokens in chunk], dtype=np.int32)
            numbers, offsets = packer.add(lengths, last=not following)
            chunk = following + list(islice(pieces, window - 1))
            for start, stop in pairwise(offsets):
                entries = [held.pop(number) for number in numbers[start:stop].tolist()]
                self.num_bins += 1
                self.num_tokens += sum(tokens for _, tokens in entries)
                yield [document for document, _ in entries]


def pack_stream(
    documents: Iterable[Any],
    capacity: int,
    *,
    window: int = WINDOW,
    overlong: Overlong = "error",
    max_items: int | None = None,
    length: Length | None = None,
    carry_threshold: float = CARRY_THRESHOLD,
) -> PackedStream:
    """Bins of documents from any iterable, in one pass over it.

    The algorithm is that of `pack(algorithm="windowed")`, with the same bins for the same window: each window is packed
    by best-fit-decreasing, and the documents of poorly filled bins go on to the next window, at most twice. So about
    three windows of documents are in memory at most, the order is nearly that of the input, and once the iterable ends
    every document has been yielded.

    In a DataLoader with several workers each of them must get its own part of the documents.

    >>> stream = pack_stream([[1, 2, 3], [4, 5, 6, 7, 8, 9], [10]], capacity=4, overlong="split")
    >>> list(stream)
    [[[1, 2, 3], [10]], [[4, 5, 6, 7]], [[8, 9]]]
    >>> stream.num_bins, stream.num_tokens, str(stream.report)
    (3, 10, '1 document longer than the capacity split into 2 pieces: no token lost')

    Args:
        documents: each a row of tokens (a list, an array, a tensor) or a mapping with one as "input_ids", as `datasets`
            yields them; documents of any other form with `length`.
        capacity: tokens per bin, at least 1.
        window: documents (or pieces) that are packed at a time, at least 1.
        overlong: what to do with a document longer than `capacity`: "error" refuses it, "truncate" keeps its first
            `capacity` tokens, "split" makes pieces of `capacity` tokens and a rest, "drop" leaves it out. Pieces of a
            mapping have all of its columns cut alike.
        max_items: documents per bin, at least 1; None for any number.
        length: the number of a document's tokens.
        carry_threshold: the filled share of a bin, from 0 to 1, below which its documents go on to the next window.

    Returns:
        An iterator over bins, lists of documents; its `num_bins`, `num_tokens` and `efficiency` count what has been
        yielded, its `report` what has been read.

    Raises:
        ValueError: here for an option that isn't one of those allowed; while iterating for a document that is empty,
            has no tokens to count, is longer than `capacity` under "error", or must be cut and holds something that
            isn't one value per token.
    """
    require_iterable(documents)
    check_length_function(length)
    capacity = positive_integer(capacity, "capacity")
    window = positive_integer(window, "window")
    limit = MAX_INT32 if max_items is None else positive_integer(max_items, "max_items")
    check_choice(overlong, POLICIES, "overlong")
    if not is_number(carry_threshold):
        raise ValueError(f"carry_threshold must be a number from 0 to 1; got {carry_threshold!r}.")
    if not 0 <= carry_threshold <= 1:
        raise ValueError(f"carry_threshold must be from 0 to 1, the filled share of a bin; got {carry_threshold}.")
    return PackedStream(documents, capacity, window, overlong, limit, length, carry_threshold)

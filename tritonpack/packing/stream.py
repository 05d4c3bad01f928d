"""pack_stream: packs documents of an iterable into bins, for data that doesn't fit in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from typing import Any

import numpy as np

from tritonpack.checks import check_choice, is_number
from tritonpack.packing.documents import TOKENS, Length, check_length_function, checked_length, cut, is_iterable
from tritonpack.packing.lengths import POLICIES, Overlong, OverlongReport, check_integer, check_limit


class PackedStream(Iterator[list[Any]]):
    """The iterator over bins that pack_stream returns.

    Attributes:
        num_bins: bins yielded.
        num_tokens: tokens in them.
        report: what was done with the documents longer than the capacity, so far.
    """

    def __init__(
        self, documents: Iterable[Any], window: int, overlong: Overlong, length: Length | None, packer: Any
    ) -> None:
        self.num_bins = 0
        self.num_tokens = 0
        self.report = OverlongReport(overlong)
        self._capacity = packer.capacity
        self._length = length
        self._bins = self._pack(self._pieces(documents), window, packer)

    @property
    def efficiency(self) -> float:
        """The share of the capacity of the yielded bins that holds tokens; 1 before the first bin."""
        return self.num_tokens / (self.num_bins * self._capacity) if self.num_bins else 1.0

    def __next__(self) -> list[Any]:
        return next(self._bins)

    def _pieces(self, documents: Iterable[Any]) -> Iterator[tuple[Any, int]]:
        """Whole documents and pieces of documents, each with its number of tokens."""
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

    def _pack(self, pieces: Iterator[tuple[Any, int]], window: int, packer: Any) -> Iterator[list[Any]]:
        held: dict[int, tuple[Any, int]] = {}
        read = 0
        chunk = list(islice(pieces, window))
        while chunk:
            following = list(islice(pieces, 1))  # empty after the last window
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
    window: int = 1024,
    overlong: Overlong = "error",
    max_items: int | None = None,
    length: Length | None = None,
    carry_threshold: float = 0.95,
) -> PackedStream:
    """Pack documents from any iterable, in one pass over it.

    The bins are those of `pack(algorithm="windowed")` with the same window. Each window is packed by
    best-fit-decreasing, and the documents of poorly filled bins are packed again with the next window, at most twice.
    So at most about three windows are in memory, and the order is nearly the input order.

    If a DataLoader with several workers uses the stream, give each worker its own part of the documents.

    >>> stream = pack_stream([[1, 2, 3], [4, 5, 6, 7, 8, 9], [10]], capacity=4, overlong="split")
    >>> list(stream)
    [[[1, 2, 3], [10]], [[4, 5, 6, 7]], [[8, 9]]]
    >>> stream.num_bins, stream.num_tokens, str(stream.report)
    (3, 10, '1 document longer than the capacity split into 2 pieces: no token lost')

    Args:
        documents: rows of tokens (lists, arrays, tensors) or mappings with a row as "input_ids"; with `length`,
            documents of any form.
        capacity: tokens per bin, at least 1.
        window: the number of documents (or pieces) that are packed at a time, at least 1.
        overlong, max_items: see `pack`. All columns of a mapping are cut.
        length: returns the number of tokens of a document.
        carry_threshold: the filled share of a bin, from 0 to 1, below which its documents are packed again.

    Raises:
        ValueError: a wrong option; while iterating, a document that is empty, has another form, is longer than
            `capacity` under "error", or must be cut and holds something else than one value per token.
        ImportError: numba can't be imported.
    """
    if not is_iterable(documents):
        raise ValueError(
            f"documents must be an iterable of documents, each a row of tokens or a mapping with {TOKENS!r}; got "
            f"{type(documents).__name__}."
        )
    check_length_function(length)
    capacity = check_integer(capacity, "capacity")
    window = check_integer(window, "window")
    limit = check_limit(max_items, "max_items")
    check_choice(overlong, POLICIES, "overlong")
    if not is_number(carry_threshold) or not 0 <= carry_threshold <= 1:
        raise ValueError(
            f"carry_threshold must be a number from 0 to 1, the filled share of a bin; got {carry_threshold!r}."
        )

    from tritonpack.packing.heuristics import WindowPacker  # imports numba, which is slow

    return PackedStream(documents, window, overlong, length, WindowPacker(capacity, limit, carry_threshold))

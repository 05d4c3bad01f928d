"""The pieces of a stream's documents, for one rank and one worker, read from a mark on."""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from tritonpack.packing.documents import checked_length, cut, is_iterable, unreadable
from tritonpack.packing.lengths import OverlongReport
from tritonpack.packing.samplers.state import digest

Piece = tuple[Any, int]  # a document or a part of one, and its tokens
_END = object()

# A place between two documents: the numbers of the next piece and of the next document of the source, and what the
# source's `state_dict` returned there; None if it has none, and at the beginning.
Mark = namedtuple("Mark", ("piece", "document", "source"), defaults=(0, 0, None))


class StreamReader:
    """The pieces of the documents for one rank and one worker, from a mark on.

    An IterableDataset divides its documents among workers itself, as torch demands. Of other iterables every worker
    takes its part, and passes over the others.

    Attributes:
        has_epochs: the documents have `set_epoch`.
        marks: a mark for about each window, ascending; the first is the one that reading began at.
        lengths: the tokens of each piece from the first mark on.
        report: what was done with documents longer than the capacity.
    """

    def __init__(self, stream: Any, mark: Mark) -> None:
        documents = stream._documents
        values: Any = documents if is_iterable(documents) else documents()
        if not is_iterable(values):
            raise ValueError(
                f"the function must return an iterable of documents for each pass; it returned {values!r:.100}."
            )
        self.has_epochs = hasattr(values, "set_epoch")
        if self.has_epochs and stream._passes_epochs_on:
            values.set_epoch(stream.epoch)
        (ranks, rank), (worker, workers) = stream._ranks, worker_place()
        if isinstance(values, IterableDataset):
            worker, workers = 0, 1
        self._parts, self._part = ranks * workers, rank * workers + worker
        if mark.source is not None:
            if is_from_datasets(values):  # would begin every later pass of the epoch at the state; copy.copy shares it
                given, values = values, object.__new__(type(values))
                values.__dict__.update(given.__dict__)
            values.load_state_dict(mark.source)
        self._values, self._iterator = values, iter(values)
        self._number, self._first = 0 if mark.source is None else mark.document, mark.document  # of documents
        self._options, self._length = stream._options, stream._length
        self.marks, self.report = [mark], OverlongReport(self._options["overlong"])
        self.lengths: list[int] = []
        self._pieces = self._read()

    def digest(self) -> str:
        """A digest of `lengths`."""
        return digest(np.array(self.lengths, dtype=np.int64))

    def take(self, count: int) -> list[Piece]:
        """The next pieces; fewer at the end."""
        return list(islice(self._pieces, count))

    def forget(self, piece: int) -> None:
        """Leave out the marks that aren't needed to read this piece and later ones."""
        while len(self.marks) > 1 and self.marks[1].piece <= piece:
            del self.lengths[: self.marks[1].piece - self.marks[0].piece]
            del self.marks[0]

    def _next(self) -> Any:
        """The next document of this rank and worker; _END after the last."""
        while True:
            try:
                document = next(self._iterator, _END)
            except Exception as error:
                raise unreadable(f"document {self._number} of the stream", error) from error
            number, self._number = self._number, self._number + (document is not _END)
            if document is _END or (number >= self._first and number % self._parts == self._part):
                return document

    def _read(self) -> Iterator[Piece]:
        capacity, policy, window = (self._options[name] for name in ("capacity", "overlong", "window"))
        values = self._values
        has_state = hasattr(values, "state_dict") and hasattr(values, "load_state_dict")
        while True:
            piece = self.marks[0].piece + len(self.lengths)
            if piece >= self.marks[-1].piece + window:
                self.marks.append(Mark(piece, self._number, values.state_dict() if has_state else None))
            if (document := self._next()) is _END:
                return
            number = self._number - 1
            tokens = checked_length(document, number, self._length)
            if tokens <= capacity:
                self.lengths.append(tokens)
                yield document, tokens
                continue
            if policy == "error":
                raise ValueError(
                    f"document {number} has {tokens} tokens, longer than the capacity of {capacity}. Raise the "
                    "capacity, or say what to do with such documents: overlong='truncate', 'split' or 'drop'."
                )
            end = {"drop": 0, "truncate": capacity, "split": tokens}[policy]
            spans = [(start, min(start + capacity, end)) for start in range(0, end, capacity)]
            for start, stop in spans:
                self.lengths.append(stop - start)
                yield cut(document, start, stop, tokens, number), stop - start
            seen, lost = self.report, tokens - end
            counts = (seen.documents + 1, seen.tokens_lost + lost, seen.pieces + len(spans))
            self.report = OverlongReport(policy, *counts)


def is_from_datasets(documents: Any) -> bool:
    """Return whether documents are an IterableDataset of the package datasets."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(documents, datasets.IterableDataset)


def worker_place() -> tuple[int, int]:
    """The number of this DataLoader worker and of all of them; (0, 1) outside of workers."""
    worker = get_worker_info()
    return (0, 1) if worker is None else (worker.id, worker.num_workers)

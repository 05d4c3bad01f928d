"""One pass over the documents of a stream: reading them, cutting them, packing them, and the place to resume from.

Documents become pieces (whole documents, or parts of documents that are too long), numbered from 0. Window w holds the
pieces [w x window, (w + 1) x window). A place holds no documents: it says from where to read again the at most three
windows of which some pieces are carried, and which bins to skip.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise
from typing import Any, Literal

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from tritonpack.notices import say_once
from tritonpack.packing.bins import divide_bins
from tritonpack.packing.documents import Length, checked_length, cut, is_iterable, unreadable
from tritonpack.packing.lengths import Overlong, OverlongReport, check_limit
from tritonpack.packing.samplers.state import digest

Piece = tuple[Any, int]  # with its tokens
Divide = Literal["bins", "documents"]
_END = object()


@dataclass(frozen=True)
class Options:
    """The options of a stream that decide its bins, see pack_stream. `rank` is None for the bins of all ranks."""

    capacity: int
    window: int
    overlong: Overlong
    max_items: int | None
    carry_threshold: float
    divide: Divide
    num_replicas: int
    rank: int | None

    @property
    def round_size(self) -> int:
        """The number of bins of a round, one for each rank that takes a bin of it."""
        return self.num_replicas if self.divide == "bins" else 1


@dataclass(frozen=True)
class Mark:
    """A place between two documents.

    Attributes:
        piece: the number of the next piece.
        document: the number of the next document of the source, counting those of other ranks and workers.
        source: what the source's `state_dict` returned there; None if it has none, and at the beginning.
    """

    piece: int
    document: int
    source: Any


@dataclass(frozen=True)
class Place:
    """The place of a pass, from which another pass goes on.

    Attributes:
        mark: from where to read.
        checked: a digest of the tokens of each piece from there to the last that was read.
        first: the number of the first piece of the window.
        carried: (number, tokens, carries) of the pieces that were carried into the window.
        waiting: the pieces of each bin that waited for a whole round before the window.
        bins_done: bins of the window that were yielded, or were for other ranks.
        num_bins, num_tokens, report: see PackedStream.
    """

    mark: Mark
    checked: str
    first: int
    carried: list[list[int]]
    waiting: list[list[int]]
    bins_done: int
    num_bins: int
    num_tokens: int
    report: OverlongReport


def is_from_datasets(documents: Any) -> bool:
    """Whether documents are an IterableDataset of the package datasets."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(documents, datasets.IterableDataset)


def worker_place() -> tuple[int, int]:
    """The number of this DataLoader worker and of all of them; (0, 1) outside of workers."""
    worker = get_worker_info()
    return (0, 1) if worker is None else (worker.id, worker.num_workers)


def _shallow_copy(values: Any) -> Any:
    """A copy of an object with attributes of its own. copy.copy leaves those of a datasets.IterableDataset shared."""
    same = object.__new__(type(values))
    same.__dict__.update(values.__dict__)
    return same


class Source:
    """The documents for one rank and one worker, read one after another from a mark.

    An IterableDataset divides its documents among workers itself, as torch demands. Of other iterables every worker
    takes its part.

    Args:
        documents: an iterable, or a function that returns one.
        ranks: (number of ranks, rank) that share the documents.
        epoch: for documents that have `set_epoch`; None leaves theirs.

    Attributes:
        has_epochs: whether the documents have `set_epoch`.
    """

    def __init__(self, documents: Any, ranks: tuple[int, int], mark: Mark, epoch: int | None = None) -> None:
        values: Any = documents if is_iterable(documents) else documents()
        if not is_iterable(values):
            raise ValueError(
                f"the function must return an iterable of documents for each pass; it returned {values!r:.100}."
            )
        self.has_epochs = hasattr(values, "set_epoch")
        if self.has_epochs and epoch is not None:
            values.set_epoch(epoch)
        worker, workers = (0, 1) if isinstance(values, IterableDataset) else worker_place()
        self._parts, self._part = ranks[0] * workers, ranks[1] * workers + worker
        if mark.source is not None and is_from_datasets(values):
            values = _shallow_copy(values)  # it would begin every later pass of the epoch at the state
        self._stateful: Any = None
        if hasattr(values, "state_dict") and hasattr(values, "load_state_dict"):
            self._stateful = values
        if mark.source is not None:
            self._stateful.load_state_dict(mark.source)
        self._iterator = iter(values)
        self.document = 0 if mark.source is None else mark.document
        while self.document < mark.document:  # go forward from the beginning
            if self._read() is _END:
                break
        self.document = mark.document

    def state(self) -> Any:
        """What the source needs to go on here; None if it can't say."""
        return None if self._stateful is None else self._stateful.state_dict()

    def __next__(self) -> Any:
        """The next document of this rank and worker; _END after the last."""
        while (document := self._read()) is not _END:
            if (self.document - 1) % self._parts == self._part:
                return document
        return _END

    def _read(self) -> Any:
        """The next document of all; ValueError with its number if the source raises an exception."""
        try:
            document = next(self._iterator, _END)
        except Exception as error:
            raise unreadable(f"document {self.document} of the stream", error) from error
        self.document += document is not _END
        return document


class Reader:
    """The pieces of a source from a mark on.

    Attributes:
        marks: a mark for about each window, ascending; the first is the one that reading began at.
        lengths: the tokens of each piece from the first mark on.
        report: what was done with documents longer than the capacity.
    """

    def __init__(self, source: Source, options: Options, length: Length | None, mark: Mark) -> None:
        self._source = source
        self._options = options
        self._length = length
        self.report = OverlongReport(options.overlong)
        self.marks = [mark]
        self.lengths: list[int] = []
        self._pieces = self._read()

    def digest(self) -> str:
        """A digest of `lengths`."""
        return digest(np.array(self.lengths, dtype=np.int64))

    def take(self, count: int) -> list[Piece]:
        """The next pieces, each with its tokens; fewer at the end."""
        return list(islice(self._pieces, count))

    def forget(self, piece: int) -> None:
        """Leave out the marks that aren't needed to read this piece and later ones."""
        while len(self.marks) > 1 and self.marks[1].piece <= piece:
            del self.lengths[: self.marks[1].piece - self.marks[0].piece]
            del self.marks[0]

    def _read(self) -> Iterator[Piece]:
        source, capacity, policy = self._source, self._options.capacity, self._options.overlong
        while True:
            piece = self.marks[0].piece + len(self.lengths)
            if piece >= self.marks[-1].piece + self._options.window:
                self.marks.append(Mark(piece, source.document, source.state()))
            document = next(source)
            if document is _END:
                return
            number = source.document - 1
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
            seen = self.report
            self.report = OverlongReport(
                policy, seen.documents + 1, seen.tokens_lost + tokens - end, seen.pieces + len(spans)
            )


class StreamPass(Iterator[list[Any]]):
    """The bins of one pass, from the beginning or from a place.

    If bins are divided among ranks, they come in rounds of one bin for each rank. Bins of an unfinished round wait.

    Attributes:
        num_bins, num_tokens, dropped_documents: see PackedStream.
    """

    def __init__(
        self, options: Options, open_source: Callable[[Mark], Source], length: Length | None, place: Place | None
    ) -> None:
        self.num_bins, self.num_tokens = (0, 0) if place is None else (place.num_bins, place.num_tokens)
        self.dropped_documents = 0
        self._options = options
        self._open_source = open_source
        self._length = length
        self._begin = place
        self._reader: Reader | None = None
        self._window_begin = place  # where the window begins that is being yielded
        self._bins_done = 0 if place is None else place.bins_done
        self._bins = self._pack()

    def __next__(self) -> list[Any]:
        return next(self._bins)

    @property
    def report(self) -> OverlongReport:
        """What was done with the documents longer than the capacity."""
        if self._reader is not None:
            return self._reader.report
        return OverlongReport(self._options.overlong) if self._begin is None else self._begin.report

    def place(self) -> Place | None:
        """Where another pass may go on; None for the beginning. It is of use also after reading has failed."""
        if self._window_begin is None:
            return None
        counts = {"bins_done": self._bins_done, "num_bins": self.num_bins, "num_tokens": self.num_tokens}
        return replace(self._window_begin, **counts)  # type: ignore[arg-type]

    def _open(self, place: Place) -> tuple[Reader, list[Piece], list[Piece], list[Piece]]:
        """A reader at a place, with the pieces since its mark, those of its window, and the one after them."""
        mark = place.mark
        from_beginning = replace(mark, source=None)
        for start in (from_beginning,) if mark.source is None else (mark, from_beginning):
            reader = Reader(self._open_source(start), self._options, self._length, start)
            before, window, following = (
                reader.take(count) for count in (place.first - mark.piece, self._options.window, 1)
            )
            if reader.digest() == place.checked:
                reader.report = place.report
                return reader, before, window, following
            if start.source is not None:
                say_once(
                    "stream-state",
                    "the documents of a stream don't go on where their state_dict said, as with shuffle buffers of "
                    f"datasets. So the first {mark.document:,} documents are read again and passed over.",
                )
        raise ValueError(
            "the documents aren't those that the state was saved with: their lengths differ. Resume over the same "
            "documents in the same order: the same data, the same seed of shuffling and, if they are an iterator, a "
            "new one."
        )

    def _pack(self) -> Iterator[list[Any]]:
        from tritonpack.packing.heuristics import WindowPacker  # imports numba, which is slow

        options = self._options
        ranks = options.round_size
        own = range(ranks) if options.rank is None or ranks == 1 else (options.rank,)
        packer = WindowPacker(options.capacity, check_limit(options.max_items, "max_items"), options.carry_threshold)
        held: dict[int, Piece] = {}
        waiting: list[list[int]] = []
        first = skipped = 0
        if self._begin is None:
            begin = Mark(0, 0, None)
            reader = Reader(self._open_source(begin), options, self._length, begin)
            window, following = reader.take(options.window), reader.take(1)
        else:
            place = self._begin
            reader, before, window, following = self._open(place)
            first, waiting, skipped = place.first, place.waiting, place.bins_done
            packer.restore(place.carried, first)
            left = [number for number, _, _ in place.carried] + list(chain.from_iterable(waiting))
            held = {number: before[number - place.mark.piece] for number in left}
        self._reader = reader
        while window:
            reader.forget(min(held, default=first))
            held |= enumerate(window, first)
            self._bins_done = skipped
            self._window_begin = Place(
                reader.marks[0], reader.digest(), first, packer.carried, waiting, 0, 0, 0, reader.report
            )
            numbers, offsets = packer.add(
                np.array([tokens for _, tokens in window], dtype=np.int32), last=not following
            )
            bins = waiting + [numbers[start:stop].tolist() for start, stop in pairwise(offsets)]
            if not following:
                bins = self._whole_rounds(bins, held, ranks)
            whole = len(bins) - len(bins) % ranks
            for number_in_window, items in enumerate(bins[:whole]):
                pieces = [held.pop(number) for number in items]
                if number_in_window >= skipped and number_in_window % ranks in own:
                    self._bins_done = number_in_window + 1
                    self.num_bins += 1
                    self.num_tokens += sum(tokens for _, tokens in pieces)
                    yield [document for document, _ in pieces]
            waiting, skipped = bins[whole:], 0
            first += len(window)
            window = following + reader.take(options.window - 1)
            following = reader.take(1)

    def _whole_rounds(self, bins: list[list[int]], held: dict[int, Piece], ranks: int) -> list[list[int]]:
        """The last bins, divided until every rank has the same number of them."""
        rest = len(bins) % ranks
        items = list(chain.from_iterable(bins))
        if rest and len(bins) + ranks - rest <= len(items):
            offsets = np.cumsum([0, *map(len, bins)])
            divided = divide_bins(np.array([held[number][1] for number in items]), offsets, len(bins) + ranks - rest)
            return [items[start:stop] for start, stop in pairwise(divided)]
        self.dropped_documents = sum(map(len, bins[len(bins) - rest :]))
        if rest:
            say_once(
                "stream-end",
                f"{self.dropped_documents} documents at the end of a stream don't make a bin for each of {ranks} "
                "ranks, so they are left out. The stream's dropped_documents counts them.",
            )
        return bins

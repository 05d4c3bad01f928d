"""pack_stream: packs documents of an iterable into bins, for data that doesn't fit in memory.

Documents become pieces (whole documents, or parts of documents that are too long), numbered from 0 and packed a window
at a time. Pieces of poorly filled bins are carried into the next window, at most twice. The place from which a pass is
resumed holds no documents. It says from where to read the pieces of at most three windows again, which of them are
carried or wait, and how many bins of the window are done.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import chain, pairwise
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from tritonpack.checks import check_choice, check_flag, is_number
from tritonpack.notices import say_once
from tritonpack.packing.bins import divide_bins
from tritonpack.packing.documents import (
    TOKENS,
    Length,
    is_iterable,
    require_callable,
)
from tritonpack.packing.lengths import POLICIES, Overlong, OverlongReport, check_integer, check_limit
from tritonpack.packing.samplers.epochs import NEVER, EpochCounter
from tritonpack.packing.samplers.ranks import place_among_processes
from tritonpack.packing.samplers.state import describe_changes
from tritonpack.packing.stream_reader import Mark, Piece, StreamReader, is_from_datasets, worker_place

STATE_VERSION = 2
Divide = Literal["bins", "documents"]


class _Shared:
    """An integer attribute of a stream, in the memory that the stream and its copies in workers share."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __get__(self, stream: Any, owner: Any) -> int:
        return int(stream._shared[self._place])

    def __set__(self, stream: Any, value: int) -> None:
        stream._shared[self._place] = value


@dataclass
class _Pass:
    """The progress of a pass; `place`: where its window begins, as in states, None before the first window."""

    report: OverlongReport
    place: dict[str, Any] | None = None
    bins_done: int = 0  # of the window
    num_bins: int = 0
    num_tokens: int = 0
    dropped_documents: int = 0
    is_counted: bool = False  # by EpochCounter


class PackedStream(EpochCounter, IterableDataset):
    """The bins that pack_stream returns, as a torch IterableDataset. Each iteration is a pass over the documents.

    `DataLoader(stream, batch_size=1, collate_fn=PackingCollator())` loads a bin as one row. Every worker packs its own
    part of the documents.

    Attributes:
        epoch: the epoch of the next pass; while a pass is under way its epoch.
        capacity: tokens that fit into a bin.
        num_replicas, rank: as given or found; `rank` is None with `shard=False`.
        num_bins, num_tokens: the bins that the latest pass of this process has yielded, and their tokens.
        report: what it has done with documents longer than the capacity, so far.
        dropped_documents: the documents (or pieces) at its end that don't make a bin for every rank.
    """

    # In shared memory, because DataLoader workers read copies of the stream, and may outlive a pass.
    epoch, _latest, _is_chosen, _number, _had_number, _shift = map(_Shared, range(6))
    _passes = _Shared(6)  # that have begun
    _passes_epochs_on = _Shared(7)  # to the documents: since the first call of set_epoch
    _is_read_by_workers = _Shared(8)

    def __init__(self, documents: Any, options: dict[str, Any], length: Length | None, ranks: tuple[int, int]) -> None:
        self._documents, self._options, self._length, self._ranks = documents, options, length, ranks
        self.capacity, self.num_replicas, self.rank = (options[name] for name in ("capacity", "num_replicas", "rank"))
        self._shared = torch.zeros(9, dtype=torch.int64, device="cpu").share_memory_()
        EpochCounter.__init__(self)
        self._was_read = False  # in this process
        self._resume: tuple[dict[str, Any] | None, int, int | None] | None = None  # a place, its epoch, and `_passes`
        self._worker = (0, 1)  # of the latest pass, or of the state that was loaded
        self._pass, self._pass_epoch = _Pass(OverlongReport(options["overlong"])), NEVER

    num_bins = property(lambda self: self._pass.num_bins)
    num_tokens = property(lambda self: self._pass.num_tokens)
    report = property(lambda self: self._pass.report)
    dropped_documents = property(lambda self: self._pass.dropped_documents)

    @property
    def efficiency(self) -> float:
        """The share of the capacity of the yielded bins that holds tokens; 1 before the first bin."""
        return self.num_tokens / (self.num_bins * self.capacity) if self.num_bins else 1.0

    def __iter__(self) -> Iterator[list[Any]]:
        worker, place = worker_place(), self._begin_of_next()
        if place is not None and self._worker != worker:
            raise ValueError(
                f"the state was saved by worker {self._worker[0]} of {self._worker[1]}, and this is worker {worker[0]} "
                f"of {worker[1]}. Resume with the same num_workers, and through torchdata's StatefulDataLoader, which "
                "gives every worker its own state."
            )
        self._is_read_by_workers = get_worker_info() is not None
        self._resume, self._worker, self._pass_epoch = None, worker, self.epoch
        self._pass = this = _Pass(OverlongReport(self._options["overlong"]))
        if place is not None:
            this.report, this.place = OverlongReport(**place["report"]), place
            this.bins_done, this.num_bins, this.num_tokens = (place[name] for name in _DONE)
        return self._pack(this)

    def _begin_of_next(self) -> dict[str, Any] | None:
        """The place of a loaded state, if no pass has begun there and no other epoch was chosen."""
        if self._resume is None:
            return None
        place, epoch, passes = self._resume
        return place if epoch == self.epoch and passes in (None, self._passes) else None

    def _open(self, this: _Pass, mark: Mark) -> StreamReader:
        """Open the documents for a pass at a mark."""
        if isinstance(self._documents, Iterator) and (self._was_read or worker_place()[1] > 1):
            fault = f"and {worker_place()[1]} workers can't read one iterator"
            raise ValueError(
                f"the documents are an iterator, {'which an earlier pass has read' if self._was_read else fault}. Pass "
                "something that can be iterated over again: a list, a datasets.IterableDataset, or a function that "
                "returns a new iterator, such as the generator function itself."
            )
        self._was_read, again = True, False
        if not this.is_counted:
            this.is_counted, self._pass_epoch = True, self.epoch
            if worker_place()[0] == 0:
                again = self._begin()
                self._passes += 1
        reader = StreamReader(self, mark)
        if again and reader.has_epochs:
            say_once(
                "same-epoch",
                f"a stream begins a second pass over epoch {self.epoch}, so its documents come in the same order "
                "again. Call set_epoch(number) before each pass, on the stream or on the loader that accelerate made. "
                f"If you want the same order, call set_epoch({self.epoch}) again.",
            )
        return reader

    def _reader_at(
        self, this: _Pass, place: Mapping[str, Any]
    ) -> tuple[StreamReader, list[Piece], list[Piece], list[Piece]]:
        """A reader at a place, with the pieces since its mark, those of its window, and the one after them."""
        begin = Mark(place["piece"], place["document"])
        for mark in (begin._replace(source=place["source"]), begin):
            reader = self._open(this, mark)
            counts = (place["first"] - mark.piece, self._options["window"], 1)
            before, window, following = (reader.take(count) for count in counts)
            if reader.digest() == place["checked"]:
                reader.report = OverlongReport(**place["report"])
                return reader, before, window, following
            if mark.source is None:
                break
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

    def _pack(self, this: _Pass) -> Iterator[list[Any]]:
        """The bins of a pass. If ranks share bins, these come in rounds of one for each rank; the others wait."""
        from tritonpack.packing.heuristics import WindowPacker  # imports numba, which is slow

        options, place = self._options, this.place
        window_size, most = options["window"], check_limit(options["max_items"], "max_items")
        ranks = self.num_replicas if options["divide"] == "bins" else 1
        own = range(ranks) if self.rank is None or ranks == 1 else (self.rank,)
        packer = WindowPacker(self.capacity, most, options["carry_threshold"])
        held: dict[int, Piece] = {}
        waiting: list[list[int]] = []
        first = 0
        if place is None:
            reader = self._open(this, Mark())
            window, following = reader.take(window_size), reader.take(1)
        else:
            reader, before, window, following = self._reader_at(this, place)
            first, waiting = place["first"], place["waiting"]
            packer.restore(place["carried"], first)
            left = chain((number for number, _, _ in place["carried"]), *waiting)
            held = {number: before[number - place["piece"]] for number in left}
        skipped, this.report = this.bins_done, reader.report
        while window:
            reader.forget(min(held, default=first))
            held |= enumerate(window, first)
            this.bins_done = skipped
            this.place = reader.marks[0]._asdict() | {
                "checked": reader.digest(), "first": first, "carried": packer.carried, "waiting": waiting,
                "report": asdict(reader.report),
            }  # fmt: skip
            lengths = np.array([tokens for _, tokens in window], dtype=np.int32)
            numbers, offsets = packer.add(lengths, last=not following)
            bins = waiting + [numbers[start:stop].tolist() for start, stop in pairwise(offsets)]
            if not following:
                bins = _whole_rounds(this, bins, held, ranks)
            whole = len(bins) - len(bins) % ranks
            for number_in_window, items in enumerate(bins[:whole]):
                pieces = [held.pop(number) for number in items]
                if number_in_window >= skipped and number_in_window % ranks in own:
                    this.bins_done = number_in_window + 1
                    this.num_bins += 1
                    this.num_tokens += sum(tokens for _, tokens in pieces)
                    yield [document for document, _ in pieces]
            waiting, skipped = bins[whole:], 0
            first += len(window)
            window = following + reader.take(window_size - 1)
            following = reader.take(1)
            this.report = reader.report

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, also for documents that have `set_epoch`. accelerate calls this itself.

        Raises:
            ValueError: an epoch that isn't an integer of at least 0; accelerate would dispatch batches.
        """
        # accelerate's dispatching loader can be recognized only by this call, which it makes before it reads.
        caller = type(sys._getframe(1).f_locals.get("self"))
        if any(kind.__name__ == "DataLoaderDispatcher" for kind in caller.__mro__):
            raise ValueError(
                "accelerate would read the stream in one process and cut its batches apart along their first "
                "dimension, which also cuts the boundaries of documents. Configure it with dispatch_batches=False: "
                "TrainingArguments(accelerator_config={'dispatch_batches': False}), or "
                "DataLoaderConfiguration(dispatch_batches=False)."
            )
        super().set_epoch(epoch)
        self._passes_epochs_on = True
        if hasattr(self._documents, "set_epoch"):
            self._documents.set_epoch(self.epoch)

    @property
    def generator(self) -> None:
        """No attribute: accelerate looks for it before it divides a dataset among processes, which may be refused."""
        processes = max(self.num_replicas, place_among_processes()[0])
        if self.rank is not None and processes > 1:
            raise ValueError(
                f"the stream yields the bins of rank {self.rank} only. Dividing them among {processes} processes again "
                "would lose most of them. Pass shard=False to a stream for accelerate or Trainer."
            )
        raise AttributeError("PackedStream has no attribute 'generator'")

    def state_dict(self) -> dict[str, Any]:
        """The place of the latest pass: plain numbers, and the states that the documents return where they have any.

        It holds no documents. torchdata's StatefulDataLoader saves the state of each worker.

        Raises:
            ValueError: workers of a DataLoader read the stream, and this process doesn't know how far.
        """
        if get_worker_info() is None and self._is_read_by_workers:
            raise ValueError(
                "the workers of a DataLoader read this stream, so its place isn't known here. Use torchdata's "
                "StatefulDataLoader and save its state_dict(), or a DataLoader without workers."
            )
        place, this = self._begin_of_next(), self._pass
        if place is None and self._pass_epoch == self.epoch and this.place is not None:
            place = this.place | {name: getattr(this, name) for name in _DONE}
        settings, worker = dict(self._options), list(self._worker)
        return {"version": STATE_VERSION, "epoch": self.epoch, "worker": worker, "settings": settings, "place": place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume: the next pass begins with the bin after the last one that the state counts.

        Documents that have `state_dict` and `load_state_dict` (datasets.IterableDataset) go on where they were, up to
        three windows earlier. Others are read from the beginning and passed over.

        Raises:
            ValueError: a damaged state, or one that was saved with options that make other bins (`overlong` may change
                if no document was too long so far); the stream is then unchanged. At the first bin: other documents
                than when the state was saved.
        """
        epoch, worker, place = _check_state(state, self._options)
        if worker[0] == 0:
            self.set_epoch(epoch)
        else:  # the first worker counts the passes
            self.epoch, self._passes_epochs_on = epoch, True
        passes = None if get_worker_info() is not None else self._passes
        self._resume, self._worker, self._pass_epoch = (place, epoch, passes), worker, NEVER
        self._is_read_by_workers = False


def pack_stream(
    documents: Iterable[Any] | Callable[[], Iterable[Any]],
    capacity: int,
    *,
    window: int = 1024,
    overlong: Overlong = "error",
    max_items: int | None = None,
    length: Length | None = None,
    carry_threshold: float = 0.95,
    num_replicas: int | None = None,
    rank: int | None = None,
    divide: Divide = "bins",
    shard: bool = True,
) -> PackedStream:
    """Pack documents from any iterable, in one pass over it.

    The bins are those of `pack(algorithm="windowed")` with the same window. Each window is packed by
    best-fit-decreasing, and the documents of poorly filled bins are packed again with the next window, at most twice.
    So at most about three windows are in memory, and the order is nearly the input order.

    >>> stream = pack_stream([[1, 2, 3], [4, 5, 6, 7, 8, 9], [10]], capacity=4, overlong="split")
    >>> list(stream)
    [[[1, 2, 3], [10]], [[4, 5, 6, 7]], [[8, 9]]]
    >>> stream.num_bins, stream.num_tokens, str(stream.report)
    (3, 10, '1 document longer than the capacity split into 2 pieces: no token lost')

    With several ranks each rank reads all documents, packs the same bins and yields its part of them. So no
    communication is needed, and all ranks yield the same number of bins. With `divide="documents"` each rank reads and
    packs its part of the documents, so ranks yield different numbers of bins.

    Args:
        documents: rows of tokens (lists, arrays, tensors) or mappings with a row as "input_ids"; with `length`,
            documents of any form. Or a function that returns such an iterable, and is called for each pass. An
            iterator can be read once. All ranks must give the same documents in the same order.
        capacity: tokens per bin, at least 1.
        window: the number of documents (or pieces) that are packed at a time, at least 1.
        overlong, max_items: see `pack`. All columns of a mapping are cut.
        length: returns the number of tokens of a document.
        carry_threshold: the filled share of a bin, from 0 to 1, below which its documents are packed again.
        num_replicas, rank: the number of ranks, and the rank of this process. None reads them from torch.distributed,
            or from the launcher's WORLD_SIZE and RANK; without them they are 1 and 0.
        divide: what the ranks share: "bins" or "documents". A datasets.IterableDataset that is divided already
            (split_dataset_by_node) isn't divided again.
        shard: yield the bins of this rank. False yields the bins of all ranks on every rank, for accelerate and
            Trainer, which divide them.

    Raises:
        ValueError: a wrong option; while iterating, a document that is empty, has another form, is longer than
            `capacity` under "error", or must be cut and holds something else than one value per token; a second pass
            over an iterator.
        ImportError: numba can't be imported.
    """
    if not is_iterable(documents) and (isinstance(documents, type) or not callable(documents)):
        raise ValueError(
            f"documents must be an iterable of documents, each a row of tokens or a mapping with {TOKENS!r}, or a "
            f"function that returns such an iterable; got {type(documents).__name__}."
        )
    require_callable(length)
    check_choice(overlong, POLICIES, "overlong")
    if not is_number(carry_threshold) or not 0 <= carry_threshold <= 1:
        raise ValueError(
            f"carry_threshold must be a number from 0 to 1, the filled share of a bin; got {carry_threshold!r}."
        )
    capacity, window = check_integer(capacity, "capacity"), check_integer(window, "window")
    max_items = None if max_items is None else check_integer(max_items, "max_items")
    check_flag(shard, "shard")
    check_choice(divide, get_args(Divide), "divide")
    if divide == "documents" and not shard:
        raise ValueError(
            "shard=False yields the bins of all ranks, so the ranks can't divide documents. Leave out one."
        )
    processes, process = place_among_processes()
    ranks = processes if num_replicas is None else check_integer(num_replicas, "num_replicas")
    if shard and rank is None and ranks not in (1, processes):
        raise ValueError(f"num_replicas={ranks} doesn't say which rank this process is. Pass rank, too.")
    if rank is None:
        rank = 0 if ranks == 1 else process
    rank = check_integer(rank, "rank", 0, ranks - 1, f"because num_replicas is {ranks}") if shard else None
    is_divided = is_from_datasets(documents) and getattr(documents, "_distributed", None) is not None
    if is_divided and divide == "bins" and ranks > 1:
        raise ValueError(
            "the documents are divided among ranks already (split_dataset_by_node), so the ranks can't share bins. "
            "Pass the whole dataset, or divide='documents'."
        )
    part = (1, 0)
    if divide == "documents" and ranks > 1 and not is_divided:
        if is_from_datasets(documents):
            split = import_module("datasets.distributed").split_dataset_by_node  # imported already with the documents
            documents = split(documents, rank=rank, world_size=ranks)
        else:
            part = (ranks, rank or 0)
    import_module("tritonpack.packing.heuristics")  # without numba it fails here, not in a worker
    options = {
        "capacity": capacity, "window": window, "overlong": overlong, "max_items": max_items,
        "carry_threshold": float(carry_threshold), "divide": divide, "num_replicas": ranks, "rank": rank,
    }  # fmt: skip
    return PackedStream(documents, options, length, part)


def _whole_rounds(this: _Pass, bins: list[list[int]], held: dict[int, Piece], ranks: int) -> list[list[int]]:
    """The last bins, divided until every rank has the same number of them."""
    rest, items = len(bins) % ranks, list(chain.from_iterable(bins))
    if rest and len(bins) + ranks - rest <= len(items):
        offsets = np.cumsum([0, *map(len, bins)])
        divided = divide_bins(np.array([held[number][1] for number in items]), offsets, len(bins) + ranks - rest)
        return [items[start:stop] for start, stop in pairwise(divided)]
    this.dropped_documents = sum(map(len, bins[len(bins) - rest :]))
    if rest:
        say_once(
            "stream-end",
            f"{this.dropped_documents} documents at the end of a stream don't make a bin for each of {ranks} "
            "ranks, so they are left out. The stream's dropped_documents counts them.",
        )
    return bins


_DONE = ("bins_done", "num_bins", "num_tokens")
_PLACE = {*Mark._fields, *_DONE, "checked", "first", "carried", "waiting", "report"}


def _check_state(state: Any, settings: Mapping[str, Any]) -> tuple[int, tuple[int, int], dict[str, Any] | None]:
    """The epoch, the worker and the place of a state; ValueError unless its bins go on with these settings."""
    names = {"version", "epoch", "worker", "settings", "place"}
    if not isinstance(state, Mapping) or set(state) != names or state["version"] != STATE_VERSION:
        raise ValueError(
            f"a state of PackedStream of version {STATE_VERSION} has {', '.join(sorted(names))}; got {state!r:.200}."
        )
    try:
        saved, place = dict(state["settings"]), state["place"]
        worker, workers = (check_integer(value, "worker", 0) for value in state["worker"])
        epoch = check_integer(state["epoch"], "epoch", 0, None)
        if place is not None:
            if set(place) != _PLACE or not isinstance(place["checked"], str):
                raise ValueError(f"its place has {', '.join(sorted(_PLACE))}; got {place!r:.200}")
            report = OverlongReport(**place["report"])
            check_choice(report.policy, POLICIES, "policy")
            for name in (*_DONE, "piece", "document", "first"):
                check_integer(place[name], name, 0, None)
            carried = [check_integer(value, "a carried number", 0, None) for value in chain(*place["carried"])]
            for number in (*carried[::3], *chain.from_iterable(place["waiting"])):
                check_integer(number, "a piece", place["piece"], place["first"] - 1)
            too_long = check_integer(report.documents, "documents", 0, None)
            if not too_long:
                place = {**place, "report": asdict(OverlongReport(settings["overlong"]))}
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"the state is damaged: {error}") from error
    without = set() if place is not None and too_long else {"overlong"}  # no document was too long so far
    if saved.get("num_replicas") == settings["num_replicas"] == 1:  # whatever is divided among one rank
        without |= {"divide", "rank"}
    shown = [{name: value for name, value in each.items() if name not in without} for each in (saved, settings)]
    shards = [each.get("rank") is not None for each in shown]
    if shards[0] != shards[1]:
        shown = [{**each, "rank": None, "shard": shard} for each, shard in zip(shown, shards, strict=True)]
    if changes := describe_changes(*shown):
        raise ValueError(
            f"the state can't be resumed, because these settings have changed since it was saved: {changes}."
            " Restore them, or begin a new pass."
        )
    return epoch, (worker, workers), place

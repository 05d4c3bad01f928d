"""pack_stream: packs documents of an iterable into bins, for data that doesn't fit in memory.

Documents become pieces (whole documents, or parts of documents that are too long), numbered from 0 and packed a window
at a time. Pieces of poorly filled bins are carried into the next window, at most twice. A state holds no documents: it
says from where to read the pieces of at most three windows again, and which of them are carried, wait or are done.
"""

from __future__ import annotations

import json
import sys
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from importlib import import_module
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from tritonpack.checks import check_choice, check_flag
from tritonpack.notices import say_once
from tritonpack.packing.bins import divide_bins
from tritonpack.packing.columns import TOKENS, is_iterable
from tritonpack.packing.lengths import POLICIES, Overlong, OverlongReport, check_integer, check_limit
from tritonpack.packing.reader import Length, cut, document_length, require_callable, unreadable
from tritonpack.packing.samplers.epochs import NEVER, EpochCounter
from tritonpack.packing.samplers.ranks import place_among_processes
from tritonpack.packing.samplers.resume import describe_changes
from tritonpack.removed import refuse_removed

STATE_VERSION = 3
_END = object()

# A place between two documents: the numbers of the next piece and of the next document of the source, and what the
# source's `state_dict` returned there; None if it has none, and at the beginning.
Mark = namedtuple("Mark", ("piece", "document", "source"), defaults=(0, 0, None))
# The place where a pass begins: a mark; the digest of the lengths of pieces from there to the end of the window, the
# first piece of the window, those that are carried or wait; numbers of the report; bins of the window that are done.
_BEGINNING = Mark()._asdict() | {
    "checked": None, "first": 0, "carried": [], "waiting": [], "report": [0, 0, 0], "bins_done": 0,
    "num_bins": 0, "num_tokens": 0, "dropped_documents": 0,
}  # fmt: skip


class _Pieces:
    """The pieces of the documents of one worker, from a mark on: (document or part of it, its tokens).

    Attributes:
        has_epochs: the documents have `set_epoch`.
        marks: a mark for about each window, ascending; the first is the one that reading began at.
        lengths: the tokens of each piece from the first mark on.
        report: the numbers of an OverlongReport.
    """

    def __init__(self, stream: PackedStream, mark: Mark) -> None:
        documents = stream._documents
        values: Any = documents if is_iterable(documents) else documents()
        if not is_iterable(values):
            raise ValueError(
                f"the function must return an iterable of documents for each pass; it returned {values!r:.100}."
            )
        self.has_epochs = hasattr(values, "set_epoch")
        if self.has_epochs and stream._passes_epochs_on:
            values.set_epoch(stream.epoch)
        if mark.source is not None:
            if is_from_datasets(values):  # would begin every later pass of the epoch at the state; copy.copy shares it
                given, values = values, object.__new__(type(values))
                values.__dict__.update(given.__dict__)
            values.load_state_dict(mark.source)
        # An IterableDataset divides its documents among workers itself, as torch demands.
        part, parts = (0, 1) if isinstance(values, IterableDataset) else worker_place()
        self.marks, self.report = [mark], [0, 0, 0]
        self.lengths: list[int] = []
        self._iterator = self._read(values, stream, part, parts)

    def take(self, count: int) -> list[tuple[Any, int]]:
        """The next pieces; fewer at the end."""
        return list(islice(self._iterator, count))

    def forget(self, piece: int) -> None:
        """Leave out the marks that aren't needed to read this piece and later ones."""
        while len(self.marks) > 1 and self.marks[1].piece <= piece:
            del self.lengths[: self.marks[1].piece - self.marks[0].piece]
            del self.marks[0]

    def _read(self, values: Any, stream: PackedStream, part: int, parts: int) -> Iterator[tuple[Any, int]]:
        """The pieces of every document whose number is `part` modulo `parts`."""
        capacity, policy, window = (stream._options[name] for name in ("capacity", "overlong", "window"))
        has_state = hasattr(values, "state_dict") and hasattr(values, "load_state_dict")
        first = self.marks[0]
        number = -1 if first.source is None else first.document - 1
        iterator = iter(values)
        while True:
            piece = self.marks[0].piece + len(self.lengths)
            if piece >= self.marks[-1].piece + window:
                self.marks.append(Mark(piece, number + 1, values.state_dict() if has_state else None))
            number += 1
            try:
                document = next(iterator, _END)
            except Exception as error:
                raise unreadable(f"document {number} of the stream", error) from error
            if document is _END:
                return
            if number < first.document or number % parts != part:
                continue
            tokens = document_length(document, number, stream._length)
            if tokens > capacity and policy == "error":
                raise ValueError(
                    f"document {number} has {tokens} tokens, longer than the capacity of {capacity}. Raise the "
                    "capacity, or say what to do with such documents: overlong='truncate', 'split' or 'drop'."
                )
            end = tokens if tokens <= capacity else {"drop": 0, "truncate": capacity, "split": tokens}[policy]
            starts = range(0, end, capacity)
            for start in starts:
                stop = min(start + capacity, end)
                self.lengths.append(stop - start)
                yield document if stop - start == tokens else cut(document, start, stop, tokens, number), stop - start
            if tokens > capacity:
                documents, lost, pieces = self.report
                self.report = [documents + 1, lost + tokens - end, pieces + len(starts)]


def _shared(place: int) -> Any:
    """An integer attribute of a stream, in the memory that the stream and its copies in workers share."""
    return property(lambda self: int(self._shared[place]), lambda self, value: self._shared.__setitem__(place, value))


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
    epoch, _latest, _is_chosen, _number, _had_number, _shift = map(_shared, range(6))
    _passes = _shared(6)  # that have begun
    _passes_epochs_on = _shared(7)  # to the documents: since the first call of set_epoch
    _is_read_by_workers = _shared(8)

    def __init__(self, documents: Any, options: dict[str, Any], length: Length | None) -> None:
        self._documents, self._options, self._length = documents, options, length
        self.capacity, self.num_replicas, self.rank = (options[name] for name in ("capacity", "num_replicas", "rank"))
        self._settings = options | ({"rank": None} if self.num_replicas == 1 else {})  # of states
        self._shared = torch.zeros(9, dtype=torch.int64, device="cpu").share_memory_()
        EpochCounter.__init__(self)
        self._was_read = False  # in this process
        self._resume: tuple[Any, int, int | None] = (None, 0, None)  # a place, its epoch, and `_passes`
        self._worker = (0, 1)  # of the latest pass, or of the state that was loaded
        self._pass, self._pass_epoch = _BEGINNING, NEVER  # the place of the latest pass

    num_bins = property(lambda self: self._pass["num_bins"])
    num_tokens = property(lambda self: self._pass["num_tokens"])
    dropped_documents = property(lambda self: self._pass["dropped_documents"])
    report = property(lambda self: OverlongReport(self._options["overlong"], *self._pass["report"]))

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
        self._resume, self._worker, self._pass_epoch = (None, 0, None), worker, self.epoch
        self._pass = dict(place or _BEGINNING)
        return self._pack(self._pass)

    def _begin_of_next(self) -> dict[str, Any] | None:
        """The place of a loaded state, if no pass has begun there and no other epoch was chosen."""
        place, epoch, passes = self._resume
        return place if epoch == self.epoch and passes in (None, self._passes) else None

    def _read_window(self, place: Mapping[str, Any]) -> tuple[_Pieces, list[Any], list[Any], list[Any]]:
        """The documents, read to a place: the pieces before its window, those of the window, and one after them."""
        begin = Mark(place["piece"], place["document"])
        for mark in (begin._replace(source=place["source"]), begin):
            reader = _Pieces(self, mark)
            counts = (place["first"] - mark.piece, self._options["window"], 1)
            before, window, following = (reader.take(count) for count in counts)
            if place["checked"] in (None, _digest(reader.lengths)):
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

    def _pack(self, this: dict[str, Any]) -> Iterator[list[Any]]:
        """The bins of a pass, from its place `this` on, in rounds of one for each rank; the others wait."""
        from tritonpack.packing.heuristics import CARRY_THRESHOLD, WindowPacker  # imports numba, which is slow

        worker, workers = worker_place()
        if isinstance(self._documents, Iterator) and (self._was_read or workers > 1):
            fault = "which an earlier pass has read" if self._was_read else f"and {workers} workers can't read one"
            raise ValueError(
                f"the documents are an iterator, {fault}. Pass something that can be iterated over again: a list, a "
                "datasets.IterableDataset, or a function that returns a new iterator, such as the generator function "
                "itself."
            )
        self._was_read, self._pass_epoch = True, self.epoch
        again = worker == 0 and self._begin()
        self._passes += worker == 0
        ranks, window_size = self.num_replicas, self._options["window"]
        own = range(ranks) if self.rank is None else (self.rank,)
        packer = WindowPacker(self.capacity, check_limit(self._options["max_items"], "max_items"), CARRY_THRESHOLD)
        reader, before, window, following = self._read_window(this)
        if again and reader.has_epochs:
            say_once(
                "same-epoch",
                f"a stream begins a second pass over epoch {self.epoch}, so its documents come in the same order "
                "again. Call set_epoch(number) before each pass, on the stream or on the loader that accelerate made. "
                f"If you want the same order, call set_epoch({self.epoch}) again.",
            )
        first, waiting, skipped = this["first"], this["waiting"], this["bins_done"]
        packer.restore(this["carried"], first)
        left = chain((number for number, _, _ in this["carried"]), *waiting)
        held: dict[int, Any] = {number: before[number - this["piece"]] for number in left}
        reader.report = this["report"] if this["checked"] else reader.report
        this["report"] = reader.report
        while window:
            reader.forget(min(held, default=first))
            held |= enumerate(window, first)
            this |= reader.marks[0]._asdict() | {
                "checked": _digest(reader.lengths), "first": first, "carried": packer.carried, "waiting": waiting,
                "report": reader.report, "bins_done": skipped,
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
                    this["bins_done"] = number_in_window + 1
                    this["num_bins"] += 1
                    this["num_tokens"] += sum(tokens for _, tokens in pieces)
                    yield [document for document, _ in pieces]
            waiting, skipped = bins[whole:], 0
            first += len(window)
            window = following + reader.take(window_size - 1)
            following = reader.take(1)

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
        place = self._begin_of_next()
        if place is None:
            place = self._pass if self._pass_epoch == self.epoch else _BEGINNING
        state = {"version": STATE_VERSION, "epoch": self.epoch, "worker": list(self._worker)}
        state |= {"settings": dict(self._settings), "place": dict(place)}
        return state | {"digest": _digest_of_state(state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume: the next pass begins with the bin after the last one that the state counts.

        Documents that have `state_dict` and `load_state_dict` (datasets.IterableDataset) go on where they were, up to
        three windows earlier. Others are read from the beginning and passed over.

        Raises:
            ValueError: a damaged state, or one that was saved with options that make other bins (`overlong` may change
                if no document was too long so far); the stream is then unchanged. At the first bin: other documents
                than when the state was saved.
        """
        try:
            is_sound = state["version"] == STATE_VERSION and state["digest"] == _digest_of_state(state)
        except (TypeError, KeyError, ValueError, AttributeError):
            is_sound = False
        if not is_sound:
            raise ValueError(
                f"this isn't a state of PackedStream of version {STATE_VERSION}, or it is damaged; got {state!r:.200}."
            )
        saved, place = dict(state["settings"]), state["place"]
        if not place["report"][0]:  # no document was too long so far
            saved["overlong"] = self._settings["overlong"]
        if changes := describe_changes(saved, self._settings):
            raise ValueError(
                f"the state can't be resumed, because these settings have changed since it was saved: {changes}. "
                "Restore them, or begin a new pass."
            )
        if state["worker"][0] == 0:
            self.set_epoch(state["epoch"])
        else:  # the first worker counts the passes
            self.epoch, self._passes_epochs_on = state["epoch"], True
        passes = None if get_worker_info() is not None else self._passes
        self._resume, self._worker, self._pass_epoch = (place, state["epoch"], passes), tuple(state["worker"]), NEVER
        self._is_read_by_workers = False


def pack_stream(
    documents: Iterable[Any] | Callable[[], Iterable[Any]],
    capacity: int,
    *,
    window: int = 1024,
    overlong: Overlong = "error",
    max_items: int | None = None,
    length: Length | None = None,
    num_replicas: int | None = None,
    rank: int | None = None,
    shard: bool = True,
    **removed: Any,
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
    communication is needed, and all ranks yield the same number of bins. To read less, divide the documents yourself
    and pass `num_replicas=1`; ranks then yield different numbers of bins.

    Args:
        documents: rows of tokens (lists, arrays, tensors) or mappings with a row as "input_ids"; with `length`,
            documents of any form. Or a function that returns such an iterable, and is called for each pass. An
            iterator can be read once. All ranks must give the same documents in the same order.
        capacity: tokens per bin, at least 1.
        window: the number of documents (or pieces) that are packed at a time, at least 1.
        overlong, max_items: see `pack`. All columns of a mapping are cut.
        length: returns the number of tokens of a document.
        num_replicas, rank: the number of ranks, and the rank of this process. None reads them from torch.distributed,
            or from the launcher's WORLD_SIZE and RANK; without them they are 1 and 0.
        shard: yield the bins of this rank. False yields the bins of all ranks on every rank, for accelerate and
            Trainer, which divide them.

    Raises:
        ValueError: a wrong option; while iterating, a document that is empty, has another form, is longer than
            `capacity` under "error", or must be cut and holds something else than one value per token; a second pass
            over an iterator.
        ImportError: numba can't be imported.
    """
    refuse_removed(removed, "pack_stream")
    if not is_iterable(documents) and (isinstance(documents, type) or not callable(documents)):
        raise ValueError(
            f"documents must be an iterable of documents, each a row of tokens or a mapping with {TOKENS!r}, or a "
            f"function that returns such an iterable; got {type(documents).__name__}."
        )
    require_callable(length)
    check_choice(overlong, POLICIES, "overlong")
    capacity, window = check_integer(capacity, "capacity"), check_integer(window, "window")
    max_items = None if max_items is None else check_integer(max_items, "max_items")
    check_flag(shard, "shard")
    processes, process = place_among_processes()
    ranks = processes if num_replicas is None else check_integer(num_replicas, "num_replicas")
    if shard and rank is None and ranks not in (1, processes):
        raise ValueError(f"num_replicas={ranks} doesn't say which rank this process is. Pass rank, too.")
    if rank is None:
        rank = 0 if ranks == 1 else process
    rank = check_integer(rank, "rank", 0, ranks - 1, f"because num_replicas is {ranks}") if shard else None
    if ranks > 1 and is_from_datasets(documents) and getattr(documents, "_distributed", None) is not None:
        raise ValueError(
            "the documents are divided among ranks already (split_dataset_by_node), so the ranks can't share bins. "
            "Pass the whole dataset, or num_replicas=1."
        )
    import_module("tritonpack.packing.heuristics")  # without numba it fails here, not in a worker
    options = {
        "capacity": capacity, "window": window, "overlong": overlong, "max_items": max_items, "num_replicas": ranks,
    }  # fmt: skip
    return PackedStream(documents, options | {"rank": rank}, length)


def _whole_rounds(this: dict[str, Any], bins: list[list[int]], held: Mapping[int, Any], ranks: int) -> list[list[int]]:
    """The last bins, divided until every rank has the same number of them."""
    rest, items = len(bins) % ranks, list(chain.from_iterable(bins))
    if rest and len(bins) + ranks - rest <= len(items):
        offsets = np.cumsum([0, *map(len, bins)])
        divided = divide_bins(np.array([held[number][1] for number in items]), offsets, len(bins) + ranks - rest)
        return [items[start:stop] for start, stop in pairwise(divided)]
    this["dropped_documents"] = sum(map(len, bins[len(bins) - rest :]))
    if rest:
        say_once(
            "stream-end",
            f"{this['dropped_documents']} documents at the end of a stream don't make a bin for each of {ranks} "
            "ranks, so they are left out. The stream's dropped_documents counts them.",
        )
    return bins


def _digest(values: Any) -> str:
    return blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()


def _digest_of_state(state: Mapping[str, Any]) -> str:
    """A digest of all that a state holds, without the state of the documents, which may be of any form."""
    place = {name: value for name, value in state["place"].items() if name != "source"}
    return _digest({**{name: value for name, value in state.items() if name != "digest"}, "place": place})


def is_from_datasets(documents: Any) -> bool:
    """Return whether documents are an IterableDataset of the package datasets."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(documents, datasets.IterableDataset)


def worker_place() -> tuple[int, int]:
    """The number of this DataLoader worker and of all of them; (0, 1) outside of workers."""
    worker = get_worker_info()
    return (0, 1) if worker is None else (worker.id, worker.num_workers)

"""pack_stream: packs documents of an iterable into bins, for data that doesn't fit in memory.

Documents become pieces (whole documents, or parts of documents that are too long), numbered from 0 and packed a window
at a time. Pieces of poorly filled bins are carried into the next window, at most twice. A state holds no documents. It
is the place of an earlier window, and the number of bins to pass over from there: all pieces that aren't in a bin yet
are read again from that place on.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from tritonpack.checks import check_choice, check_flag
from tritonpack.notices import say_once
from tritonpack.packing.columns import TOKENS, is_iterable
from tritonpack.packing.lengths import POLICIES, Overlong, OverlongReport, check_integer, check_limit
from tritonpack.packing.reader import cut, document_length, is_from_datasets, unreadable
from tritonpack.packing.samplers.epochs import NEVER, VERSION, EpochCounter, check_state, describe_changes
from tritonpack.packing.samplers.ranks import place_among_processes, place_in_world
from tritonpack.removed import refuse_removed

_END = object()
# The place of a pass. Where a window begins: the number of its first document in the source, what the source's
# `state_dict` returned there (None if it has none, and at the beginning), the counts of a report so far, its first
# piece, those that are carried, bins that wait for a round, and the bins that were yielded before. Then a digest of it
# and of each window up to the latest one, and the bins of this rank that were yielded in all, and their tokens.
_BEGINNING: dict[str, Any] = {
    "document": 0, "source": None, "too_long": [0, 0, 0], "first": 0, "carried": [[], [], []], "waiting": [],
    "before": 0, "checked": [], "num_bins": 0, "num_tokens": 0,
}  # fmt: skip


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
        efficiency: the share of the capacity of these bins that holds tokens; 1 before the first bin.
        report: what it has done with documents longer than the capacity, so far.
        dropped_documents: the documents (or pieces) at its end that don't make a bin for every rank.
    """

    # In shared memory, because DataLoader workers read copies of the stream, and may outlive a pass.
    epoch, _latest, _is_chosen, _is_counted, _was_counted = map(_shared, range(5))
    _passes = _shared(5)  # that have begun
    _passes_epochs_on = _shared(6)  # to the documents: since the first call of set_epoch
    _is_read_by_workers = _shared(7)

    num_bins = property(lambda self: self._place["num_bins"])
    num_tokens = property(lambda self: self._place["num_tokens"])
    report = property(lambda self: OverlongReport(self._options["overlong"], *self._too_long))
    efficiency = property(lambda self: self.num_tokens / (self.num_bins * self.capacity) if self.num_bins else 1.0)

    def __init__(self, documents: Any, options: dict[str, Any]) -> None:
        self._documents, self._options = documents, options
        self.capacity, self.num_replicas, self.rank = (options[name] for name in ("capacity", "num_replicas", "rank"))
        self._settings = options | ({"rank": None} if self.num_replicas == 1 else {})  # of states
        self._shared = torch.zeros(8, dtype=torch.int64, device="cpu").share_memory_()
        self._latest = NEVER
        self._was_read = False  # in this process
        self._worker = (0, 1)  # of the latest pass, or of the state that was loaded
        self._go_to(_BEGINNING, NEVER, NEVER)

    def _go_to(self, place: Mapping[str, Any], epoch: int, passes: int | None) -> None:
        """Go to a place in an epoch. The next pass begins there if `passes` have begun until then; None: anyhow."""
        self._place, self._place_epoch, self._place_passes = dict(place), epoch, passes
        self._too_long, self.dropped_documents = [*place["too_long"]], 0

    def __iter__(self) -> Iterator[list[Any]]:
        """The bins of a pass, in rounds of one for each rank; bins that make no round wait for more."""
        from tritonpack.packing.heuristics import pack_window  # imports numba, which is slow

        # A generator, because libraries such as Lightning make two iterators for a pass and use only the second.
        values, this = self._begin_pass()
        ranks, max_items = self.num_replicas, check_limit(self._options["max_items"], "max_items")
        first, waiting, number, expected = this["first"], this["waiting"], this["before"], [*this["checked"]]
        carried = np.array(this["carried"], dtype=np.int64)
        held: dict[int, Any] = {}  # pieces that aren't in a bin yet, or in a bin to be passed over
        windows = deque[dict[str, Any]]()  # whose pieces are held
        for mark, pieces, is_last in self._windows(values, this):
            lengths = [tokens for _, tokens in pieces]
            mark |= {"first": first, "carried": carried.tolist(), "waiting": waiting, "before": number}
            windows.append(mark | {"checked": _digest([lengths, is_last])})
            if expected and windows[-1]["checked"] != expected[0]:
                break
            del expected[:1]
            held |= enumerate(pieces, first)
            while len(windows) > 1 and windows[1]["first"] <= min(held):
                windows.popleft()
            bins, offsets, carried = pack_window(carried, np.array(lengths), first, self.capacity, max_items, is_last)
            first += len(pieces)
            full = waiting + [bins[start:stop].tolist() for start, stop in pairwise(offsets)]
            if is_last:
                full, self.dropped_documents = _whole_rounds(full, held, ranks)
            if not expected:
                this |= windows[0] | {"checked": [window["checked"] for window in windows]}
            whole = len(full) - len(full) % ranks
            for place, items in enumerate(full[:whole]):
                taken = [held.pop(item, None) for item in items]
                number += self.rank in (None, place % ranks)
                if number > this["num_bins"]:
                    this["num_bins"] = number
                    this["num_tokens"] += sum(tokens for _, tokens in taken)
                    yield [document for document, _ in taken]
            waiting = full[whole:]
        if expected:
            raise ValueError(
                "the documents aren't those that the state was saved with: their lengths differ. Resume over the same "
                "documents in the same order: the same data, the same seed of shuffling and, if they are an iterator, "
                "a new one. If the state_dict of documents isn't exact, as of shuffle buffers of datasets, let a pass "
                "read them from the beginning: pack_stream(lambda: iter(documents), ...)."
            )

    def _begin_pass(self) -> tuple[Any, dict[str, Any]]:
        """Count a pass that begins. Return its documents, which go on at its place if they have a state; and the place.

        Raises:
            ValueError: documents that can't be read, or a state of another worker.
        """
        worker, workers = worker_place()
        resumes = self._place_epoch == self.epoch and self._place_passes in (None, self._passes)
        if resumes and self._worker != (worker, workers):
            raise ValueError(
                f"the state was saved by worker {self._worker[0]} of {self._worker[1]}, and this is worker {worker} of "
                f"{workers}. Resume with the same num_workers, and through torchdata's StatefulDataLoader, which gives "
                "every worker its own state."
            )
        if isinstance(self._documents, Iterator) and (self._was_read or workers > 1):
            fault = "which an earlier pass has read" if self._was_read else f"and {workers} workers can't read one"
            raise ValueError(
                f"the documents are an iterator, {fault}. Pass something that can be iterated over again: a list, a "
                "datasets.IterableDataset, or a function that returns a new iterator, such as the generator function "
                "itself."
            )
        self._is_read_by_workers, self._was_read, self._worker = get_worker_info() is not None, True, (worker, workers)
        self._go_to(self._place if resumes else _BEGINNING, self.epoch, NEVER)
        values: Any = self._documents if is_iterable(self._documents) else self._documents()
        if not is_iterable(values):
            raise ValueError(
                f"the function must return an iterable of documents for each pass; it returned {values!r:.100}."
            )
        if worker == 0:
            self._begin(epochs_differ=hasattr(values, "set_epoch"))
            self._passes += 1
        if hasattr(values, "set_epoch") and self._passes_epochs_on:
            values.set_epoch(self.epoch)
        if self._place["source"] is not None:
            if is_from_datasets(values, "IterableDataset"):  # a copy, or later passes would begin at the state, too
                given, values = values, object.__new__(type(values))  # copy.copy shares the state
                values.__dict__.update(given.__dict__)
            values.load_state_dict(self._place["source"])
        return values, self._place

    def _windows(self, values: Any, place: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[Any], bool]]:
        """The windows from a place on: where each begins, its pieces with their tokens, whether it is the last."""
        size, has_state = self._options["window"], hasattr(values, "state_dict") and hasattr(values, "load_state_dict")
        after = {name: place[name] for name in ("document", "source", "too_long")}
        read = {"document": 0 if place["source"] is None else place["document"]}
        documents = self._read(values, place["document"], read)
        following = next(documents, None)
        while following is not None:
            mark, pieces = after, list[Any]()
            while following is not None and len(pieces) < size:
                pieces += following
                if len(pieces) >= size:
                    source = values.state_dict() if has_state else None
                    after = {"document": read["document"], "source": source, "too_long": [*self._too_long]}
                following = next(documents, None)
            yield mark, pieces, following is None

    def _read(self, values: Any, begin: int, read: dict[str, int]) -> Iterator[list[tuple[Any, int]]]:
        """The pieces of each document of this worker from number `begin` on, with their tokens; `read` counts."""
        capacity, policy = self.capacity, self._options["overlong"]
        # An IterableDataset divides its documents among workers itself, as torch demands.
        part, parts = (0, 1) if isinstance(values, IterableDataset) else worker_place()
        iterator = iter(values)
        while True:
            number = read["document"]
            try:
                document = next(iterator, _END)
            except Exception as error:
                raise unreadable(f"document {number} of the stream", error) from error
            if document is _END:
                return
            read["document"] = number + 1
            if number < begin or number % parts != part:
                continue
            tokens = document_length(f"document {number}", document)
            if tokens <= capacity:
                yield [(document, tokens)]
                continue
            if policy == "error":
                raise ValueError(
                    f"document {number} has {tokens} tokens, longer than the capacity of {capacity}. Raise the "
                    "capacity, or say what to do with such documents: overlong='truncate', 'split' or 'drop'."
                )
            end = {"drop": 0, "truncate": capacity, "split": tokens}[policy]
            spans = [(start, min(start + capacity, end)) for start in range(0, end, capacity)]
            for place, more in enumerate((1, tokens - end, len(spans))):
                self._too_long[place] += more
            if spans:
                yield [(cut(document, *span, tokens, number), span[1] - span[0]) for span in spans]

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
        place = self._place if self._place_epoch == self.epoch else _BEGINNING
        state = {"version": VERSION, "epoch": self.epoch, "worker": [*self._worker], **self._settings, **place}
        return state | {"digest": _digest_of_state(state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume: the next pass begins with the bin after the last one that the state counts.

        Documents that have `state_dict` and `load_state_dict` (datasets.IterableDataset) go on where they were, up to
        three windows earlier. Others are read from the beginning and passed over.

        Raises:
            ValueError: a damaged state, or one that was saved with other options (only `overlong="error"` may change,
                because no document was too long so far); the stream is then unchanged. At the first bin: other
                documents than when the state was saved.
        """
        check_state(state, {"version", "epoch", "worker", *self._settings, *_BEGINNING, "digest"}, "PackedStream")
        if state["digest"] != _digest_of_state(state):
            raise ValueError("the state is damaged: its values aren't those that were saved. Begin a new pass.")
        saved, place = ({name: state[name] for name in those} for those in (self._settings, _BEGINNING))
        if saved["overlong"] == "error":
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
        self._go_to(place, state["epoch"], None if get_worker_info() is not None else self._passes)
        self._worker, self._is_read_by_workers = tuple(state["worker"]), False


def pack_stream(
    documents: Iterable[Any] | Callable[[], Iterable[Any]],
    capacity: int,
    *,
    window: int = 1024,
    overlong: Overlong = "error",
    max_items: int | None = None,
    num_replicas: int | None = None,
    rank: int | None = None,
    shard: bool = True,
    **removed: Any,
) -> PackedStream:
    """Pack documents from any iterable, in one pass over it.

    Each window is packed by best-fit-decreasing, and the documents of bins that are filled to less than 95% are packed
    again with the next window, at most twice. So at most about three windows are in memory, and the order is nearly the
    input order. All pieces of a split document stay in one window.

    >>> stream = pack_stream([[1, 2, 3], [4, 5, 6, 7, 8, 9], [10]], capacity=4, overlong="split")
    >>> list(stream)
    [[[1, 2, 3], [10]], [[4, 5, 6, 7]], [[8, 9]]]
    >>> stream.num_bins, stream.num_tokens, str(stream.report)
    (3, 10, '1 document longer than the capacity split into 2 pieces: no token lost')

    With several ranks each rank reads all documents, packs the same bins and yields its part of them. So no
    communication is needed, and all ranks yield the same number of bins. To read less, divide the documents yourself
    and pass `num_replicas=1`; ranks then yield different numbers of bins.

    Args:
        documents: rows of tokens (lists, arrays, tensors) or mappings with a row as "input_ids". Or a function that
            returns such an iterable, and is called for each pass. An iterator can be read once. All ranks must give
            the same documents in the same order.
        capacity: tokens per bin, at least 1.
        window: the number of documents (or pieces) that are packed at a time, at least 1.
        overlong, max_items: see `pack`. All columns of a mapping are cut.
        num_replicas, rank: see MultipackDistributedBatchSampler.
        shard: yield the bins of this rank. False yields the bins of all ranks on every rank, for accelerate and
            Trainer, which divide them.

    Raises:
        ValueError: a wrong option; while iterating, a document that is empty, has another form, is longer than
            `capacity` under "error", or must be cut and holds something else than one value per token; a second pass
            over an iterator.
        ImportError: numba can't be imported.
    """
    if removed:
        refuse_removed(removed, "pack_stream")
    if not is_iterable(documents) and (isinstance(documents, type) or not callable(documents)):
        raise ValueError(
            f"documents must be an iterable of documents, each a row of tokens or a mapping with {TOKENS!r}, or a "
            f"function that returns such an iterable; got {type(documents).__name__}."
        )
    check_choice(overlong, POLICIES, "overlong")
    capacity, window = check_integer(capacity, "capacity"), check_integer(window, "window")
    max_items = None if max_items is None else check_integer(max_items, "max_items")
    check_flag(shard, "shard")
    ranks, rank = place_in_world(num_replicas, rank, shard)
    divided = getattr(documents, "_distributed", None) if is_from_datasets(documents, "IterableDataset") else None
    if ranks > 1 and divided is not None:
        raise ValueError(
            "the documents are divided among ranks already (split_dataset_by_node), so the ranks can't share bins. "
            "Pass the whole dataset, or num_replicas=1."
        )
    import_module("tritonpack.packing.heuristics")  # without numba it fails here, not in a worker
    options = {
        "capacity": capacity, "window": window, "overlong": overlong, "max_items": max_items, "num_replicas": ranks,
    }  # fmt: skip
    return PackedStream(documents, options | {"rank": rank})


def _whole_rounds(bins: list[list[int]], held: Mapping[int, Any], ranks: int) -> tuple[list[list[int]], int]:
    """The last bins, divided until every rank has the same number of them; and how many pieces are left out."""
    rest, whole = len(bins) % ranks, -(-len(bins) // ranks) * ranks
    if whole <= sum(map(len, bins)):
        bins = list(bins)
        while len(bins) < whole:  # halve the fullest
            tokens = [sum(held[item][1] for item in items) if len(items) > 1 else 0 for items in bins]
            at = int(np.argmax(tokens))
            ends = np.cumsum([held[item][1] for item in bins[at]])
            cut = 1 + int(np.argmin(np.abs(ends[:-1] - ends[-1] / 2)))
            bins[at : at + 1] = [bins[at][:cut], bins[at][cut:]]
        return bins, 0
    dropped = sum(map(len, bins[len(bins) - rest :]))
    say_once(
        "stream-end",
        f"{dropped} documents at the end of a stream don't make a bin for each of {ranks} ranks, so they are left out. "
        "The stream's dropped_documents counts them.",
    )
    return bins, dropped


def _digest_of_state(state: Mapping[str, Any]) -> str:
    """A digest of a state without the state of the documents, which may have any form."""
    return _digest([(name, state[name]) for name in sorted(state) if name not in ("source", "digest")])


def _digest(values: Any) -> str:
    return blake2b(repr(values).encode(), digest_size=16).hexdigest()


def worker_place() -> tuple[int, int]:
    """The number of this DataLoader worker and of all of them; (0, 1) outside of workers."""
    worker = get_worker_info()
    return (0, 1) if worker is None else (worker.id, worker.num_workers)

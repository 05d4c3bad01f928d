"""pack_stream: packs documents of an iterable into bins, for data that doesn't fit in memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from itertools import chain
from typing import Any, get_args

import torch
from torch.utils.data import IterableDataset, get_worker_info

from tritonpack.checks import check_choice, check_flag, is_number
from tritonpack.notices import say_once
from tritonpack.packing.documents import TOKENS, Length, is_iterable, require_callable
from tritonpack.packing.lengths import POLICIES, Overlong, OverlongReport, check_integer
from tritonpack.packing.samplers.epochs import NEVER, EpochCounter
from tritonpack.packing.samplers.ranks import place_among_processes
from tritonpack.packing.samplers.state import describe_changes
from tritonpack.packing.streams.stream_pass import (
    Divide,
    Mark,
    Options,
    Place,
    Source,
    StreamPass,
    is_from_datasets,
    worker_place,
)

STATE_VERSION = 1
DIVISIONS: tuple[str, ...] = get_args(Divide)


class _Shared:
    """An integer attribute of a stream, in the memory that the stream and its copies in workers share."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __get__(self, stream: Any, owner: Any) -> int:
        return int(stream._shared[self._place])

    def __set__(self, stream: Any, value: int) -> None:
        stream._shared[self._place] = value


class PackedStream(EpochCounter, IterableDataset):
    """The bins that pack_stream returns, as a torch IterableDataset. Each iteration is a pass over the documents.

    `DataLoader(stream, batch_size=1, collate_fn=PackingCollator())` loads a bin as one row. Every worker packs its own
    part of the documents.

    Attributes:
        epoch: the epoch of the next pass; while a pass is under way its epoch.
        num_replicas, rank: as given or found; `rank` is None with `shard=False`.
    """

    # In shared memory, because DataLoader workers read copies of the stream, and may outlive a pass.
    epoch = _Shared(0)
    _latest = _Shared(1)
    _is_chosen = _Shared(2)
    _number = _Shared(3)
    _had_number = _Shared(4)
    _shift = _Shared(5)
    _passes = _Shared(6)  # that have begun
    _passes_epochs_on = _Shared(7)  # to the documents: since the first call of set_epoch
    _is_read_by_workers = _Shared(8)

    def __init__(self, documents: Any, options: Options, length: Length | None, ranks: tuple[int, int]) -> None:
        self._documents = documents
        self._options = options
        self._length = length
        self._ranks = ranks
        self._shared = torch.zeros(9, dtype=torch.int64, device="cpu").share_memory_()
        EpochCounter.__init__(self)
        self._was_read = False  # in this process
        self._resume: tuple[Place | None, int, int | None] | None = None  # a state's place, its epoch, and `_passes`
        self._worker = (0, 1)  # of the latest pass, or of the state that was loaded
        self._pass = StreamPass(options, partial(self._open, []), length, None)
        self._pass_epoch = NEVER

    def __getstate__(self) -> dict[str, Any]:
        """Without the latest pass, which belongs to this process."""
        return {name: value for name, value in self.__dict__.items() if name != "_pass"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._pass = StreamPass(self._options, partial(self._open, []), self._length, self._begin_of_next())

    def __iter__(self) -> Iterator[list[Any]]:
        worker, place = worker_place(), self._begin_of_next()
        if place is not None and self._worker != worker:
            raise ValueError(
                f"the state was saved by worker {self._worker[0]} of {self._worker[1]}, and this is worker {worker[0]} "
                f"of {worker[1]}. Resume with the same num_workers, and through torchdata's StatefulDataLoader, which "
                "gives every worker its own state."
            )
        self._is_read_by_workers = get_worker_info() is not None
        self._resume, self._worker = None, worker
        self._pass = StreamPass(self._options, partial(self._open, []), self._length, place)
        self._pass_epoch = self.epoch
        return self._pass

    def _begin_of_next(self) -> Place | None:
        """The place of a loaded state, if no pass has begun there and no other epoch was chosen."""
        if self._resume is None:
            return None
        place, epoch, passes = self._resume
        return place if epoch == self.epoch and passes in (None, self._passes) else None

    def _open(self, opened: list[Mark], mark: Mark) -> Source:
        """Open the documents at a mark for a pass that has opened them at these marks before."""
        if isinstance(self._documents, Iterator):
            remedy = (
                "Pass something that can be iterated over again: a list, a datasets.IterableDataset, or a function "
                "that returns a new iterator, such as the generator function itself."
            )
            if self._was_read:
                raise ValueError(f"the documents are an iterator, which an earlier pass has read. {remedy}")
            if worker_place()[1] > 1:
                raise ValueError(
                    f"the documents are an iterator, and {worker_place()[1]} workers can't read one iterator. {remedy}"
                )
        self._was_read = True
        again = False
        if not opened:
            self._pass_epoch = self.epoch
            if worker_place()[0] == 0:
                again = self._begin()
                self._passes += 1
        opened.append(mark)
        source = Source(self._documents, self._ranks, mark, self.epoch if self._passes_epochs_on else None)
        if again and source.has_epochs:
            say_once(
                "same-epoch",
                f"a stream begins a second pass over epoch {self.epoch}, so its documents come in the same order "
                "again. Call set_epoch(number) before each pass, on the stream or on the loader that accelerate made. "
                f"If you want the same order, call set_epoch({self.epoch}) again.",
            )
        return source

    @property
    def num_replicas(self) -> int:
        return self._options.num_replicas

    @property
    def rank(self) -> int | None:
        return self._options.rank

    @property
    def capacity(self) -> int:
        """Tokens that fit into a bin."""
        return self._options.capacity

    @property
    def num_bins(self) -> int:
        """The bins that the latest pass of this process has yielded."""
        return self._pass.num_bins

    @property
    def num_tokens(self) -> int:
        """The tokens in the bins that the latest pass of this process has yielded."""
        return self._pass.num_tokens

    @property
    def efficiency(self) -> float:
        """The share of the capacity of the yielded bins that holds tokens; 1 before the first bin."""
        return self.num_tokens / (self.num_bins * self.capacity) if self.num_bins else 1.0

    @property
    def report(self) -> OverlongReport:
        """What the latest pass of this process has done with the documents longer than the capacity, so far."""
        return self._pass.report

    @property
    def dropped_documents(self) -> int:
        """The documents (or pieces) at the end of the latest pass that don't make a bin for every rank."""
        return self._pass.dropped_documents

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
        """No attribute. accelerate looks for it before it divides the elements of a dataset among processes.

        Raises:
            ValueError: the stream yields the bins of one rank of several, which can't be divided again.
            AttributeError: else.
        """
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
        if place is None and self._pass_epoch == self.epoch:
            place = self._pass.place()
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "worker": list(self._worker),
            "settings": asdict(self._options),
            "place": None if place is None else asdict(place),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume: the next pass begins with the bin after the last one that the state counts.

        Documents that have `state_dict` and `load_state_dict` (datasets.IterableDataset) go on where they were, up to
        three windows earlier. Others are read from the beginning and passed over.

        Raises:
            ValueError: a damaged state, or one that was saved with options that make other bins (`overlong` may change
                if no document was too long so far); the stream is then unchanged. At the first bin: other documents
                than when the state was saved.
        """
        epoch, worker, place = _check_state(state, asdict(self._options))
        in_worker = get_worker_info() is not None
        if worker[0] == 0:
            self.set_epoch(epoch)
        else:  # the first worker counts the passes
            self.epoch, self._passes_epochs_on = epoch, True
        self._resume, self._worker = (place, epoch, None if in_worker else self._passes), worker
        self._pass_epoch = NEVER
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
    capacity = check_integer(capacity, "capacity")
    window = check_integer(window, "window")
    max_items = None if max_items is None else check_integer(max_items, "max_items")
    check_flag(shard, "shard")
    check_choice(divide, DIVISIONS, "divide")
    if divide == "documents" and not shard:
        raise ValueError(
            "shard=False yields the bins of all ranks, so the ranks can't divide documents. Leave out one."
        )
    num_replicas, rank = _place(num_replicas, rank, shard)
    ranks = (1, 0)
    split_already = is_from_datasets(documents) and getattr(documents, "_distributed", None) is not None
    if split_already and divide == "bins" and num_replicas > 1:
        raise ValueError(
            "the documents are divided among ranks already (split_dataset_by_node), so the ranks can't share bins. "
            "Pass the whole dataset, or divide='documents'."
        )
    if divide == "documents" and num_replicas > 1 and not split_already:
        if is_from_datasets(documents):
            split = import_module("datasets.distributed").split_dataset_by_node  # imported already with the documents
            documents = split(documents, rank=rank, world_size=num_replicas)
        else:
            ranks = (num_replicas, rank or 0)
    import_module("tritonpack.packing.heuristics")  # without numba it fails here, not in a worker
    options = Options(capacity, window, overlong, max_items, float(carry_threshold), divide, num_replicas, rank)
    return PackedStream(documents, options, length, ranks)


def _place(num_replicas: int | None, rank: int | None, shard: bool) -> tuple[int, int | None]:
    """The number of ranks and the rank of this process (None unless `shard`), from the launcher if not given."""
    processes, process = place_among_processes()
    num_replicas = processes if num_replicas is None else check_integer(num_replicas, "num_replicas")
    if not shard:
        return num_replicas, None
    if rank is None and num_replicas not in (1, processes):
        raise ValueError(f"num_replicas={num_replicas} doesn't say which rank this process is. Pass rank, too.")
    if rank is None:
        rank = 0 if num_replicas == 1 else process
    return num_replicas, check_integer(rank, "rank", 0, num_replicas - 1, f"because num_replicas is {num_replicas}")


def _check_state(state: Any, settings: Mapping[str, Any]) -> tuple[int, tuple[int, int], Place | None]:
    """The epoch, the worker and the place of a state; ValueError unless its bins go on with these settings."""
    names = {"version", "epoch", "worker", "settings", "place"}
    if not isinstance(state, Mapping) or set(state) != names or state["version"] != STATE_VERSION:
        raise ValueError(
            f"a state of PackedStream of version {STATE_VERSION} has {', '.join(sorted(names))}; got {state!r:.200}."
        )
    if not isinstance(state["settings"], Mapping):
        raise ValueError(f"settings of the state must be a mapping; got {state['settings']!r:.100}.")
    try:
        worker, workers = (check_integer(value, "worker", 0) for value in state["worker"])
        place = None if state["place"] is None else _read_place(state["place"])
        epoch = check_integer(state["epoch"], "epoch", 0, None)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"the state is damaged: {error}") from error
    changes = _describe_other_bins(state["settings"], settings, place)
    if changes:
        raise ValueError(
            f"the state can't be resumed, because these settings have changed since it was saved: {changes}."
            " Restore them, or begin a new pass."
        )
    if place is not None and not place.report.documents:
        place = replace(place, report=OverlongReport(settings["overlong"]))
    return epoch, (worker, workers), place


def _describe_other_bins(saved: Mapping[str, Any], settings: Mapping[str, Any], place: Place | None) -> str:
    """Which settings differ of those that decide the bins, by the names of `pack_stream`."""
    without: set[str] = set()
    if saved.get("num_replicas") == settings["num_replicas"] == 1:  # whatever is divided among one rank
        without |= {"divide", "rank"}
    if place is None or not place.report.documents:  # no document was too long so far
        without |= {"overlong"}
    shown = []
    for each in (saved, settings):
        shown.append({name: value for name, value in each.items() if name not in without})
        if "rank" in shown[-1]:
            shown[-1]["shard"] = shown[-1]["rank"] is not None
    if shown[0].get("shard") != shown[1].get("shard"):
        shown = [{name: value for name, value in each.items() if name != "rank"} for each in shown]
    return describe_changes(*shown)


def _read_place(values: Mapping[str, Any]) -> Place:
    """A Place from what `asdict` made of it."""

    def whole(value: Any, name: str = "a number of pieces", least: int = 0) -> int:
        return check_integer(value, name, least, None)

    fields = dict(values)
    mark, report = Mark(**fields.pop("mark")), OverlongReport(**fields.pop("report"))
    carried = [[whole(number), whole(tokens), whole(carries)] for number, tokens, carries in fields.pop("carried")]
    waiting = [[whole(number) for number in items] for items in fields.pop("waiting")]
    place = Place(mark=mark, report=report, carried=carried, waiting=waiting, **fields)
    for value in (place.bins_done, place.num_bins, place.num_tokens, mark.document, report.documents):
        whole(value)
    whole(place.first, "first", whole(mark.piece))
    check_choice(report.policy, POLICIES, "policy")
    if not isinstance(place.checked, str):
        raise ValueError(f"checked must be a string; got {place.checked!r:.60}")
    for number in [number for number, _, _ in carried] + list(chain.from_iterable(waiting)):
        check_integer(number, "a piece", mark.piece, place.first - 1)
    return place

"""pack_stream: packs documents of an iterable into bins, for data that doesn't fit in memory.

Documents become pieces (whole documents, or parts of documents that are too long), numbered from 0 and packed a window
at a time. Pieces of poorly filled bins are carried into the next window, at most twice. A state holds no documents, but
the place of the earliest window with pieces that aren't in a bin yet, and the bins to pass over from there.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, get_args
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from tritonpack.checks import check_choice, check_flag
from tritonpack.notices import say_once
from tritonpack.packing.collator import is_iterable
from tritonpack.packing.lengths import Overlong, OverlongReport, check_integer, check_limit, cut, document_length
from tritonpack.packing.planning.tail import whole_rounds
from tritonpack.packing.samplers.epochs import NEVER, VERSION, EpochCounter, check_state, describe_changes, digest, seal
from tritonpack.packing.samplers.ranks import place_in_world
from tritonpack.removed import refuse_removed

# The place of a pass: where a window begins (its first document, the source's state there if it has one, the counts of
# the report, its first piece, carried pieces, bins that wait for a round, the bins before), a digest of each window
# from there to the latest one, and the bins that this rank has yielded, and their tokens.
_BEGINNING: dict[str, Any] = {
    "document": 0, "source": None, "too_long": [0, 0, 0], "first": 0, "carried": [[], [], []], "waiting": [],
    "before": 0, "checked": [], "num_bins": 0, "num_tokens": 0,
}  # fmt: skip
_LATEST: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # the iterator that a stream read last, if it ends for good


def _shared(place: int) -> Any:
    """An integer attribute of a stream, in the memory that the stream and its copies in workers share."""
    return property(lambda self: int(self._shared[place]), lambda self, value: self._shared.__setitem__(place, value))


class PackedStream(EpochCounter, IterableDataset):
    """The bins that pack_stream returns, as a torch IterableDataset. Each iteration is a pass over the documents.

    `DataLoader(stream, batch_size=1, collate_fn=PackingCollator())` loads a bin as one row. Every worker packs its own
    part of the documents.

    Attributes:
        epoch, capacity, num_replicas, rank: as given or found; `rank` is None with `shard=False`.
        num_bins, num_tokens, efficiency: the bins that the latest pass of this process has yielded, their tokens, and
            the share of their capacity that holds tokens.
        report: what it has done with documents longer than the capacity, so far.
        dropped_documents: the documents (or pieces) at its end that don't make a bin for every rank.
    """

    # In shared memory, because DataLoader workers read copies of the stream, and may outlive a pass.
    epoch, _latest, _is_chosen, _is_counted, _was_counted, _sets_epochs, _is_read_by_workers = map(_shared, range(7))

    num_bins = property(lambda self: self._place["num_bins"])
    num_tokens = property(lambda self: self._place["num_tokens"])
    report = property(lambda self: OverlongReport(self._options["overlong"], *self._too_long))
    efficiency = property(lambda self: self.num_tokens / (self.num_bins * self.capacity) if self.num_bins else 1.0)

    def __init__(self, documents: Any, options: dict[str, Any], pack_window: Callable[..., Any]) -> None:
        self._documents, self._options, self._pack_window = documents, options, pack_window
        self.capacity, self.num_replicas, self.rank = (options[name] for name in ("capacity", "num_replicas", "rank"))
        self._shared = torch.zeros(7, dtype=torch.int64, device="cpu").share_memory_()
        self._latest = NEVER
        self._worker: list[int] | None = None  # of the latest pass, or of the state that was loaded
        self._go_to(_BEGINNING, NEVER)

    def _go_to(self, place: Mapping[str, Any], epoch: int, resumes: bool = False) -> None:
        """Go to a place in an epoch, where the next pass begins if it `resumes`."""
        self._place, self._place_epoch, self._resumes = dict(place), epoch, resumes
        self._too_long, self.dropped_documents = place["too_long"], 0

    def __iter__(self) -> Iterator[list[Any]]:
        """The bins of a pass, in rounds of one for each rank; bins that make no round wait for more."""
        # A generator, because libraries such as Lightning make two iterators for a pass and use only the second.
        values, this = self._begin_pass(), self._place
        ranks, max_items = self.num_replicas, check_limit(self._options["max_items"], "max_items")
        first, waiting, number, expected = this["first"], this["waiting"], this["before"], [*this["checked"]]
        carried = np.array(this["carried"], dtype=np.int64)
        held: dict[int, Any] = {}  # pieces that aren't in a bin yet, or in a bin to be passed over
        windows = deque[dict[str, Any]]()  # whose pieces are held
        for mark, pieces, is_last in self._windows(values):
            lengths = np.array([tokens for _, tokens in pieces])
            mark |= {"first": first, "carried": carried.tolist(), "waiting": waiting, "before": number}
            windows.append(mark | {"checked": digest(lengths, np.array(is_last))})
            if expected and windows[-1]["checked"] != expected[0]:
                break
            del expected[:1]
            held |= enumerate(pieces, first)
            while len(windows) > 1 and windows[1]["first"] <= min(held):
                windows.popleft()
            bins, offsets, carried = self._pack_window(carried, lengths, first, self.capacity, max_items, is_last)
            first += len(pieces)
            full = waiting + [bins[start:stop].tolist() for start, stop in pairwise(offsets)]
            if is_last:
                full = whole_rounds(full, held, ranks)
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
                "the documents aren't those that the state was saved with: their lengths differ. Pass the same ones in "
                "the same order. If their own state isn't exact, as of shuffle buffers of datasets, let a pass read "
                "them from the beginning: pack_stream(lambda: iter(documents), ...)."
            )
        if waiting:
            self.dropped_documents = sum(map(len, waiting))
            say_once(
                "stream-end",
                f"{self.dropped_documents} documents at the end of a stream don't make a bin for each of {ranks} ranks "
                "and are left out.",
            )

    def _begin_pass(self) -> Any:
        """Count a pass that begins. Return its documents, which go on at its place if they have a state."""
        worker, resumes = get_worker_info(), self._resumes and self._place_epoch == self.epoch
        place = None if worker is None else [worker.id, worker.num_workers]
        if resumes and self._worker != place:
            raise ValueError(
                f"the state was saved by worker {self._worker}, and this is worker {place} (number and all; None is "
                "none). Resume with the same num_workers, through torchdata's StatefulDataLoader."
            )
        self._is_read_by_workers, self._worker = worker is not None, place
        self._go_to(self._place if resumes else _BEGINNING, self.epoch)
        values: Any = self._documents if is_iterable(self._documents) else self._documents()
        if not is_iterable(values) or values is _LATEST.get(self):
            rule = "the function must return an iterable of documents, and make a new iterator in each call"
            raise ValueError(f"{rule}; it returned {values!r:.100}.")
        if type(values).__module__ in ("builtins", "itertools") and isinstance(values, Iterator):
            _LATEST[self] = values
        if worker is None or worker.id == 0:
            self._begin(epochs_differ=hasattr(values, "set_epoch"))
        if hasattr(values, "set_epoch") and self._sets_epochs:
            values.set_epoch(self.epoch)
        if self._place["source"] is not None:
            if not hasattr(values, "load_state_dict"):
                kind = f"load_state_dict, as datasets.IterableDataset, and {type(values).__name__} has none"
                raise ValueError(f"the state is of documents with {kind}. Pass documents of the same kind.")
            if hasattr(values, "_ex_iterable"):  # of datasets: a copy, or later passes would begin at the state, too
                given, values = values, object.__new__(type(values))  # copy.copy shares the state
                values.__dict__.update(given.__dict__)
            values.load_state_dict(self._place["source"])
        return values

    def _windows(self, values: Any) -> Iterator[tuple[dict[str, Any], list[Any], bool]]:
        """The windows from the place of the pass on: where each begins, its pieces, whether it is the last."""
        begin, size = self._place["document"], self._options["window"]
        # An IterableDataset divides its documents among workers itself, as torch demands.
        part, parts = (0, 1) if isinstance(values, IterableDataset) else self._worker or (0, 1)
        mark = after = {name: self._place[name] for name in ("document", "source", "too_long")}
        window: list[Any] = []
        for number, document in enumerate(values, 0 if self._place["source"] is None else begin):
            pieces = self._pieces(document, number) if number >= begin and number % parts == part else []
            if not pieces:
                continue
            if len(window) >= size:
                yield mark, window, False
                mark, window = after, []
            window += pieces
            if len(window) >= size:
                source = values.state_dict() if hasattr(values, "load_state_dict") else None
                after = {"document": number + 1, "source": source, "too_long": self._too_long}
        if window:
            yield mark, window, True

    def _pieces(self, document: Any, number: int) -> list[tuple[Any, int]]:
        """A document with its tokens, or the pieces of a document that is too long, each with its tokens."""
        capacity, policy = self.capacity, self._options["overlong"]
        tokens = document_length(f"document {number}", document)
        if tokens <= capacity:
            return [(document, tokens)]
        if policy == "error":
            raise ValueError(
                f"document {number} has {tokens} tokens, longer than the capacity of {capacity}. Raise it, or pass "
                "overlong='truncate', 'split' or 'drop'."
            )
        end = {"drop": 0, "truncate": capacity, "split": tokens}[policy]
        spans = [(start, min(start + capacity, end)) for start in range(0, end, capacity)]
        self._too_long = np.add(self._too_long, (1, tokens - end, len(spans))).tolist()
        return [(cut(document, start, stop, tokens, number), stop - start) for start, stop in spans]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, also for documents that have `set_epoch`; ValueError as EpochCounter's."""
        # accelerate calls this before it reads. Only here its loaders can be recognized.
        caller = {kind.__name__ for kind in type(sys._getframe(1).f_locals.get("self")).__mro__}
        if "DataLoaderDispatcher" in caller or ("IterableDatasetShard" in caller and self.rank is not None):
            raise ValueError(
                f"accelerate would slice the batches of this stream, or divide the bins of rank {self.rank} again. "
                "Pass it shard=False, and DataLoaderConfiguration(dispatch_batches=False) to accelerate or "
                "accelerator_config={'dispatch_batches': False} to TrainingArguments."
            )
        super().set_epoch(epoch)
        self._sets_epochs = True
        if hasattr(self._documents, "set_epoch"):
            self._documents.set_epoch(self.epoch)

    def state_dict(self) -> dict[str, Any]:
        """The place of the latest pass, without documents: plain numbers, and the state of their source if it has one.
        ValueError in a process whose DataLoader workers read the stream."""
        if get_worker_info() is None and self._is_read_by_workers:
            raise ValueError(
                "workers of a DataLoader read this stream, so only torchdata's StatefulDataLoader knows its place."
            )
        place = self._place if self._place_epoch == self.epoch else _BEGINNING
        return seal({"version": VERSION, "epoch": self.epoch, "worker": self._worker, **self._options, **place})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume: the next pass begins with the bin after the last one that the state counts.

        Documents with `load_state_dict` (datasets.IterableDataset) go on up to three windows earlier. Others are read
        from the beginning.

        Raises:
            ValueError: no state of a stream, a damaged one, or one of other options (only `overlong="error"`, by which
                no document was too long so far, may change); nothing is changed. At the first bin: other documents.
        """
        check_state(state, {"version", "epoch", "worker", *self._options, *_BEGINNING, "digest"}, "PackedStream")
        settings = self._options | ({"overlong": "error"} if state["overlong"] == "error" else {})
        if changes := describe_changes(state, settings):
            raise ValueError(f"since the state was saved {changes}. Restore these settings, or begin a new pass.")
        if (state["worker"] or [0])[0] == 0:  # the first worker counts the passes
            self.set_epoch(state["epoch"])
        self.epoch, self._sets_epochs, self._is_read_by_workers = state["epoch"], True, False
        self._go_to({name: state[name] for name in _BEGINNING}, state["epoch"], resumes=True)
        self._worker = state["worker"]


def pack_stream(
    documents: Iterable[Any] | Callable[[], Iterable[Any]], capacity: int, *, window: int = 1024,
    overlong: Overlong = "error", max_items: int | None = None, num_replicas: int | None = None,
    rank: int | None = None, shard: bool = True, **removed: Any,
) -> PackedStream:  # fmt: skip
    """Pack documents from any iterable, in one pass over it.

    Each window is packed by best-fit-decreasing, and the documents of bins that are filled to less than 95% are packed
    again with the next window, at most twice. So at most about three windows are in memory, and the order is nearly the
    input order. All pieces of a split document stay in one window.

    >>> stream = pack_stream([[1, 2, 3], [4, 5, 6, 7, 8, 9], [10]], capacity=4, overlong="split")
    >>> list(stream)
    [[[1, 2, 3], [10]], [[4, 5, 6, 7]], [[8, 9]]]
    >>> stream.num_bins, stream.num_tokens, str(stream.report)
    (3, 10, '1 document longer than the capacity split into 2 pieces: no token lost')

    Args:
        documents: rows of tokens (lists, arrays, tensors) or mappings with a row as "input_ids"; or a function that
            returns such an iterable, and is called for each pass. The same in the same order on all ranks.
        capacity, window: the tokens of a bin, and the documents (or pieces) that are packed at a time.
        overlong, max_items: see `pack`. All columns of a mapping are cut.
        num_replicas, rank: see MultipackDistributedBatchSampler. Each rank packs all bins and yields its part of them,
            as many as the others.
        shard: False yields the bins of all ranks on every rank, for accelerate and Trainer, which divide them.

    Raises:
        ValueError: a wrong option; while iterating, a document that is empty, has another form, is too long, or must be
            cut and has a column that doesn't hold one value per token.
        ImportError: numba can't be imported.
    """
    refuse_removed(removed, "pack_stream")
    can_repeat = is_iterable(documents) and not isinstance(documents, Iterator)
    if not can_repeat and (isinstance(documents, type) or not callable(documents)):
        raise ValueError(
            f"documents must be an iterable of rows of tokens or of mappings with 'input_ids' that each pass reads, or "
            f"a function that returns one, such as a generator function; got {type(documents).__name__}."
        )
    check_flag(shard, "shard")
    ranks, rank = place_in_world(num_replicas, rank, shard)
    if ranks > 1 and getattr(documents, "_distributed", None):
        raise ValueError(
            "the documents are divided among ranks already (split_dataset_by_node). Pass all, or num_replicas=1."
        )
    options = {
        "capacity": check_integer(capacity, "capacity"), "window": check_integer(window, "window"),
        "overlong": check_choice(overlong, get_args(Overlong), "overlong"),
        "max_items": None if max_items is None else check_limit(max_items, "max_items"),
        "num_replicas": ranks, "rank": rank,
    }  # fmt: skip

    from tritonpack.packing.heuristics import pack_window  # imports numba, which is slow

    return PackedStream(documents, options, pack_window)

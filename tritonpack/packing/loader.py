"""dataloader: a DataLoader of packed rows, from a dataset and a number of tokens; and the reader of its documents."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import islice, starmap
from operator import mul
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

from tritonpack.checks import check_choice, check_flag
from tritonpack.packing.collator import Numbered, PackingCollator, check_names, named, quote
from tritonpack.packing.collator import Objective as LabelObjective
from tritonpack.packing.lengths import TOKENS, check_integer, count, document_length, table_lengths, whole_lengths
from tritonpack.packing.planning.plan import MOST_TOKENS, Objective, Tail
from tritonpack.packing.samplers.distributed import MultipackDistributedBatchSampler
from tritonpack.packing.samplers.ranks import place_in_world
from tritonpack.packing.units import Units, fit_for_sampler
from tritonpack.removed import OPTIONS, refuse_removed

DocumentsOf = Callable[[Any], Sequence[Mapping[str, Any]]]

_AT_ONCE = 16  # documents that are read together, which is faster for a datasets.Dataset
_GIVEN, _BY_FUNCTION = "the argument lengths", "the documents of each example"  # where lengths come from
_CHOSEN_HERE = {"dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "collate_fn", "drop_last"}
_PASSED_ON = tuple(name for name in inspect.signature(DataLoader).parameters if name not in _CHOSEN_HERE)


class PackedDataLoader(DataLoader):
    """A DataLoader of packed rows, as `dataloader` makes it. Each pass is the next epoch.

    `print(loader)` shows the plan of the epoch: documents, steps, how full the rows are, and what is left out.

    accelerate may prepare it (`accelerator.prepare(loader)`), which divides the rows of all ranks. Epochs continue
    there, too. A state that is loaded into this loader holds for the prepared one.

    Attributes:
        epoch: the epoch of the latest pass; before the first pass, and after `set_epoch` and `load_state_dict`, the
            epoch of the next pass.
        rank: the rank whose rows this loader yields.
        rows: the sampler of the rows of all ranks, with the plan, the lengths and the efficiency of the epoch.
        documents: the dataset that it loads, with what was measured of each example.
    """

    def __init__(
        self, documents: Reader, rows: MultipackDistributedBatchSampler, rank: int, shard: bool, **options: Any
    ) -> None:
        self.documents, self.rows, self.rank = documents, rows, rank
        rows._advances = True
        self._own = _Rows(rows, rank)
        self._pass, self._done = 0, 0  # the latest pass over this loader, and the batches that it has handed out
        super().__init__(documents, batch_sampler=self._own if shard else rows, **options)

    @property
    def _index_sampler(self) -> Any:
        """The sampler that torch's DataLoader iterates. accelerate reads `batch_sampler`."""
        return self._own

    @property
    def epoch(self) -> int:
        return self.rows.epoch

    def __len__(self) -> int:
        """The number of steps of the epoch, the same on every rank, also after a resume."""
        return len(self._own)

    def __iter__(self) -> Any:
        # A generator, because libraries such as Lightning make two iterators for a pass and use only the second.
        self.rows._find_begin()
        self._pass = this = self.rows._passes + 1
        self._done = self.rows._done // self.rows.num_replicas
        for number, batch in enumerate(super().__iter__(), self._done + 1):
            if this == self.rows._passes:
                self._done = number
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, an integer of at least 0. Without it each pass is over the next epoch."""
        self.rows.set_epoch(epoch)

    def state_dict(self, batches_done: int | None = None) -> dict[str, Any]:
        """Where the epoch stands, as plain numbers and strings, the same on every rank.

        Args:
            batches_done: the batches of this epoch that this rank trained on. None counts the batches that the loop
                got from this loader, but not the ones that workers have fetched ahead.

        Raises:
            ValueError: more batches than the epoch has; None for a loader that accelerate prepared.
        """
        rows = self.rows
        if batches_done is None and rows._waits:
            batches_done = rows._done // rows.num_replicas  # that a loaded state counts
        elif batches_done is None and self._pass == rows._passes:
            batches_done = self._done
        elif batches_done is None:
            raise ValueError(
                "accelerate's loader fetched the batches, so they weren't counted here. Pass batches_done, the batches "
                "of this epoch that this process trained on."
            )
        done = check_integer(batches_done, "batches_done", 0, len(self), "the number of steps of the epoch")
        return rows.state_dict(done * rows.num_replicas)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume: the next pass begins with the batch after the last one that the state counts. ValueError for a state
        that is damaged or of other lengths; the loader is then unchanged."""
        self.rows.load_state_dict(state)

    def __str__(self) -> str:
        rows, reader = self.rows, self.documents
        plan, units, (used, unused) = rows.plan, reader.units, reader.columns
        documents = f" of {count(reader.counts.sum(), 'document')}" if (reader.counts > 1).any() else ""
        nouns = count(len(units), "unit" if documents else units.noun) + documents
        lines = [
            f"PackedDataLoader of {nouns}, {count(units.tokens.sum(), 'token')} (lengths from {reader.source})",
            f"  epoch {self.epoch}: {count(plan.num_steps, 'step')} of {count(plan.num_ranks, 'rank')} with "
            f"{count(plan.capacity, 'token')} each, {rows.efficiency():.1%} full",
        ]
        if plan.filler_rows:
            lines.append(f"  {count(plan.filler_rows, 'filler row')} in the last step, of documents that come twice")
        left_out = [str(rows.report)] if rows.report.documents else []
        if cut := (units.tokens - rows.lengths)[rows.lengths > 0].sum():
            left_out.append(f"{cut:,} tokens cut off by max_document_length")
        if dropped := rows.dropped_documents:
            left_out.append(f"{count(dropped, units.noun)} of this epoch that fill no last step (tail)")
        lines.append(f"  left out: {'; '.join(left_out) or 'no document'}")
        own = "" if isinstance(self.collate_fn, PackingCollator) else " of the first document"  # others may have others
        lines.append(f"  columns{own}: {', '.join(used) or 'none'}; left out: {', '.join(unused) or 'none'}")
        return "\n".join(lines)


def dataloader(
    dataset: Any, tokens: int, *,
    lengths: Sequence[int] | NDArray[Any] | Units | None = None,
    documents: DocumentsOf | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    seed: int | None = None, objective: Objective = "quadratic", tail: Tail = "spread",
    overlong: Literal["error", "drop"] = "error", shuffle: bool = True, num_replicas: int | None = None,
    rank: int | None = None, group: Any = None, shard: bool = False, epochs: int = 1,
    labels: LabelObjective = "causal", per_token: Collection[str] = (), drop_columns: Collection[str] = (),
    max_document_length: int | None = None, pad_to_multiple_of: int | None = None, pad_token_id: int = 0,
    **options: Any,
) -> PackedDataLoader:  # fmt: skip
    """A DataLoader of packed rows: at most `tokens` tokens per rank and step, the same number of steps on every rank.

    It measures the documents, plans each epoch (MultipackDistributedBatchSampler) and joins the documents of a row
    (PackingCollator). Each pass over it is the next epoch, in another order.

    >>> documents = [{"input_ids": [5] * length} for length in (5, 3, 4, 4, 2, 6, 8, 8)]
    >>> loader = dataloader(documents, tokens=8, seed=1)
    >>> print(loader)
    PackedDataLoader of 8 documents, 40 tokens (lengths from input_ids)
      epoch 0: 5 steps of 1 rank with 8 tokens each, 100.0% full
      left out: no document
      columns: input_ids; left out: none
    >>> [batch["input_ids"].shape[1] for batch in loader]
    [8, 8, 8, 8, 8]

    Args:
        dataset: tokenized documents, indexed from 0: mappings with the columns that PackingCollator takes. Or units,
            lists of such mappings that stay in one row in their order, such as the answers of a preference pair.
        tokens: the tokens of a row, from 1 to 2**30.
        lengths: (documents,) integers, the tokens of each document, or `Units`. None counts the `input_ids`; of a
            `datasets.Dataset` it reads no tokens.
        documents: a function of an example that returns its documents, a list of mappings, the same each time: it is
            called to measure examples and again at each loading.
        collate_fn: a collator of your own, such as TreeCollator, in place of PackingCollator: a function of a list of
            examples, or of lists of documents. Pass `lengths` if units aren't as long as their documents, as trees.
        seed: at least 0. None takes rank 0's seed of torch (`torch.manual_seed`).
        objective, tail, shuffle: see MultipackDistributedBatchSampler. By default no document is left out.
        overlong: "error" refuses documents longer than `tokens`, "drop" leaves them out.
        num_replicas, rank, group: see MultipackDistributedBatchSampler.
        shard: what a library finds that takes the loader apart: False the rows of all ranks, which accelerate divides;
            True the rows of this rank. The loader itself yields the rows of this rank either way.
        epochs: pad this many epochs to the same number of steps. A training then has `epochs * len(loader)` steps.
        labels: what a label belongs to, the `objective` of PackingCollator.
        per_token, max_document_length, pad_to_multiple_of, pad_token_id: see PackingCollator; like `labels`, not with
            `collate_fn`.
        drop_columns: columns that are left out.
        options: of torch's DataLoader, such as `num_workers` and `pin_memory`, but none that choose documents.

    Raises:
        ValueError: a wrong option, lengths that don't fit, a column that can't be packed, a function that fails; while
            loading, a document of another length than planned, or with other columns than the first.
        ImportError: at the first use of an epoch, if numba can't be imported.
    """
    require_map_style(dataset)
    tokens = check_integer(tokens, "tokens", 1, MOST_TOKENS)
    if labels == "documents":
        refuse_removed(["objective='documents'"], "dataloader")
    check_choice(labels, get_args(LabelObjective), "labels")
    check_flag(shard, "shard")
    if unknown := sorted(options.keys() - set(_PASSED_ON)):
        refuse_removed([name for name in unknown if name in OPTIONS], "dataloader()")
        raise ValueError(
            f"dataloader has no option {unknown[0]!r}. Of torch's DataLoader it takes {', '.join(_PASSED_ON)}; for "
            "batches of your own use DataLoader itself with tritonpack.PackingCollator()."
        )
    packing = PackingCollator(pad_to_multiple_of, pad_token_id, labels, max_document_length, per_token)
    if collate_fn is not None and not callable(collate_fn):
        raise ValueError(f"collate_fn must be a function of a list of examples; got {collate_fn!r:.100}.")
    if collate_fn is not None and (given := [f.name for f in fields(packing) if getattr(packing, f.name) != f.default]):
        names = ", ".join(given).replace("objective", "labels (its objective)")
        raise ValueError(f"collate_fn makes the batches, so give {names} to the collator itself.")
    collate_fn = packing if collate_fn is None else collate_fn
    collate = collate_fn if isinstance(collate_fn, PackingCollator) else None
    if collate and collate.pad_to_multiple_of and tokens % collate.pad_to_multiple_of:
        raise ValueError(
            f"rows of up to {tokens} tokens can't be padded to multiples of {collate.pad_to_multiple_of}. Make tokens "
            "a multiple of pad_to_multiple_of."
        )
    if hasattr(collate_fn, "measure"):
        refuse_removed(["measure"], "a collate_fn")
    reader = Reader(dataset, lengths, documents, drop_columns, collate)
    longest = None if collate is None else collate.max_document_length
    units = reader.units if longest is None else reader.cut(longest)
    if collate is None:
        fit_for_sampler(units, tokens, overlong, can_cut=False)
    _, own_rank = place_in_world(num_replicas, rank, True, group)
    assert own_rank is not None
    rows = MultipackDistributedBatchSampler(
        tokens, units, num_replicas, seed=seed, objective=objective, tail=tail, overlong=overlong, shuffle=shuffle,
        epochs=epochs, shard=False, group=group,
    )  # fmt: skip
    return PackedDataLoader(reader, rows, own_rank, shard, collate_fn=collate_fn, **options)


class Reader(Dataset):
    """The document, or the list of documents, of each example of a dataset: measured once, counted at each loading.

    Args:
        dataset, documents, drop_columns: see `dataloader`.
        lengths: see `dataloader`; or a `Reader` of the same dataset, which isn't measured again.
        collate: PackingCollator, which checks the columns of the first document; None for a collator of the user's.
    """

    units: Units  # what each example takes of a row, with documents of their whole lengths
    lengths: NDArray[np.int64] | None  # (documents,) one example after the other; None if only units are known
    counts: NDArray[np.int64]  # (examples,) the documents of each; 1 if only units are known
    source: str  # where the lengths come from, for messages
    columns: tuple[list[str], list[str]]  # of the first document: used ones and others

    def __init__(
        self, dataset: Any, lengths: Any = None, documents: DocumentsOf | None = None,
        drop_columns: Collection[str] = (), collate: Any = None,
    ) -> None:  # fmt: skip
        check_names(drop_columns, "drop_columns", [TOKENS])
        if documents is not None and not callable(documents):
            raise ValueError(f"documents must be a function of an example; got {documents!r:.100}.")
        if not len(dataset):
            raise ValueError("the dataset has no document to pack; it is empty.")
        self.dataset, self._documents, self._unused = dataset, documents, frozenset[str]()
        (example,) = fetch(dataset, [0])
        _, first = self._read(example, 0)
        _, whole = first[0]
        names = set(map(str, whole)) if isinstance(whole, Mapping) else set()
        if absent := sorted({*drop_columns} - names):
            raise ValueError(
                f"drop_columns names {quote(absent)}; the first example's columns are {quote(sorted(names)) or 'none'}."
            )
        if drop_columns:
            self._unused = frozenset(drop_columns)
            _, first = self._read(example, 0)
        self.columns = sorted(names - self._unused), sorted(self._unused)
        if collate is not None:
            collate([first[0][1]])
        if isinstance(lengths, Reader):
            self.units, self.lengths = lengths.units, lengths.lengths
            self.counts, self.source = lengths.counts, lengths.source
        else:
            self._measure(lengths)
        # Units of a collator of the user's, such as trees, need not be the sums of lengths.
        self._counts = collate is not None or self.source != _GIVEN
        self._check(first, 0)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        examples = Numbered()
        examples.numbers = numbers
        for example, number in zip(fetch(self.dataset, numbers), numbers, strict=True):
            several, found = self._read(example, number)
            self._check(found, number)
            examples.append([document for _, document in found] if several else found[0][1])
        return examples

    def cut(self, longest: int) -> Units:
        """The units with at most `longest` tokens of each document; ValueError if only units are known."""
        if self.lengths is None:
            raise ValueError("max_document_length can't cut documents of lengths=Units(...); cut them before.")
        return Units.of_counts(np.minimum(self.lengths, longest), self.counts)

    def padded_tokens(self, numbers: NDArray[Any], longest: int | None) -> int:
        """The tokens of a padded batch of the documents of these examples, each cut to `longest` tokens."""
        if self.lengths is None:
            return len(numbers) * int(self.units.tokens[numbers].max())
        stops = np.cumsum(self.counts)[numbers]
        widest = max(self.lengths[stop - n : stop].max() for stop, n in zip(stops, self.counts[numbers], strict=True))
        return int(self.counts[numbers].sum() * min(widest, longest or widest))

    def _measure(self, lengths: Any) -> None:
        """Measure all examples. None is loaded if `lengths` or a column of a `datasets.Dataset` tell their tokens."""
        self.source = _GIVEN
        if lengths is None:
            self.source = TOKENS if self._documents is None else _BY_FUNCTION
            lengths = table_lengths(self.dataset) if self._documents is None else None
        counts: list[int] = []
        if lengths is None:
            lengths = []
            for start in range(0, len(self.dataset), _AT_ONCE):
                numbers = range(start, min(start + _AT_ONCE, len(self.dataset)))
                for number, example in zip(numbers, fetch(self.dataset, numbers), strict=True):
                    own = [*starmap(document_length, self._read(example, number)[1])]
                    lengths += own
                    counts.append(len(own))
        self.lengths = None if isinstance(lengths, Units) else whole_lengths(lengths).astype(np.int64)
        self.counts = np.array(counts) if counts else np.ones(len(lengths), dtype=np.int64)
        self.units = lengths if self.lengths is None else Units.of_counts(self.lengths, self.counts)
        if len(self.units.tokens) != len(self.dataset):
            raise ValueError(
                f"{len(self.units)} lengths for a dataset of {len(self.dataset)} documents. Give each its length."
            )

    def _check(self, found: list[tuple[str, Any]], number: int) -> None:
        """ValueError unless the documents of an example have as many tokens as were planned."""
        if not self._counts:
            return
        lengths = [*starmap(document_length, found)]
        has = sum(lengths), sum(map(mul, lengths, lengths))
        planned = self.units.tokens[number], self.units.squares[number]
        if has != planned:
            raise ValueError(
                f"example {number} has {has[0]} tokens and {has[1]} squared tokens, but {planned[0]} and {planned[1]} "
                f"by {self.source}. A function must return the same documents each time, and lengths= must be the "
                "tokens of each document, of examples with several Units.of_sequences(...)."
            )

    def _read(self, example: Any, number: int) -> tuple[bool, list[tuple[str, Any]]]:
        """Return whether an example has a list of documents, and (name, document) for each, without unused columns."""
        if self._documents is None:
            found, made = example, f"example {number}"
        else:
            made = f"documents(...) of example {number}"
            try:
                found = self._documents(example)
            except Exception as error:
                names = sorted(map(str, example)) if isinstance(example, Mapping) else ()
                raise ValueError(
                    f"documents failed on example {number}, which has the columns {quote(names) or '(none)'}: "
                    f"{type(error).__name__}: {error}"
                ) from error
        several, documents = named(found, number)
        if (self._documents is not None and not several) or not documents:
            raise ValueError(
                f"{made} must be a list of documents, each a mapping with {TOKENS!r}, and at least one; got "
                f"{found!r:.100}."
            )
        for place, (name, document) in enumerate(documents):
            if isinstance(document, Mapping) and not self._unused.isdisjoint(document):
                documents[place] = name, {key: document[key] for key in document if key not in self._unused}
        return several, documents


class _Rows(Sampler[list[int]]):
    """The rows of one rank in each epoch, out of the rows of all ranks."""

    def __init__(self, rows: MultipackDistributedBatchSampler, rank: int) -> None:
        self._rows, self.rank = rows, rank
        # accelerate and Lightning choose the epoch at each pass.
        self.set_epoch, self.load_state_dict = rows.set_epoch, rows.load_state_dict

    def __len__(self) -> int:
        return self._rows.num_batches()

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, because DataLoader with workers makes two iterators for a pass and uses only the second.
        yield from islice(self._rows, self.rank, None, self._rows.num_replicas)

    def state_dict(self) -> dict[str, Any]:
        """The place after the steps whose rows were fetched. torchdata's StatefulDataLoader reads it at each batch."""
        ranks = self._rows.num_replicas
        return self._rows.state_dict(-(-self._rows._done // ranks) * ranks)

    @property
    def batch_size(self) -> None:
        """None, because rows have different numbers of documents. Libraries that divide batches read it.

        Raises:
            ValueError: the rows of one rank of several, which can't be divided again; rows that ranks share.
        """
        if self._rows.is_shared or self._rows.num_replicas > 1:
            raise ValueError(
                f"this loader yields the rows of rank {self.rank}, of {self._rows.num_replicas} ranks. Dividing them "
                "among processes again would lose most of them. Leave out shard=True for accelerate, or don't let it "
                "prepare this loader."
            )

    @property
    def sampler(self) -> Any:
        """This sampler itself. accelerate looks here for `set_epoch` once it has wrapped a batch sampler."""
        return self


def require_map_style(dataset: Any) -> None:
    """ValueError for a dataset that can't be indexed by document."""
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, type)
    if isinstance(dataset, (Mapping, str, bytes)) or not indexed or getattr(dataset, "ndim", 1) == 0:
        raise ValueError(
            f"the dataset must have a length and be indexed by document; got {type(dataset).__name__}. Pass one split "
            "of a DatasetDict, and pack iterables with pack_stream."
        )


def fetch(dataset: Any, numbers: Sequence[int]) -> list[Any]:
    """Documents of a map-style dataset, all at once where it has `__getitems__`, as torch's DataLoader does.

    Raises:
        ValueError: (or ConnectionError, TimeoutError, which programs catch to resume) the dataset raises an exception;
            the message names the document.
    """
    at_once = getattr(dataset, "__getitems__", None)
    try:
        documents = list(at_once(list(numbers)) if callable(at_once) else map(dataset.__getitem__, numbers))
    except Exception as error:
        for number in numbers if len(numbers) > 1 else ():  # one of which fails alone, too
            fetch(dataset, [number])
        kind = next((each for each in (ConnectionError, TimeoutError) if isinstance(error, each)), ValueError)
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        raise kind(f"document {', '.join(map(str, numbers))} can't be read: {reason}") from error
    if len(documents) != len(numbers):
        raise ValueError(
            f"the dataset's __getitems__ returned {count(len(documents), 'document')} for the {len(numbers)} numbers "
            f"{', '.join(map(str, numbers))}; it must return one for each."
        )
    return documents

"""Reads documents from datasets of all kinds: fetches, counts, cuts and checks them, with errors that name one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from tritonpack.packing.columns import TAKEN, TOKENS, Numbered, is_unit, quote
from tritonpack.packing.lengths import count, whole_lengths
from tritonpack.packing.units import Units

Length = Callable[[Any], int]
DocumentsOf = Callable[[Any], Sequence[Mapping[str, Any]]]

LENGTH_COLUMNS = ("length", "lengths")
_AT_ONCE = 16  # documents that are read together, which is faster for a datasets.Dataset
_GIVEN, _BY_COLLATOR = "the argument lengths", "collate_fn.measure"  # where lengths come from


def require_map_style(dataset: Any) -> None:
    """ValueError for a dataset that can't be indexed by document."""
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, type)
    if isinstance(dataset, (Mapping, str, bytes)) or not indexed or getattr(dataset, "ndim", 1) == 0:
        remedy = "Pack iterables with pack_stream."
        if isinstance(dataset, Mapping) and any(hasattr(part, "column_names") for part in dataset.values()):
            remedy = f"Pass one of its datasets: {' or '.join(f'dataset[{name!r}]' for name in dataset)}."
        raise ValueError(
            f"the dataset must have a length and be indexed by document; got {type(dataset).__name__}. {remedy}"
        )


def require_callable(length: Any) -> None:
    """ValueError for a `length` that can't be called."""
    if length is not None and not callable(length):
        raise ValueError(
            f"length must be a function that returns the number of a document's tokens, or None; got {length!r:.100}."
        )


def require_lengths(lengths: Any, dataset: Any) -> None:
    """ValueError unless there is a length for each document of a dataset."""
    if len(lengths) != len(dataset):
        raise ValueError(f"{len(lengths)} lengths for a dataset of {len(dataset)} documents. Give each its length.")


def unreadable(what: str, error: Exception) -> Exception:
    """The error for a document whose dataset or stream raises an exception.

    It is a ValueError. Only a connection that fails keeps its kind, because programs catch it to resume.
    """
    kind = next((each for each in (ConnectionError, TimeoutError) if isinstance(error, each)), ValueError)
    return kind(f"{what} can't be read: {type(error).__name__}: {error}".rstrip(": "))


def fetch(dataset: Any, numbers: Sequence[int]) -> list[Any]:
    """Documents of a map-style dataset, all at once where it has `__getitems__`, as torch's DataLoader does.

    Raises:
        ValueError: (or ConnectionError, TimeoutError) the dataset raises an exception; the message names the document.
    """
    at_once = getattr(dataset, "__getitems__", None)
    try:
        documents = list(at_once(list(numbers))) if callable(at_once) else [dataset[number] for number in numbers]
    except Exception as error:
        for number in numbers:  # one of which fails alone, too
            try:
                dataset[number]
            except Exception as own:
                raise unreadable(f"document {number}", own) from own
        raise unreadable(f"one of the documents {', '.join(map(str, numbers))}", error) from error
    if len(documents) != len(numbers):
        raise ValueError(
            f"the dataset's __getitems__ returned {count(len(documents), 'document')} for the {len(numbers)} numbers "
            f"{', '.join(map(str, numbers))}; it must return one for each."
        )
    return documents


def examples_of(dataset: Any) -> Iterator[tuple[int, Any]]:
    """All examples with their numbers."""
    numbers = range(len(dataset))
    parts = (fetch(dataset, numbers[start : start + _AT_ONCE]) for start in range(0, len(dataset), _AT_ONCE))
    return enumerate(chain.from_iterable(parts))


def document_length(document: Any, name: int | str, length: Length | None = None) -> int:
    """The number of tokens of a document: what `length` returns, or the length of the row or of its "input_ids".

    Args:
        name: the document's number, for messages.

    Raises:
        ValueError: a document of another form, or with less than one token.
    """
    tokens: Any = document.get(TOKENS) if isinstance(document, Mapping) else document
    if length is not None:
        found = length(document)
    elif (type(tokens) is list and tokens and type(tokens[0]) is int) or _is_row(tokens):  # most are plain lists
        found = len(tokens)
    else:
        given = f"shape {tuple(tokens.shape)}" if hasattr(tokens, "shape") else type(tokens).__name__
        if isinstance(document, Mapping):
            given = f"the keys {sorted(map(str, document))}" if tokens is None else f"{TOKENS!r} of {given}"
        raise ValueError(
            f"document {name} must be a row of tokens or a mapping with a row of tokens as {TOKENS!r}; got {given}. "
            "Tokenize text first. For documents of another form pass the tokens of each: length=, a function that "
            "counts them, or for dataloader lengths=, or a collate_fn with a method measure (VisionPackingCollator)."
        )
    if isinstance(found, bool) or not isinstance(found, (int, np.integer)) or found < 1:
        raise ValueError(
            f"every document needs at least one token, counted as an integer; document {name} has {found!r}. "
            "Remove empty documents first."
        )
    return int(found)


def measure_lengths(dataset: Any, length: Length | None = None) -> NDArray[np.int64]:
    """(documents,) int64, the number of tokens of each document of a map-style dataset.

    Without `length` the offsets in the table of a `datasets.Dataset` are read, and no tokens. Of other datasets each
    document is read.

    Raises:
        ValueError: a dataset that can't be indexed, and see `document_length`.
    """
    require_map_style(dataset)
    require_callable(length)
    if length is None and (found := table_lengths(dataset)) is not None:
        return found
    return np.array([document_length(each, number, length) for number, each in examples_of(dataset)], dtype=np.int64)


def table_columns(dataset: Any) -> Collection[str]:
    """The columns of a `datasets.Dataset`; none of other datasets."""
    return getattr(dataset, "column_names", None) or () if hasattr(dataset, "with_format") else ()


def table_column(dataset: Any, name: str, meaning: str, remedy: str = "") -> NDArray[Any]:
    """A column of integers of a `datasets.Dataset`."""
    column = np.asarray(dataset.with_format("numpy")[name][:])
    if column.ndim != 1 or column.dtype.kind not in "iu":
        raise ValueError(
            f"the column {name!r} must hold {meaning}; got {column.dtype} of shape {column.shape}.{remedy}"
        )
    return column


def table_lengths(dataset: Any) -> NDArray[np.int64] | None:
    """The lengths of documents by the offsets of a `datasets.Dataset`, if it is one and they tell them."""
    if TOKENS not in table_columns(dataset):
        return None
    tables = dataset.select_columns(TOKENS).with_format("arrow").iter(batch_size=10_000)
    chunks = [chunk for table in tables for chunk in table.column(TOKENS).chunks]
    for chunk in chunks:  # a row of single values for each document: no row of rows, and none missing
        if not hasattr(chunk, "value_lengths") or chunk.null_count or chunk.type.value_type.num_fields:
            return None
    parts = [chunk.value_lengths().to_numpy(zero_copy_only=False) for chunk in chunks]
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)


def is_table(dataset: Any) -> bool:
    """Return whether a dataset is a `datasets.Dataset` that reads its documents from a table, not from a transform."""
    datasets = sys.modules.get("datasets")  # of whose classes there is no object before it is imported
    return datasets is not None and isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom"


def cut(document: Any, start: int, stop: int, tokens: int, number: int) -> Any:
    """Tokens start to stop of a document of `tokens` tokens, in all of its columns.

    Raises:
        ValueError: a column that isn't a row of one value per token; the message has the document's number.
    """
    is_mapping = isinstance(document, Mapping)
    columns = {repr(name): document[name] for name in document} if is_mapping else {}
    columns = columns or {f"a {type(document).__name__}": document}
    if whole := sorted(name for name, values in columns.items() if not _is_row(values) or len(values) != tokens):
        raise ValueError(
            f"document {number} has {tokens} tokens and must be cut, but {', '.join(whole)} isn't a row of one value "
            "per token. Remove such columns (dataset.remove_columns), cut the document before packing, or leave out "
            "documents that are too long: overlong='drop'."
        )
    return {name: document[name][start:stop] for name in document} if is_mapping else document[start:stop]


def _is_row(values: Any) -> bool:
    """Return whether values can be sliced and hold one value per token; of a list only the first is read."""
    if isinstance(values, (str, bytes, Mapping)) or not (hasattr(values, "__len__") and hasattr(values, "__getitem__")):
        return False
    if not isinstance(values, (list, tuple)):
        return getattr(values, "ndim", None) in (None, 1)
    return not values or not (isinstance(values[0], Sequence) or getattr(values[0], "ndim", None))


class Reader(Dataset):
    """The documents of each example of a dataset: measured once, and compared with that whenever they are loaded.

    Item i is the document of example i, or the list of its documents.

    Attributes:
        units: what each example takes of a row, with documents of their whole lengths.
        lengths: (documents,) int64, the tokens of each document, one example after the other; None if only units are
            known.
        counts: (examples,) int64, the documents of each example; 1 if only units are known.
        source: where the lengths come from, for messages.
        columns: the columns of the first document that are used, and those that aren't.

    Args:
        dataset, documents, drop_columns: see `dataloader`.
        lengths: see `dataloader`; or a `Reader` of the same dataset, which isn't measured again.
        collate: PackingCollator, which checks the columns of the first document; None for a collator of the user's.
        measure: the `measure` of a collator of the user's.
    """

    units: Units
    lengths: NDArray[np.int64] | None
    counts: NDArray[np.int64]
    source: str

    def __init__(
        self,
        dataset: Any,
        lengths: Any = None,
        documents: DocumentsOf | None = None,
        drop_columns: Collection[str] = (),
        collate: Any = None,
        measure: Callable[[Any], Any] | None = None,
    ) -> None:
        if not len(dataset):
            raise ValueError("the dataset has no document to pack; it is empty.")
        if isinstance(drop_columns, str) or not set(map(type, drop_columns)) <= {str}:
            raise ValueError(
                f"drop_columns must be a collection of column names, such as ('text',); got {drop_columns!r}."
            )
        if TOKENS in drop_columns:
            raise ValueError(f"{TOKENS} can't be dropped; leave it out of drop_columns.")
        if documents is not None and not callable(documents):
            raise ValueError(
                f"documents must be a function that returns the documents of an example; got {documents!r:.100}."
            )
        self.dataset, self._documents, self._counts_lengths = dataset, documents, False
        self._measure: Callable[[Any], Any] | None = None
        self._unused: set[str] = set()
        (first,) = fetch(dataset, [0])
        (whole, *_), *_ = self._read(first, 0)
        self._unused = {*drop_columns, *(() if collate is None else LENGTH_COLUMNS)}
        (document, *_), *_ = self._read(first, 0)
        self.columns = self._check_columns(whole, document, drop_columns, collate)
        if measure is not None:
            self._measure = measure
        if isinstance(lengths, Reader):
            self.units, self.lengths = lengths.units, lengths.lengths
            self.counts, self.source = lengths.counts, lengths.source
        else:
            self._measure_all(lengths, drop_columns)
        # Units of a collator of the user's need not be the sums of lengths, such as those of trees.
        self._counts_lengths = collate is not None or self.source != _GIVEN
        self._planned = {"tokens": self.units.tokens, "squared tokens": self.units.squares}
        self._checked(first, 0)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        return Numbered(map(self._checked, fetch(self.dataset, numbers), numbers), numbers)

    def cut(self, longest: int | None) -> Units:
        """The units with at most `longest` tokens of each document.

        Raises:
            ValueError: only units are known, so documents can't be cut.
        """
        if longest is None:
            return self.units
        if self.lengths is None:
            raise ValueError(
                "lengths=Units(...) don't tell the lengths of documents, so max_document_length can't cut them. Cut "
                "the documents, and pass the units of what is left."
            )
        return Units.of_counts(np.minimum(self.lengths, longest), self.counts)

    def padded_tokens(self, numbers: NDArray[Any], longest: int | None) -> int:
        """The tokens of a padded batch of the documents of these examples, each cut to `longest` tokens."""
        if self.lengths is None:
            return len(numbers) * int(self.units.tokens[numbers].max())
        stops = np.cumsum(self.counts)[numbers]
        widest = max(self.lengths[stop - n : stop].max() for stop, n in zip(stops, self.counts[numbers], strict=True))
        return int(self.counts[numbers].sum() * min(widest, longest or widest))

    def _check_columns(
        self, whole: Any, document: Any, drop_columns: Collection[str], collate: Any
    ) -> tuple[list[str], list[str]]:
        """The names of the first document's columns that are used, and of those that aren't.

        Raises:
            ValueError: it has a column that can't be packed, or not one that is to be dropped.
        """
        names = sorted(map(str, whole)) if isinstance(whole, Mapping) else []
        if absent := sorted(set(drop_columns) - set(names)):
            raise ValueError(
                f"drop_columns names {quote(absent)}, but the first document has the columns "
                f"{', '.join(names) or 'none'}."
            )
        used, unused = sorted(set(names) - self._unused), sorted(set(names) & self._unused)
        try:
            if collate is not None:
                collate([document])
        except ValueError as error:
            hint, refused = "", tuple(name for name in used if name not in {*TAKEN, *collate.per_token})
            if names and TOKENS not in names and self._documents is None:
                hint = (
                    " If examples have their tokens in other columns, as preference pairs do, pass documents=, a "
                    "function of an example that returns its documents."
                )
            elif refused and TOKENS in names:
                hint = f" To leave them out while loading, pass drop_columns={refused!r}."
            raise ValueError(f"{error}{hint}") from error
        return used, unused

    def _measure_all(self, lengths: Any, drop_columns: Collection[str]) -> None:
        """Measure all examples. None is loaded if `lengths` or columns of a `datasets.Dataset` tell what they take."""
        self.source = _GIVEN
        units = lengths if isinstance(lengths, Units) else None
        columns = table_columns(self.dataset)
        for name in LENGTH_COLUMNS if self._documents is None else ():
            if lengths is None and name in columns and name not in drop_columns:
                remedy = f" Pass lengths=, or leave the column out: drop_columns=({name!r},)."
                lengths = table_column(self.dataset, name, "the number of each document's tokens", remedy)
                self.source = f"the column {name!r}"
        if lengths is None and self._measure is not None:
            self.source = _BY_COLLATOR
        elif lengths is None and self._documents is not None:
            self.source = "the documents of each example"
        elif lengths is None:
            lengths, self.source = table_lengths(self.dataset) if columns else None, TOKENS
        self._counts_lengths = lengths is None
        own: list[int] = []
        counts: list[int] = []
        for number, example in examples_of(self.dataset) if lengths is None else ():
            _, _, tokens = self._read(example, number)
            own += tokens
            counts.append(len(tokens))
        if units is not None:
            self.lengths, self.counts, self.units = None, np.ones(len(units), dtype=np.int64), units
        else:
            self.lengths = whole_lengths(own if lengths is None else lengths).astype(np.int64)
            self.counts = np.array(counts) if lengths is None else np.ones_like(self.lengths)
            self.units = Units.of_counts(self.lengths, self.counts)
        require_lengths(self.units, self.dataset)

    def _checked(self, example: Any, number: int) -> Any:
        """The document or documents of an example; ValueError unless it takes what was measured."""
        documents, several, lengths = self._read(example, number)
        amounts: list[tuple[str, int]] = []
        if lengths:
            amounts.append(("tokens", sum(lengths)))
        if lengths and self._counts_lengths:
            amounts.append(("squared tokens", int(np.square(lengths).sum())))
        for name, amount in amounts:
            if amount != self._planned[name][number]:
                counted = f" by {_BY_COLLATOR}" if self._measure is not None else ""
                raise ValueError(
                    f"example {number} has {amount} {name}{counted}, but {self._planned[name][number]} by "
                    f"{self.source}. An example must take the same whenever it is loaded. Functions must return the "
                    "same each time, and lengths= must be the tokens of each document, of examples with several "
                    "Units.of_sequences(...); without it they are counted."
                )
        return documents if several else documents[0]

    def _read(self, example: Any, number: int) -> tuple[list[Any], bool, list[int]]:
        """The documents of an example, without unused columns, and what they take.

        Returns:
            The documents; whether the example is a list of documents; the tokens of each, none if they aren't counted.
        """
        found, made = example, f"example {number}"
        if self._documents is not None:
            found, made = _called(self._documents, example, number, "documents"), f"documents(...) of example {number}"
        several = isinstance(found, (list, tuple)) and is_unit(found)
        if (self._documents is not None and not several) or (several and not found):
            raise ValueError(
                f"{made} must be a list of documents, each a mapping with {TOKENS!r}, and at least one; got "
                f"{found!r:.100}."
            )
        documents = list(found) if several else [found]
        for place, one in enumerate(documents):
            if isinstance(one, Mapping) and not self._unused.isdisjoint(one):
                documents[place] = {name: one[name] for name in one if name not in self._unused}
        lengths: list[int] = []
        if self._measure is not None:
            lengths = [size.tokens for size in self._sizes(documents, number)]
        elif self._counts_lengths:
            for place, one in enumerate(documents):
                lengths.append(document_length(one, f"{place} of example {number}" if several else number))
        return documents, several, lengths

    def _sizes(self, documents: list[Any], number: int) -> list[Any]:
        """What the collator's `measure` returns for each document of an example."""
        assert self._measure is not None
        sizes = [_called(self._measure, one, number, _BY_COLLATOR) for one in documents]
        for size in sizes:
            tokens = getattr(size, "tokens", None)
            if not isinstance(tokens, (int, np.integer)) or tokens < 1:
                raise ValueError(
                    f"{_BY_COLLATOR} must return an object whose attribute tokens is an integer of at least 1; for "
                    f"example {number} it returned {size!r:.100}."
                )
        return sizes


def _called(function: Callable[[Any], Any], example: Any, number: int, name: str) -> Any:
    """Call a user's function on an example; a ValueError names the example if it fails."""
    try:
        return function(example)
    except Exception as error:
        shown = f"the type {type(example).__name__}"
        if isinstance(example, Mapping):
            shown = f"the columns {quote(sorted(map(str, example))) or '(none)'}"
        raise ValueError(
            f"{name} failed on example {number}, which has {shown}: {type(error).__name__}: {error}"
        ) from error

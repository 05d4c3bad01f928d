"""Reads documents from datasets of all kinds: fetches, counts, cuts and checks them, with errors that name one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import starmap
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from tritonpack.packing.collator import TOKENS, Numbered, check_names, named, quote
from tritonpack.packing.lengths import count, whole_lengths
from tritonpack.packing.units import Units

DocumentsOf = Callable[[Any], Sequence[Mapping[str, Any]]]

_AT_ONCE = 16  # documents that are read together, which is faster for a datasets.Dataset
_GIVEN, _BY_FUNCTION = "the argument lengths", "the documents of each example"  # where lengths come from


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


def document_length(name: str, document: Any) -> int:
    """The number of tokens of a row or of its "input_ids", at least one. A batch of one row, as processors return it
    with `return_tensors="pt"`, is that row. The name is for messages.
    """
    tokens: Any = document.get(TOKENS) if isinstance(document, Mapping) else document
    is_row = (type(tokens) is list and len(tokens) > 0 and type(tokens[0]) is int) or _is_row(tokens)  # most are these
    if not is_row and (isinstance(tokens, (list, tuple)) or getattr(tokens, "ndim", 1) == 2) and len(tokens) == 1:
        tokens = tokens[0]
        is_row = _is_row(tokens)
    if not is_row:
        given = f"shape {tuple(tokens.shape)}" if hasattr(tokens, "shape") else type(tokens).__name__
        if isinstance(document, Mapping):
            given = f"the keys {sorted(map(str, document))}" if tokens is None else f"{TOKENS!r} of {given}"
        raise ValueError(
            f"{name} must be a row of tokens or a mapping with a row of tokens as {TOKENS!r}; got {given}. Tokenize "
            "text first. For documents of another form pass dataloader their lengths=."
        )
    if not len(tokens):
        raise ValueError(f"{name} is empty; every document needs at least one token. Remove it first.")
    return len(tokens)


def is_from_datasets(values: Any, kind: str) -> bool:
    """Return whether values are an object of a class of the package datasets, which needn't be imported for that."""
    module = sys.modules.get("datasets")
    return module is not None and isinstance(values, getattr(module, kind))


def is_table(dataset: Any) -> bool:
    """Return whether a dataset is a `datasets.Dataset` that reads its documents from a table, not from a transform."""
    return is_from_datasets(dataset, "Dataset") and dataset.format["type"] != "custom"


def table_lengths(dataset: Any) -> NDArray[np.int64] | None:
    """The lengths of documents by the offsets of a table, if the dataset is one and they tell them."""
    if not is_table(dataset) or TOKENS not in dataset.column_names:
        return None
    tables = dataset.select_columns(TOKENS).with_format("arrow").iter(batch_size=10_000)
    chunks = [chunk for table in tables for chunk in table.column(TOKENS).chunks]
    for chunk in chunks:  # a row of single values for each document: no row of rows, and none missing
        if not hasattr(chunk, "value_lengths") or chunk.null_count or chunk.type.value_type.num_fields:
            return None
    parts = [chunk.value_lengths().to_numpy(zero_copy_only=False) for chunk in chunks]
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)


def cut(document: Any, start: int, stop: int, tokens: int, number: int) -> Any:
    """Tokens start to stop of a document of `tokens` tokens, in all of its columns: rows of one value per token."""
    if not isinstance(document, Mapping):
        return document[start:stop]
    if whole := sorted(name for name in document if not _is_row(document[name]) or len(document[name]) != tokens):
        raise ValueError(
            f"document {number} has {tokens} tokens and must be cut, but {quote(whole)} isn't a row of one value per "
            "token. Remove such columns (dataset.remove_columns), or pass overlong='drop'."
        )
    return {name: document[name][start:stop] for name in document}


def _is_row(values: Any) -> bool:
    """Return whether values can be sliced and hold one value per token; of a list only the first is read."""
    if isinstance(values, (list, tuple)):
        return not values or not (isinstance(values[0], Sequence) or getattr(values[0], "ndim", None))
    others = isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__getitem__")
    return not others and hasattr(values, "__len__") and getattr(values, "ndim", 1) == 1


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
        # Units of a collator of the user's need not be the sums of lengths, such as those of trees.
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
        """Whether an example has a list of documents; its documents after their names, without unused columns."""
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

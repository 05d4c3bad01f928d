"""Documents of datasets of all kinds: fetched, counted and cut."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.lengths import count

Length = Callable[[Any], int]
TOKENS = "input_ids"  # the column with the tokens of a document
_AT_ONCE = 16  # documents that are read together, which is faster for a datasets.Dataset
_PASS_LENGTH = "For documents of another form pass length=, a function that returns the number of their tokens."


class Numbered(list[Any]):
    """Items of a dataset with their numbers, by which messages name documents in place of their places in the list."""

    def __init__(self, items: Iterable[Any], numbers: Iterable[int]) -> None:
        super().__init__(items)
        self.numbers = list(numbers)


def documents_of(features: Any, collator: str) -> tuple[list[Any], list[int | str]]:
    """The documents of features, each a document or a list of documents, and what messages call each of them.

    Raises:
        ValueError: features that aren't a list, or hold nothing; the message names the collator.
    """
    if not is_iterable(features):
        raise ValueError(
            f"{collator} takes a list of documents, each a mapping with {TOKENS!r}, or of bins; got "
            f"{type(features).__name__}. Put a single document into a list. Take documents from a dataset one by "
            "one, [dataset[i] for i in range(8)], not as dataset[:8]."
        )
    numbers = getattr(features, "numbers", None)
    documents: list[Any] = []
    names: list[int | str] = []
    for place, feature in enumerate(features):
        if isinstance(feature, (list, tuple)) and all(isinstance(document, Mapping) for document in feature):
            documents += feature
            names += [] if numbers is None else _names(feature, numbers[place])
        else:
            documents.append(feature)
            names += [] if numbers is None else [numbers[place]]
    if not documents:
        raise ValueError(f"{collator} needs at least one document; got an empty list of features.")
    return documents, list(range(len(documents))) if numbers is None else names


def _names(documents: Sequence[Any], number: int) -> list[str]:
    return [f"{place} of example {number}" for place in range(len(documents))]


def require_lengths(lengths: Any, dataset: Any) -> None:
    """ValueError unless there is a length for each document of a dataset."""
    if len(lengths) != len(dataset):
        raise ValueError(f"{len(lengths)} lengths for a dataset of {len(dataset)} documents. Give each its length.")


def measure_lengths(dataset: Any, length: Length | None = None) -> NDArray[np.int64]:
    """(documents,) int64, the number of tokens of each document of a map-style dataset.

    Without `length` the offsets in the table of a `datasets.Dataset` are read, and no tokens. Of other datasets each
    document is read.

    Raises:
        ValueError: a dataset that can't be indexed, and see `checked_length`.
    """
    require_map_style(dataset)
    require_callable(length)
    if length is None and (found := table_lengths(dataset)) is not None:
        return found
    return np.array([checked_length(each, number, length) for number, each in examples_of(dataset)], dtype=np.int64)


def table_column(dataset: Any, name: str, meaning: str, remedy: str = "") -> NDArray[Any] | None:
    """A column of integers of a `datasets.Dataset`; None if it has no such column."""
    if not hasattr(dataset, "with_format") or name not in (getattr(dataset, "column_names", None) or ()):
        return None
    column = np.asarray(dataset.with_format("numpy")[name][:])
    if column.ndim != 1 or column.dtype.kind not in "iu":
        raise ValueError(
            f"the column {name!r} must hold {meaning}; got {column.dtype} of shape {column.shape}.{remedy}"
        )
    return column


def table_lengths(dataset: Any) -> NDArray[np.int64] | None:
    """The lengths of documents by the offsets of a `datasets.Dataset`, if it is one and they tell them."""
    if not hasattr(dataset, "with_format") or TOKENS not in (getattr(dataset, "column_names", None) or ()):
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


def checked_length(document: Any, name: int | str, length: Length | None = None, remedy: str = _PASS_LENGTH) -> int:
    """The number of tokens of a document: what `length` returns, or the length of the row or of its "input_ids".

    `name`: the document's number, for messages. `remedy`: their last sentence for documents of another form.

    Raises:
        ValueError: a document of another form, or with less than one token.
    """
    if length is not None:
        found = length(document)
    else:
        tokens: Any = document.get(TOKENS) if isinstance(document, Mapping) else document
        is_plain = type(tokens) is list and len(tokens) > 0 and type(tokens[0]) is int
        if not is_plain and not _is_row(tokens):
            given = f"shape {tuple(tokens.shape)}" if hasattr(tokens, "shape") else type(tokens).__name__
            if isinstance(document, Mapping):
                given = f"the keys {sorted(map(str, document))}" if tokens is None else f"{TOKENS!r} of {given}"
            raise ValueError(
                f"document {name} must be a row of tokens or a mapping with a row of tokens as {TOKENS!r}; got "
                f"{given}. Tokenize text first. {remedy}"
            )
        found = len(tokens)
    if isinstance(found, bool) or not isinstance(found, (int, np.integer)) or found < 1:
        raise ValueError(
            f"every document needs at least one token, counted as an integer; document {name} has {found!r}. "
            "Remove empty documents first."
        )
    return int(found)


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


def fetch(dataset: Any, numbers: Sequence[int]) -> list[Any]:
    """Documents of a map-style dataset, all at once where it has `__getitems__`, as torch's DataLoader does.

    Raises:
        ValueError: (or ConnectionError, TimeoutError) the dataset raises an exception, which is the cause; the message
            names the document.
    """
    at_once = getattr(dataset, "__getitems__", None)
    try:
        if not callable(at_once):
            return [dataset[number] for number in numbers]
        documents = list(at_once(list(numbers)))
    except Exception as error:
        for number in numbers:  # one of which fails alone, too
            _fetch_one(dataset, number)
        raise unreadable(f"one of the documents {', '.join(map(str, numbers))}", error) from error
    if len(documents) != len(numbers):
        raise ValueError(
            f"the dataset's __getitems__ returned {count(len(documents), 'document')} for the {len(numbers)} numbers "
            f"{', '.join(map(str, numbers))}; it must return one for each."
        )
    return documents


def _fetch_one(dataset: Any, number: int) -> None:
    try:
        dataset[number]
    except Exception as error:
        if number >= len(dataset):
            raise ValueError(
                f"document {number} can't be read: the dataset holds only {count(len(dataset), 'document')} now. It "
                "mustn't shrink after its documents were counted."
            ) from error
        raise unreadable(f"document {number}", error) from error


def examples_of(dataset: Any) -> Iterator[tuple[int, Any]]:
    """All examples with their numbers."""
    numbers = range(len(dataset))
    parts = (fetch(dataset, numbers[start : start + _AT_ONCE]) for start in range(0, len(dataset), _AT_ONCE))
    return enumerate(chain.from_iterable(parts))


def unreadable(what: str, error: Exception) -> Exception:
    """The error for a document whose dataset or stream raises an exception.

    It is a ValueError. Only a connection that fails keeps its kind, because programs catch it to resume.
    """
    kind = next((each for each in (ConnectionError, TimeoutError) if isinstance(error, each)), ValueError)
    return kind(f"{what} can't be read: {type(error).__name__}: {error}".rstrip(": "))


def _is_row(values: Any) -> bool:
    """Return whether values can be sliced and hold one value per token; of a list only the first is read."""
    if isinstance(values, (str, bytes, Mapping)) or not (hasattr(values, "__len__") and hasattr(values, "__getitem__")):
        return False
    if not isinstance(values, (list, tuple)):
        return getattr(values, "ndim", None) in (None, 1)
    return not values or not (isinstance(values[0], Sequence) or getattr(values[0], "ndim", None))


def is_iterable(values: Any) -> bool:
    """Return whether values can be iterated over, and aren't text, a mapping, a class, or a single number."""
    others = (Mapping, str, bytes, type)
    return isinstance(values, Iterable) and not isinstance(values, others) and getattr(values, "ndim", None) != 0


def require_callable(length: Any) -> None:
    """ValueError for a `length` that can't be called."""
    if length is not None and not callable(length):
        raise ValueError(
            f"length must be a function that returns the number of a document's tokens, or None; got {length!r:.100}."
        )


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

"""Documents of a dataset: check them, count their tokens, fetch them, cut them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.lengths import count

Length = Callable[[Any], int]
TOKENS = "input_ids"  # the column with the tokens of a document
_PASS_LENGTH = "For documents of another form pass length=, a function that returns the number of their tokens."


class NumberedDocuments(list[Any]):
    """Documents with their numbers in a dataset, which messages name in place of their places in the list."""

    def __init__(self, documents: Iterable[Any], numbers: Iterable[int | str]) -> None:
        super().__init__(documents)
        self.numbers = list(numbers)

    def names(self) -> list[int | str]:
        """What messages call each document: its number, or in a list of documents its place and the list's number."""
        named: list[int | str] = []
        for item, number in zip(self, self.numbers, strict=True):
            is_list = isinstance(item, list)
            named += [f"{place} of example {number}" for place in range(len(item))] if is_list else [number]
        return named


def measure_lengths(dataset: Any, length: Length | None = None, *, remedy: str = _PASS_LENGTH) -> NDArray[np.int64]:
    """(documents,) int64, the number of tokens of each document of a map-style dataset.

    Without `length` the offsets in the table of a `datasets.Dataset` are read, and no tokens. Of other datasets each
    document is read. `remedy`: see `checked_length`.

    Raises:
        ValueError: see `checked_length`, `require_map_style` and `check_length_function`.
    """
    require_map_style(dataset)
    check_length_function(length)
    if length is None and hasattr(dataset, "with_format") and TOKENS in (getattr(dataset, "column_names", None) or ()):
        tables = dataset.select_columns(TOKENS).with_format("arrow").iter(batch_size=10_000)
        chunks = [chunk for table in tables for chunk in table.column(TOKENS).chunks]
        if all(_has_rows(chunk) for chunk in chunks):
            parts = [chunk.value_lengths().to_numpy(zero_copy_only=False) for chunk in chunks]
            return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)
    lengths = [checked_length(_fetch_one(dataset, number), number, length, remedy) for number in range(len(dataset))]
    return np.array(lengths, dtype=np.int64)


def _has_rows(chunk: Any) -> bool:
    """Whether a chunk of a column holds a row of single values for each document: no row of rows, and none missing."""
    return hasattr(chunk, "value_lengths") and not chunk.null_count and not chunk.type.value_type.num_fields


def is_table(dataset: Any) -> bool:
    """Whether a dataset is a `datasets.Dataset` that reads its documents from a table, not from a transform."""
    datasets = sys.modules.get("datasets")  # of whose classes there is no object before it is imported
    return datasets is not None and isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom"


def checked_length(document: Any, number: int, length: Length | None, remedy: str = _PASS_LENGTH) -> int:
    """The number of tokens of a document: what `length` returns, or the length of the row or of its "input_ids".

    `remedy`: for documents of another form, the last sentence of the message.

    Raises:
        ValueError: a document of another form, or with less than one token.
    """
    if length is not None:
        count = length(document)
    else:
        tokens: Any = document.get(TOKENS) if isinstance(document, Mapping) else document
        if not _is_row(tokens):
            given = f"shape {tuple(tokens.shape)}" if hasattr(tokens, "shape") else type(tokens).__name__
            if isinstance(document, Mapping):
                given = f"the keys {sorted(map(str, document))}" if tokens is None else f"{TOKENS!r} of {given}"
            raise ValueError(
                f"document {number} must be a row of tokens or a mapping with a row of tokens as {TOKENS!r}; got "
                f"{given}. Tokenize text first. {remedy}"
            )
        count = len(tokens)
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
        raise ValueError(
            f"every document needs at least one token, counted as an integer; document {number} has {count!r}. "
            "Remove empty documents first."
        )
    return int(count)


def fetch(dataset: Any, numbers: Sequence[int]) -> list[Any]:
    """Documents of a map-style dataset, all at once where it has `__getitems__`, as torch's DataLoader does.

    Raises:
        ValueError: (or ConnectionError, TimeoutError) the dataset raises an exception, which is the cause; the message
            names the document.
    """
    if not callable(getattr(dataset, "__getitems__", None)):
        return [_fetch_one(dataset, number) for number in numbers]
    try:
        documents = list(dataset.__getitems__(list(numbers)))
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


def _fetch_one(dataset: Any, number: int) -> Any:
    try:
        return dataset[number]
    except Exception as error:
        if number >= len(dataset):
            raise ValueError(
                f"document {number} can't be read: the dataset holds only {count(len(dataset), 'document')} now. It "
                "mustn't shrink after its documents were counted."
            ) from error
        raise unreadable(f"document {number}", error) from error


def unreadable(what: str, error: Exception) -> Exception:
    """The error for a document whose dataset or stream raises an exception.

    It is a ValueError. Only a connection that fails keeps its kind, because programs catch it to resume.
    """
    kind = next((each for each in (ConnectionError, TimeoutError) if isinstance(error, each)), ValueError)
    return kind(f"{what} can't be read: {type(error).__name__}: {error}".rstrip(": "))


def cut(document: Any, start: int, stop: int, tokens: int, number: int) -> Any:
    """Tokens start to stop of a document of `tokens` tokens, in all of its columns.

    Raises:
        ValueError: a column that isn't a row of one value per token; the message has the document's number.
    """
    is_mapping = isinstance(document, Mapping)
    columns = {repr(name): document[name] for name in document} if is_mapping else {}
    columns = columns or {f"a {type(document).__name__}": document}
    if whole := sorted(name for name, values in columns.items() if not _is_row(values, tokens)):
        raise ValueError(
            f"document {number} has {tokens} tokens and must be cut, but {', '.join(whole)} isn't a row of one value "
            "per token. Remove such columns (dataset.remove_columns), cut the document before packing, or leave out "
            "documents that are too long: overlong='drop'."
        )
    return {name: document[name][start:stop] for name in document} if is_mapping else document[start:stop]


def check_length_function(length: Any) -> None:
    """ValueError for a `length` that can't be called."""
    if length is not None and not callable(length):
        raise ValueError(
            f"length must be a function that returns the number of a document's tokens, or None; got {length!r:.100}."
        )


def _is_row(values: Any, tokens: int | None = None) -> bool:
    """Whether values can be sliced and hold one value per token, `tokens` of them; of a list only the first is read."""
    if isinstance(values, (str, bytes, Mapping)) or not (hasattr(values, "__len__") and hasattr(values, "__getitem__")):
        return False
    if isinstance(values, (list, tuple)):
        one_each = not values or not (isinstance(values[0], Sequence) or _dimensions(values[0], 0))
    else:
        one_each = _dimensions(values, 1) == 1
    return one_each and tokens in (None, len(values))


def _dimensions(values: Any, default: int) -> int:
    return values.ndim if hasattr(values, "ndim") else default


def is_iterable(values: Any) -> bool:
    """Whether values can be iterated over, and aren't text, a mapping, a class, or a single number."""
    others = (Mapping, str, bytes, type)
    return isinstance(values, Iterable) and not isinstance(values, others) and _dimensions(values, 1) > 0


def require_map_style(dataset: Any) -> None:
    """ValueError for a dataset that can't be indexed by document."""
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, type)
    if isinstance(dataset, (Mapping, str, bytes)) or not indexed or _dimensions(dataset, 1) == 0:
        remedy = "Pack iterables with pack_stream."
        if isinstance(dataset, Mapping) and any(hasattr(part, "column_names") for part in dataset.values()):
            remedy = f"Pass one of its datasets: {' or '.join(f'dataset[{name!r}]' for name in dataset)}."
        raise ValueError(
            f"the dataset must have a length and be indexed by document; got {type(dataset).__name__}. {remedy}"
        )

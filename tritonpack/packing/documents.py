"""Documents as datasets hold them: how many tokens they have, and pieces of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Length = Callable[[Any], int]
TOKENS = "input_ids"  # the column that tells how many tokens a document has


def document_length(document: Any) -> int:
    """The tokens of a mapping with "input_ids", or of a row of tokens itself: a list, an array or a tensor.

    Raises:
        ValueError: anything else.
    """
    tokens: Any = document.get(TOKENS) if isinstance(document, Mapping) else document
    if not _is_row(tokens):
        given = type(document).__name__
        if isinstance(document, Mapping):
            given = f"the keys {sorted(map(str, document))}" if tokens is None else f"{TOKENS!r} of {_kind(tokens)}"
        elif hasattr(document, "shape"):
            given = _kind(document)
        raise ValueError(
            f"must be a row of tokens or a mapping with one as {TOKENS!r}; got {given}. Tokenize text first; for "
            "documents of another form pass length=, a function that gives the number of their tokens."
        )
    return len(tokens)


def measure_lengths(dataset: Any, length: Length | None = None) -> NDArray[np.int64]:
    """The tokens of each document of a map-style dataset.

    For a `datasets.Dataset` without `length` they are read from the offsets that its table stores, without reading a
    token; otherwise from one document after the other.

    Args:
        dataset: anything with a length that is indexed by document.
        length: tokens of a document; default: those of its "input_ids", or its own.

    Returns:
        (documents,) int64.

    Raises:
        ValueError: a document that isn't one.
    """
    require_map_style(dataset)
    check_length_function(length)
    if length is None and hasattr(dataset, "with_format") and TOKENS in (getattr(dataset, "column_names", None) or ()):
        tables = dataset.select_columns(TOKENS).with_format("arrow").iter(batch_size=10_000)
        chunks = [chunk for table in tables for chunk in table.column(TOKENS).chunks]
        if all(hasattr(chunk, "value_lengths") and not chunk.null_count for chunk in chunks):
            parts = [chunk.value_lengths().to_numpy(zero_copy_only=False) for chunk in chunks]
            return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)
    lengths = np.empty(len(dataset), dtype=np.int64)
    for number in range(len(lengths)):
        lengths[number] = checked_length(dataset[number], number, length)
    return lengths


def checked_length(document: Any, number: int, length: Length | None) -> int:
    """The tokens of document `number`, at least one; ValueError otherwise."""
    try:
        tokens = document_length(document) if length is None else length(document)
    except ValueError as error:
        raise ValueError(f"document {number} {error}") from error
    if isinstance(tokens, bool) or not isinstance(tokens, (int, np.integer)) or tokens < 1:
        raise ValueError(
            f"every document needs at least one token, counted in whole numbers; document {number} has {tokens!r}. "
            "Remove empty documents first."
        )
    return int(tokens)


def fetch(dataset: Any, numbers: Sequence[int]) -> list[Any]:
    """Documents of a map-style dataset: all at once from one that allows it, as torch's DataLoader asks for them."""
    if callable(getattr(dataset, "__getitems__", None)):
        return list(dataset.__getitems__(list(numbers)))
    return [dataset[number] for number in numbers]


def cut(document: Any, start: int, stop: int, tokens: int, number: int) -> Any:
    """Tokens start to stop of a document, of every column alike.

    Args:
        document: a row of tokens, or a mapping each of whose values is a row of one value per token.
        start, stop: tokens.
        tokens: how many the document has.
        number: how errors call the document.

    Raises:
        ValueError: a document with a value that isn't one per token, since what a piece shall get of it is unknown.
    """
    if not isinstance(document, Mapping):
        if not _is_row(document, tokens):
            raise ValueError(
                f"document {number} has {tokens} tokens and must be cut, but a {type(document).__name__} can't be: it "
                "isn't a row of one value per token. Cut it before packing, or drop what is too long: overlong='drop'."
            )
        return document[start:stop]
    whole = sorted(str(key) for key, values in document.items() if not _is_row(values, tokens))
    if whole:
        raise ValueError(
            f"document {number} has {tokens} tokens and must be cut, but {', '.join(map(repr, whole))} isn't one value "
            "per token. Remove such columns first (dataset.remove_columns), or drop what is too long: overlong='drop'."
        )
    return {key: values[start:stop] for key, values in document.items()}


def check_length_function(length: Any) -> None:
    """ValueError for a `length` that can't be called."""
    if length is not None and not callable(length):
        raise ValueError(
            f"length must be a function that gives the number of a document's tokens, or None; got {length!r:.100}."
        )


def _is_row(values: Any, tokens: int | None = None) -> bool:
    """Whether it can be cut and has one value per token, `tokens` of them; of a list the first value is looked at."""
    if isinstance(values, (str, bytes, Mapping)) or not (hasattr(values, "__len__") and hasattr(values, "__getitem__")):
        return False
    if isinstance(values, (list, tuple)):
        one_each = not values or not (isinstance(values[0], Sequence) or _dimensions(values[0], 0))
    else:
        one_each = _dimensions(values, 1) == 1
    return one_each and tokens in (None, len(values))


def _dimensions(values: Any, default: int) -> int:
    return values.ndim if hasattr(values, "ndim") else default


def _kind(values: Any) -> str:
    return f"shape {tuple(values.shape)}" if hasattr(values, "shape") else type(values).__name__


def is_iterable(values: Any) -> bool:
    """Whether it yields items: no text, no mapping, no class, and no array or tensor of a single number."""
    others = (Mapping, str, bytes, type)
    return isinstance(values, Iterable) and not isinstance(values, others) and _dimensions(values, 1) > 0


def require_iterable(documents: Any) -> None:
    """ValueError for what can't be iterated over by document, such as one document or a mapping of columns."""
    if not is_iterable(documents):
        raise ValueError(
            f"documents must be an iterable of documents, each a row of tokens or a mapping with {TOKENS!r}; got "
            f"{type(documents).__name__}."
        )


def require_map_style(dataset: Any) -> None:
    """ValueError for what can't be indexed by document."""
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, type)
    if isinstance(dataset, (Mapping, str, bytes)) or not indexed or _dimensions(dataset, 1) == 0:
        raise ValueError(
            f"the dataset must have a length and be indexed by document; got {type(dataset).__name__}. Pack iterables "
            "with pack_stream."
        )

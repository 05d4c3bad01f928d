"""Measure and check lengths of documents, and truncate, split or drop documents that are longer than the capacity."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tritonpack.checks import check_choice

TOKENS = "input_ids"
MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
Overlong = Literal["error", "truncate", "split", "drop"]
POLICIES: tuple[str, ...] = get_args(Overlong)


@dataclass(frozen=True)
class OverlongReport:
    """The treatment of documents (or units) that are longer than the capacity.

    `documents` counts them, `tokens_lost` their tokens that were cut off or dropped, `pieces` what was made of them.
    """

    policy: str
    documents: int = 0
    tokens_lost: int = 0
    pieces: int = 0
    noun: str = "document"

    def __str__(self) -> str:
        if not self.documents:
            return f"every {self.noun} fits"
        lost = count(self.tokens_lost, "token")
        split = f"split into {count(self.pieces, 'piece')}: no token lost"
        done = {"truncate": f"truncated: {lost} cut off", "split": split, "drop": f"dropped: {lost} lost"}[self.policy]
        return f"{count(self.documents, self.noun)} longer than the capacity {done}"


@dataclass(frozen=True, eq=False)
class FittedLengths:
    """Lengths of pieces that fit, and the document of each piece.

    >>> fitted = fit_lengths([5, 12, 3], capacity=5, overlong="split")
    >>> fitted.lengths.tolist(), fitted.documents.tolist(), fitted.starts.tolist()
    ([5, 5, 5, 2, 3], [0, 1, 1, 1, 2], [0, 0, 5, 10, 0])
    >>> print(fitted.report)
    1 document longer than the capacity split into 3 pieces: no token lost

    Attributes:
        lengths: (pieces,) int32, from 1 to the capacity.
        documents: (pieces,) int32, ascending, the document of each piece; None if piece i is document i.
        starts: (pieces,) int64, the first token of each piece in its document; None if all are 0.
    """

    lengths: NDArray[np.int32]
    documents: NDArray[np.int32] | None
    starts: NDArray[np.int64] | None
    report: OverlongReport


def count(number: Any, noun: str) -> str:
    """A number with its noun: "1 layer", "2 layers", "1,024 layers"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def check_integer(value: Any, name: str, least: int = 1, most: int | None = MAX_INT32, meaning: str = "") -> int:
    """The value as an int; ValueError unless it is from `least` to `most` (None: any), which has this `meaning`."""
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be an integer {allowed}{meaning and ', ' + meaning}; got {value!r:.100}.")
    return int(value)


def check_limit(value: Any, name: str) -> int:
    """The value as an int, at least 1; the largest int32 for None, which sets no limit."""
    return MAX_INT32 if value is None else check_integer(value, name)


def whole_lengths(lengths: Sequence[int] | NDArray[Any]) -> NDArray[Any]:
    """Lengths as an array of positive integers, of any integer dtype; ValueError if they aren't."""
    rule = "lengths must be a row of integers, the tokens of each document"
    try:
        array = np.asarray(lengths)
    except ValueError:  # rows of different lengths
        raise ValueError(
            f"{rule}; got {lengths!r:.100}. Count the tokens of documents first: [len(ids) for ids in documents]."
        ) from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        remedy = " If a length is missing (NaN), measure it or remove its document." if array.dtype.kind == "f" else ""
        remedy = " Of Units pass units.tokens." if hasattr(lengths, "squares") else remedy
        raise ValueError(f"{rule}; got {array.dtype} of shape {array.shape}.{remedy}")
    if not array.size:
        raise ValueError("lengths is empty: there is no document to pack. Pass the tokens of at least one document.")
    if array.size > MAX_INT32:
        raise ValueError(f"at most {MAX_INT32} documents are packed at once; got {array.size}. Pack them in parts.")
    if array.min() < 1 or array.max() > MAX_INT64:
        first = int(np.argmax((array < 1) | (array > MAX_INT64)))
        raise ValueError(
            f"every document needs at least one token and at most 2**63 - 1; document {first} has length "
            f"{array[first]}. Remove empty documents first."
        )
    return array


def fit_lengths(
    lengths: Sequence[int] | NDArray[Any], capacity: int, overlong: Overlong = "error", *, name: str = "capacity",
    remedy: str = "say what to do with them: overlong='truncate', 'split' or 'drop'", noun: str = "document",
) -> FittedLengths:  # fmt: skip
    """Check lengths, and truncate, split or drop the documents that are longer than the capacity.

    Args:
        lengths: (documents,) integers of at least 1, at least one of them.
        capacity, overlong: see `pack`.
        name, remedy, noun: words for messages: for the capacity, for what to do, for a document.

    Raises:
        ValueError: bad lengths or capacity, a document that is too long under "error", an unknown `overlong`, no
            document left after dropping.
    """
    check_choice(overlong, POLICIES, "overlong")
    capacity = check_integer(capacity, name)
    array = whole_lengths(lengths)
    longest = int(array.max())
    if longest <= capacity:
        # A copy, because samplers keep it, and because numba compiles every loop again for a read-only array.
        return FittedLengths(np.array(array, dtype=np.int32), None, None, OverlongReport(overlong, noun=noun))

    above = array > capacity
    too_long, room = int(above.sum()), count(capacity, "token")
    if overlong == "error":
        first, verb = int(np.argmax(above)), "is" if too_long == 1 else "are"
        raise ValueError(
            f"{too_long:,} of {count(array.size, noun)} {verb} longer than the {name} of {room} (the first: {noun} "
            f"{first}, {count(array[first], 'token')}). Raise the {name} to at least {longest:,}, or {remedy}."
        )
    if overlong == "drop" and too_long == array.size:
        raise ValueError(f"overlong='drop' leaves nothing: no {noun} fits into the {name} of {room}. Raise the {name}.")
    wide = array.astype(np.int64)
    pieces_of: dict[str, Any] = {"truncate": 1, "split": -(-wide // capacity), "drop": 0}
    pieces = np.where(above, pieces_of[overlong], 1)
    total = int(pieces.sum())
    if total > MAX_INT32:
        raise ValueError(f"splitting makes {total} pieces; at most {MAX_INT32} are packed at once. Pack in parts.")
    documents = np.repeat(np.arange(array.size, dtype=np.int32), pieces)
    first_piece = np.cumsum(pieces) - pieces
    starts = (np.arange(total) - first_piece[documents]) * capacity
    tokens = np.minimum(wide[documents] - starts, capacity)
    lost = int(wide.sum() - tokens.sum())
    return FittedLengths(
        tokens.astype(np.int32),
        None if overlong == "truncate" else documents,
        starts if overlong == "split" else None,
        OverlongReport(overlong, too_long, lost, int(pieces[above].sum()), noun),
    )


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


def is_table(dataset: Any) -> bool:
    """Return whether a dataset is a `datasets.Dataset` that reads its documents from a table, not from a transform."""
    module = sys.modules.get("datasets")
    return module is not None and isinstance(dataset, module.Dataset) and dataset.format["type"] != "custom"


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
            f"document {number} has {tokens} tokens and must be cut, but {', '.join(map(repr, whole))} isn't a row of "
            "one value per token. Remove such columns (dataset.remove_columns), or pass overlong='drop'."
        )
    return {name: document[name][start:stop] for name in document}


def _is_row(values: Any) -> bool:
    """Return whether values can be sliced and hold one value per token; of a list only the first is read."""
    if isinstance(values, (list, tuple)):
        return not values or not (isinstance(values[0], Sequence) or getattr(values[0], "ndim", None))
    others = isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__getitem__")
    return not others and hasattr(values, "__len__") and getattr(values, "ndim", 1) == 1

"""What packers and samplers take: lengths that are whole numbers of tokens, each of which fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tritonpack.checks import check_choice

MAX_INT32 = 2**31 - 1
Overlong = Literal["error", "truncate", "split", "drop"]
POLICIES: tuple[str, ...] = get_args(Overlong)


@dataclass(frozen=True)
class OverlongReport:
    """What became of the documents that are longer than the capacity.

    Attributes:
        policy: what was asked for, one of "error", "truncate", "split", "drop".
        documents: how many documents are longer than the capacity.
        tokens_lost: the tokens that were cut off or went with dropped documents; 0 after splitting.
        pieces: how many pieces these documents became: 0 after dropping, one each after truncating.
    """

    policy: str
    documents: int = 0
    tokens_lost: int = 0
    pieces: int = 0

    def __str__(self) -> str:
        if not self.documents:
            return "every document fits"
        done = {
            "truncate": f"truncated: {self.tokens_lost:,} tokens cut off",
            "split": f"split into {self.pieces:,} pieces: no token lost",
            "drop": f"dropped: {self.tokens_lost:,} tokens lost",
        }[self.policy]
        noun = "document" if self.documents == 1 else "documents"
        return f"{self.documents:,} {noun} longer than the capacity {done}"


@dataclass(frozen=True, eq=False)
class FittedLengths:
    """Pieces that fit, and the documents they are from.

    Documents of 5, 12 and 3 tokens where 5 fit:

    >>> fitted = fit_lengths([5, 12, 3], capacity=5, overlong="split")
    >>> fitted.lengths.tolist(), fitted.documents.tolist(), fitted.starts.tolist()
    ([5, 5, 5, 2, 3], [0, 1, 1, 1, 2], [0, 0, 5, 10, 0])
    >>> str(fitted.report)
    '1 document longer than the capacity split into 3 pieces: no token lost'

    Attributes:
        lengths: (pieces,) int32, tokens of each piece, from 1 to the capacity.
        documents: (pieces,) int32, ascending, the document each piece is from; None where piece i is document i.
        starts: (pieces,) int64, the piece's first token within its document; None where each begins its document.
        report: what was done.
    """

    lengths: NDArray[np.int32]
    documents: NDArray[np.int32] | None
    starts: NDArray[np.int64] | None
    report: OverlongReport


def positive_integer(value: Any, name: str, highest: int = MAX_INT32) -> int:
    """The value as an int from 1 to `highest`; ValueError otherwise."""
    if not _is_integer(value) or not 1 <= value <= highest:
        raise ValueError(f"{name} must be an integer from 1 to {highest}; got {value!r}.")
    return int(value)


def token_id(value: Any, name: str) -> int:
    """The value as an int from 0 to 2**31 - 1; ValueError otherwise."""
    if not _is_integer(value) or not 0 <= value <= MAX_INT32:
        raise ValueError(f"{name} must be an integer from 0 to {MAX_INT32}; got {value!r}.")
    return int(value)


def natural_number(value: Any, name: str) -> int:
    """The value as an int of at least 0, such as a seed or an epoch; ValueError otherwise."""
    if not _is_integer(value) or value < 0:
        raise ValueError(f"{name} must be an integer of at least 0; got {value!r}.")
    return int(value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_rows(items: Any, offsets: Any) -> None:
    """ValueError unless `items[offsets[i] : offsets[i + 1]]` are the documents of row i, for all rows (CSR form)."""
    for values, name in ((items, "items"), (offsets, "offsets")):
        if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iu":
            raise ValueError(f"{name} must be a one-dimensional array of integers; got {values!r:.100}.")
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(items) or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(
            f"offsets must begin with 0, never decrease and end with the number of items, {len(items)}; got "
            f"{offsets!r:.100}."
        )
    if len(items) and items.min() < 0:
        raise ValueError(f"items must be numbers of documents, from 0; got {items.min()}.")


def whole_lengths(lengths: Sequence[int] | NDArray[Any]) -> NDArray[Any]:
    """Lengths as an array of integers of any size, none of them below 1.

    Raises:
        ValueError: no lengths, lengths that aren't a row of integers, a document without tokens.
    """
    try:
        array = np.asarray(lengths)
    except ValueError:  # rows of several lengths
        raise ValueError(
            f"lengths must be a row of integers, the tokens of each document; got {lengths!r:.100}. Count the "
            "tokens of documents first: [len(ids) for ids in documents]."
        ) from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        remedy = ""
        if array.ndim == 1 and array.dtype.kind == "f":
            remedy = " Count tokens in whole numbers; a missing length (NaN) must be measured or its document removed."
        raise ValueError(
            f"lengths must be a row of integers, the tokens of each document; got {array.dtype} of shape {array.shape}."
            + remedy
        )
    if not array.size:
        raise ValueError("lengths is empty: there is no document to pack. Pass the tokens of at least one document.")
    if array.size > MAX_INT32:
        raise ValueError(f"at most {MAX_INT32} documents are packed at once; got {array.size}. Pack them in parts.")
    if array.min() < 1:
        first = int(np.argmax(array < 1))
        raise ValueError(
            f"every document needs at least one token; document {first} has length {array[first]}. Remove empty "
            "documents first."
        )
    return array


def fit_lengths(
    lengths: Sequence[int] | NDArray[Any], capacity: int, overlong: Overlong = "error", *, name: str = "capacity"
) -> FittedLengths:
    """Check lengths, and do with those above the capacity what the caller chose.

    Args:
        lengths: (documents,) integers, at least one, each at least 1.
        capacity: the tokens that fit, at least 1.
        overlong: "error" refuses; "truncate" keeps a document's first `capacity` tokens; "split" makes pieces of
            `capacity` tokens and a rest; "drop" leaves the document out.
        name: what the caller's user calls the capacity.

    Raises:
        ValueError: bad lengths or capacity, an overlong document under "error", an unknown policy, no document left.
    """
    check_choice(overlong, POLICIES, "overlong")
    capacity = positive_integer(capacity, name)
    array = whole_lengths(lengths)
    longest = int(array.max())
    if longest <= capacity:
        # A copy: samplers keep it, and for an array that can't be written numba would compile every loop a second time.
        return FittedLengths(np.array(array, dtype=np.int32), None, None, OverlongReport(overlong))

    above = array > capacity
    count = int(above.sum())
    if overlong == "error":
        choices = "say what to do with them: overlong='truncate', 'split' or 'drop'."
        raise ValueError(f"{_overlong(array, capacity, name)}, or {choices}")
    # Sums of lengths of any integer type, far from wrapping: the documents themselves lie in memory somewhere.
    excess = int(np.where(above, array, 0).sum(dtype=np.uint64))
    if overlong == "truncate":
        report = OverlongReport(overlong, count, excess - count * capacity, count)
        return FittedLengths(np.minimum(array, capacity).astype(np.int32), None, None, report)
    if overlong == "drop":
        kept = np.flatnonzero(~above).astype(np.int32)
        if not kept.size:
            raise ValueError(
                f"overlong='drop' leaves nothing: all {count} documents are longer than the {name} of {capacity} "
                "tokens. Raise it, or truncate or split them."
            )
        return FittedLengths(array[kept].astype(np.int32), kept, None, OverlongReport(overlong, count, excess, 0))

    wide = array.astype(np.int64)
    pieces = -(-wide // capacity)
    total = int(pieces.sum())
    if total > MAX_INT32:
        raise ValueError(f"splitting makes {total} pieces; at most {MAX_INT32} are packed at once. Pack in parts.")
    documents = np.repeat(np.arange(array.size, dtype=np.int32), pieces)
    first_piece = np.cumsum(pieces) - pieces
    starts = (np.arange(total, dtype=np.int64) - first_piece[documents]) * capacity
    lengths_of_pieces = np.minimum(wide[documents] - starts, capacity).astype(np.int32)
    report = OverlongReport(overlong, count, 0, int(pieces[above].sum()))
    return FittedLengths(lengths_of_pieces, documents, starts, report)


def _overlong(array: NDArray[Any], capacity: int, name: str) -> str:
    """Which of the lengths are above the capacity, and what capacity would hold them."""
    above = array > capacity
    first = int(np.argmax(above))
    return (
        f"{int(above.sum())} of {array.size} documents are longer than the {name} of {capacity} tokens (the first: "
        f"document {first}, {array[first]} tokens). Raise the {name} to at least {int(array.max())}"
    )


def fit_for_sampler(
    lengths: Sequence[int] | NDArray[Any], capacity: int, overlong: Literal["error", "drop"], name: str
) -> FittedLengths:
    """As `fit_lengths`, for a sampler, which yields the numbers of documents alone and can't cut them.

    Raises:
        ValueError: as there, and for the policies that cut, with what takes their place.
    """
    cutting = (
        f"A sampler names documents and can't cut them. To truncate, pass lengths=numpy.minimum(lengths, {capacity}) "
        f"and load with PackingCollator(max_document_length={capacity}); to split, use pack_dataset, which cuts as it "
        "loads."
    )
    if not isinstance(overlong, str) or overlong not in ("error", "drop"):
        raise ValueError(f"overlong must be 'error' or 'drop'; got {overlong!r:.100}. {cutting}")
    if overlong == "error":
        array = whole_lengths(lengths)
        if array.max() > capacity:
            raise ValueError(
                f"{_overlong(array, capacity, name)}, or pass overlong='drop', which leaves them out. {cutting}"
            )
    return fit_lengths(lengths, capacity, overlong, name=name)

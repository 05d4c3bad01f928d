"""Tables of documents: which columns rows keep, checks that name the document, and pieces that fit into a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute, types

from tritonpack.packing.columns import BOUNDARIES, LABELS, LEARNED, LEFT_OUT, MADE, PER_TOKEN, combine_labels
from tritonpack.packing.documents import TOKENS
from tritonpack.packing.lengths import count

MASK = "attention_mask"
_MASKS = (*LEARNED, "special_tokens_mask")
_KNOWN = (TOKENS, *LABELS, *PER_TOKEN)
Place = Callable[[int], str]  # a document of a part, counted from 0 -> where it is, for messages


@dataclass(frozen=True)
class Columns:
    """The columns that are read, and those that rows have.

    Attributes:
        read: names in the source.
        kept: name in rows -> name in the source.
        learned: masks from which the labels are made, because the source has no labels; rows don't keep the masks.
    """

    read: tuple[str, ...]
    kept: dict[str, str]
    learned: tuple[str, ...]

    @property
    def written(self) -> tuple[str, ...]:
        """The columns of rows that hold values of the source."""
        return (*self.kept, "labels") if self.learned else tuple(self.kept)

    @property
    def token_bytes(self) -> int:
        """About the bytes of a token in a row."""
        return 4 + sum(1 if name in _MASKS else 4 for name in self.written)


def choose_columns(names: Sequence[str], asked: Sequence[str] | None, source: str) -> Columns:
    """Choose the columns that rows keep: those asked for, or all, which must have one value per token.

    Raises:
        ValueError: no input_ids, several columns of labels, a column asked for that isn't there, or, if none is asked
            for, a column that rows can't hold.
    """
    listed = _quote(names) or "none"
    if TOKENS not in names:
        raise ValueError(f"{source} has no column {TOKENS!r}; it has {listed}. Tokenize the text first.")
    if asked is None:
        unknown = [name for name in names if name not in (*_KNOWN, MASK, *LEFT_OUT)]
        if unknown:
            packed = " Rows of several documents are packed already." if BOUNDARIES[0] in unknown else ""
            keep = ",".join(name for name in names if name in _KNOWN)
            raise ValueError(
                f"{source} has the columns {_quote(unknown)}, which may not hold one value per token.{packed} Name the "
                f"columns that rows keep, such as columns={keep}, or remove the others (dataset.remove_columns)."
            )
        asked = [name for name in names if name in _KNOWN]
    if absent := [name for name in asked if name not in names]:
        raise ValueError(f"{source} has no column {_quote(absent)}, which columns names; it has {listed}.")
    if made := [name for name in asked if name in (*MADE, *BOUNDARIES, MASK, *LEFT_OUT)]:
        raise ValueError(f"columns names {_quote(made)}, which rows don't keep; leave them out.")
    if TOKENS not in asked:
        raise ValueError(f"columns names {_quote(asked)} without {TOKENS!r}; add it.")
    if len(set(asked)) < len(asked):
        raise ValueError(f"columns names {_quote(asked)}, one of them twice; name each once.")
    labels = [name for name in asked if name in LABELS]
    if len(labels) > 1:
        raise ValueError(f"{source} has {_quote(labels)}, which all hold labels; name one of them in columns.")
    learned = () if labels else tuple(name for name in asked if name in LEARNED)
    kept = {"labels" if name in LABELS else name: name for name in asked if name not in learned}
    checked = [name for name in (MASK, *LEFT_OUT) if name in names]
    return Columns((*asked, *checked), kept, learned)


def read_documents(table: pa.Table, columns: Columns, place: Place) -> pa.Table:
    """The columns of rows, one list per document, checked: `input_ids` and labels int32, masks int8, others as given.

    Args:
        table: documents with the columns `columns.read`.
        place: for messages.

    Raises:
        ValueError: a document that is missing or empty, a column that isn't a row of integers (or of values, if it
            isn't one that PackingCollator knows), has another number of values than tokens, or holds a value that isn't
            allowed; padding; labels that contradict a mask. The message has the place of the document and the column.
    """
    lists = {name: _lists(table.column(name), name, place) for name in columns.read if name not in LEFT_OUT}
    lengths = np.diff(_offsets(lists[TOKENS]))
    for name in set(columns.read).intersection(LEFT_OUT):
        given = table.column(name).to_pylist()
        if wrong := [number for number, length in enumerate(given) if length != lengths[number]]:
            first = wrong[0]
            raise ValueError(
                f"{place(first)}: {TOKENS} has {count(lengths[first], 'token')}, but {given[first]!r} by the column "
                f"{name!r}; measure again, or remove the column."
            )
    if len(empty := np.flatnonzero(lengths == 0)):
        raise ValueError(f"{place(empty[0])}: {TOKENS} is empty; every document needs a token. Filter it out first.")
    for name, values in lists.items():
        here = np.diff(_offsets(values))
        if len(bad := np.flatnonzero(here != lengths)):
            first = bad[0]
            raise ValueError(
                f"{place(first)}: {name} has {count(here[first], 'value')} for {count(lengths[first], 'token')}; give "
                "every token one."
            )
        if name in (*_KNOWN, MASK):
            lists[name] = _integers(values, name, place)
    if MASK in lists:
        _require(lists[MASK], compute.equal(lists[MASK].values, 1), place, f"{MASK} isn't 1 for each token; remove the "
                 "padding: keep only the tokens with a mask of 1")  # fmt: skip
    for name in LEARNED:
        if name in lists:
            allowed = compute.less_equal(lists[name].values, 1)
            _require(lists[name], allowed, place, f"{name} holds other values than 0 and 1")
    if masks := {name: lists[name].values.to_numpy() for name in LEARNED if name in lists}:
        given = columns.kept.get("labels")
        ids, labels = lists[TOKENS].values.to_numpy(), lists[given or TOKENS].values.to_numpy()
        combined = combine_labels(ids, labels, masks, lengths, is_causal=True, place=place)
        lists[given or "labels"] = _from_offsets(_offsets(lists[TOKENS]), pa.array(combined))
    found = {name: lists[columns.kept.get(name, name)] for name in columns.written}
    return pa.table(found)


def lengths_of(documents: pa.Table) -> NDArray[np.int32]:
    """(documents,) int32, the tokens of each document of `read_documents`."""
    return np.diff(_offsets(documents.column(TOKENS).chunk(0))).astype(np.int32)


def pieces_of(documents: pa.Table, capacity: int) -> tuple[pa.Table, NDArray[np.int64]]:
    """Documents cut into pieces of `capacity` tokens and a rest; short ones are one piece.

    Returns:
        The pieces, and (documents,) int64, the first piece of each document.
    """
    lengths = lengths_of(documents).astype(np.int64)
    counts = -(-lengths // capacity)
    first = np.cumsum(counts) - counts
    if counts.max(initial=1) == 1:
        return documents, first
    document = np.repeat(np.arange(len(lengths)), counts)
    starts = (np.cumsum(lengths) - lengths)[document] + (np.arange(len(document)) - first[document]) * capacity
    offsets = np.append(starts, lengths.sum())
    return with_offsets(documents, offsets), first


def with_offsets(table: pa.Table, offsets: NDArray[np.int64]) -> pa.Table:
    """The same values in other lists, which begin at `offsets`."""
    return pa.table(
        {name: _from_offsets(offsets, table.column(name).combine_chunks().flatten()) for name in table.column_names}
    )


def _from_offsets(offsets: NDArray[np.int64], values: pa.Array) -> pa.ListArray:
    assert offsets[-1] == len(values) < 2**31
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values)


def _offsets(lists: pa.ListArray) -> NDArray[np.int64]:
    return np.asarray(lists.offsets).astype(np.int64)


def _lists(column: pa.ChunkedArray, name: str, place: Place) -> pa.ListArray:
    """A column as lists that begin at 0, without missing documents or values."""
    kind = column.type
    if types.is_large_list(kind) or types.is_fixed_size_list(kind):
        column = column.cast(pa.list_(kind.value_type))
    elif not types.is_list(kind):
        raise ValueError(f"{place(0)}: {name} holds {kind}, not a row of one value per token. Tokenize text first, and "
                         "leave out columns with one value per document.")  # fmt: skip
    lists = column.combine_chunks()
    if isinstance(lists, pa.ChunkedArray):  # of no or of several chunks, by version
        lists = pa.concat_arrays(lists.chunks) if lists.num_chunks else pa.array([], lists.type)
    if lists.null_count:
        missing = int(np.flatnonzero(np.asarray(lists.is_null()))[0])
        raise ValueError(f"{place(missing)}: {name} is missing (null); remove the document.")
    offsets = _offsets(lists)
    lists = _from_offsets(offsets - offsets[0], lists.flatten())
    if lists.values.null_count:
        _require(lists, lists.values.is_valid(), place, f"{name} has a missing value (null)")
    return lists


def _integers(lists: pa.ListArray, name: str, place: Place) -> pa.ListArray:
    """A column as int32, or int8 for a mask; ValueError for a value that isn't an integer in range."""
    values = lists.values
    kind = values.type
    if not (types.is_integer(kind) or (types.is_boolean(kind) and name not in (TOKENS, *LABELS))):
        if types.is_floating(kind):
            _require(lists, compute.equal(values, compute.floor(values)), place, f"{name} holds more than integers")
        if len(values):
            raise ValueError(f"{place(0)}: {name} holds {kind}, not integers. Tokenize again, or convert the column.")
        values = pa.array([], pa.int32())
    wanted = pa.int8() if name in (*_MASKS, MASK) else pa.int32()
    if not types.is_boolean(values.type):
        if name not in LABELS:
            allowed = compute.greater_equal(values, 0)
            _require(lists, allowed, place, f"{name} holds a number below 0; only labels may be negative")
        top = 2 ** (wanted.bit_width - 1) - 1
        if not pa.types.is_signed_integer(values.type) or values.type.bit_width > wanted.bit_width:
            inside = compute.less_equal(values, top)
            _require(lists, inside, place, f"{name} holds a number above {top}")
            if name in LABELS and types.is_signed_integer(values.type):
                _require(lists, compute.greater_equal(values, -top), place, f"{name} holds a number below {-top}")
    return _from_offsets(_offsets(lists), values.cast(wanted))


def _require(lists: pa.ListArray, allowed: pa.BooleanArray, place: Place, complaint: str) -> None:
    """ValueError with the complaint about the first document that has a value that isn't allowed."""
    if compute.all(allowed, min_count=0).as_py():
        return
    token = int(np.flatnonzero(~np.asarray(allowed))[0])
    document = int(np.searchsorted(_offsets(lists), token, side="right")) - 1
    where = token - int(_offsets(lists)[document])
    value = lists.values[token].as_py()
    raise ValueError(f"{place(document)}: {complaint}; got {value!r} at position {where}.")


def _quote(names: Sequence[Any]) -> str:
    return ", ".join(map(repr, names))

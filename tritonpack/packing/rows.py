"""Rows of a `datasets.Dataset`: its `map` cuts documents into pieces, then joins them; its cache holds what is done."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets.fingerprint import Hasher
from numpy.typing import NDArray
from pyarrow import compute, types

from tritonpack import __version__
from tritonpack.packing.bins import Algorithm, Packing, pack
from tritonpack.packing.columns import (
    LABELS,
    LEARNED,
    LEFT_OUT,
    MADE,
    PER_TOKEN,
    POSITIONS,
    SEQ_LENGTHS,
    TOKENS,
    combine_labels,
    read_feature,
)
from tritonpack.packing.lengths import Overlong, check_integer, count

_MASK = "attention_mask"
_INT8 = (_MASK, "special_tokens_mask", *LEARNED)
_KNOWN = (TOKENS, *LABELS, *PER_TOKEN)
_LENGTH = "document_tokens"  # of a first piece: the tokens of its document; of the others 0
_BATCH_BYTES = 16 * 2**20  # of the documents that are checked at a time, and of a column of the rows that are joined
Place = Callable[[int], str]  # the number of a document -> where it is, for messages


def packed_dataset(
    dataset: Any,
    capacity: int,
    *,
    overlong: Overlong,
    algorithm: Algorithm,
    max_items: int | None,
    columns: Sequence[str] | None,
    jobs: int,
    folder: str | os.PathLike[str] | None = None,
    place: Place = str,
) -> tuple[Any, Packing]:
    """A `datasets.Dataset` of rows, one for each bin, with the format of the given one; and the packing.

    See `pack_dataset`. `folder` holds the files of the cache; None: the folder of the dataset's files, if it has any.
    """
    capacity, jobs = check_integer(capacity, "capacity"), check_integer(jobs, "jobs")
    pack([1], 1, overlong=overlong, algorithm=algorithm, max_items=max_items)  # checks options before documents
    if not len(dataset):
        raise ValueError("the dataset holds no document.")
    read, kept = choose_columns(dataset.column_names, columns)
    if folder is None and dataset.cache_files:
        folder = os.path.dirname(dataset.cache_files[0]["filename"])

    def mapped(source: Any, function: Any, batch: int, desc: str, *key: Any) -> Any:
        name = Hasher.hash(repr([dataset._fingerprint, read, capacity, __version__, *key]))
        environment = os.environ
        try:
            return source.with_format("arrow").map(
                function, with_indices=True, batched=True, batch_size=batch, remove_columns=source.column_names,
                num_proc=None if jobs == 1 else min(jobs, len(source)), new_fingerprint=name, desc=desc,
                cache_file_name=None if folder is None else os.path.join(folder, f"cache-{name}.arrow"),
            )  # fmt: skip
        finally:
            os.environ = environment  # noqa: B003 (with processes, `map` leaves a copy in its place)

    each = max(1, dataset.data.nbytes // max(1, dataset.data.num_rows))
    check = partial(_pieces, read=read, kept=kept, capacity=capacity, place=place)
    batch = min(10_000, max(1, _BATCH_BYTES // each))
    pieces = mapped(dataset, check, batch, "Checking documents").with_format("arrow")
    lengths = np.concatenate([table[_LENGTH].to_numpy() for table in pieces.select_columns(_LENGTH).iter(100_000)])
    lengths = lengths[lengths > 0]
    try:
        packing = pack(lengths, capacity, algorithm=algorithm, max_items=max_items, overlong=overlong)
    except ValueError as error:  # documents that are too long
        longest = int(lengths.argmax())
        tokens = count(lengths[longest], "token")
        raise ValueError(f"{error} The longest is document {place(longest)}: {tokens}.") from error
    counts = -(-lengths // capacity)
    entries = (np.cumsum(counts) - counts)[packing.items] + packing.starts // capacity
    join = partial(_rows, pieces=pieces, entries=entries, offsets=packing.offsets, capacity=capacity)
    bins = datasets.Dataset.from_dict({"bin": np.arange(packing.num_bins)})
    batch = max(1, _BATCH_BYTES // 4 // capacity)
    rows = mapped(bins, join, batch, "Joining rows", overlong, algorithm, max_items)
    rows.info.description = f"{packing!r}. {packing.report}."
    return rows.with_format(dataset.format["type"], **dataset.format["format_kwargs"]), packing


def choose_columns(names: Sequence[str], asked: Sequence[str] | None) -> tuple[list[str], dict[str, str]]:
    """The columns that are read; and name in rows -> name in the documents, without masks that become labels."""
    if isinstance(asked, str) or not all(isinstance(name, str) for name in asked or ()):
        raise ValueError(f"columns must be a list of names, such as ['input_ids', 'labels']; got {asked!r:.100}.")
    listed = ", ".join(map(repr, names))
    if TOKENS not in names:
        raise ValueError(f"the dataset has no column {TOKENS!r}; it has {listed or 'none'}. Tokenize the text first.")
    if asked is None:
        asked = [name for name in names if name in _KNOWN]
        if unknown := [name for name in names if name not in (*_KNOWN, _MASK, *LEFT_OUT)]:
            packed = " Rows of several documents are packed already." if SEQ_LENGTHS in unknown else ""
            raise ValueError(
                f"the dataset has the columns {', '.join(map(repr, unknown))}, which may not hold one value per token."
                f"{packed} Name the columns that rows keep, such as columns={','.join(asked)}, or remove the others "
                "(dataset.remove_columns)."
            )
    labels = [name for name in asked if name in LABELS]
    if TOKENS not in asked or len(set(asked)) < len(asked) or len(labels) > 1:
        raise ValueError(f"columns are {', '.join(asked)}; name {TOKENS}, at most one of labels, and each column once.")
    if wrong := [name for name in asked if name not in names or name in (*MADE, SEQ_LENGTHS, _MASK, *LEFT_OUT)]:
        raise ValueError(
            f"columns names {wrong[0]!r}, which isn't there, or which rows don't keep; there are {listed}."
        )
    kept = {"labels" if name in LABELS else name: name for name in asked if labels or name not in LEARNED}
    return [*asked, *(name for name in names if name == _MASK)], kept


def _pieces(
    table: pa.Table, numbers: list[int], read: list[str], kept: dict[str, str], capacity: int, place: Place
) -> pa.Table:
    """Documents checked and cut into pieces of `capacity` tokens and a rest, with the column `_LENGTH`."""
    table = table.select(read)
    where = f"document {place(numbers[0])}, or a document after it,"
    try:
        table.validate(full=True)  # Arrow doesn't check offsets when it reads
    except pa.ArrowException as error:
        raise ValueError(f"{where} can't be read: {' '.join(str(error).split())}. Write the file again.") from error
    try:
        values, lengths = _checked(table, kept)
    except (pa.ArrowException, ValueError) as error:
        own = [name for name in read if name not in (*_KNOWN, _MASK)]
        for at, number in enumerate(numbers):  # which document it is, in the words of PackingCollator
            one = table.slice(at, 1)
            read_feature(one.to_pylist()[0], place(number), per_token=own)
            try:
                _checked(one, kept)
            except (pa.ArrowException, ValueError) as wrong:
                raise ValueError(f"document {place(number)} {wrong}") from wrong
        raise ValueError(f"{where} {error}") from error
    counts = -(-lengths // capacity)
    first = np.cumsum(counts) - counts
    document = np.repeat(np.arange(len(lengths)), counts)
    part = np.arange(len(document)) - first[document]
    starts = np.append((np.cumsum(lengths) - lengths)[document] + part * capacity, lengths.sum())
    pieces = {name: _lists(starts, column) for name, column in values.items()}
    return pa.table(pieces | {_LENGTH: np.where(part == 0, lengths[document], 0)})


def _checked(table: pa.Table, kept: dict[str, str]) -> tuple[dict[str, Any], NDArray[np.int64]]:
    """The columns of rows as the values of all documents, end to end, and the lengths of the documents.

    Raises:
        ValueError, pyarrow.ArrowException: a document can't be packed; the message doesn't say which.
    """
    values: dict[str, Any] = {}
    lengths = compute.list_value_length(table[TOKENS]).to_numpy()
    for name in table.column_names:
        column = table[name]
        here = compute.list_value_length(column)
        flat = pa.concat_arrays([chunk.flatten() for chunk in column.chunks])
        if here.null_count or flat.null_count or not lengths.all() or not np.array_equal(here, lengths):
            raise ValueError(f"has an empty or missing value in {name}, or not one for each token.")
        if name in (*_KNOWN, _MASK):
            if not types.is_integer(flat.type) and not (types.is_boolean(flat.type) and name in (*PER_TOKEN, _MASK)):
                raise ValueError(f"has {flat.type} as {name}, not integers; convert the column.")
            flat = flat.cast(pa.int8() if name in _INT8 else pa.int32()).to_numpy()
            least = 1 if name == _MASK else -(2**31) if name in LABELS else 0
            if flat.min() < least or (name in (_MASK, *LEARNED) and flat.max() > 1):
                raise ValueError(f"has a value in {name} that isn't allowed.")
        values[name] = flat
    found = {name: values[given] for name, given in kept.items()}
    if masks := {name: values[name] for name in LEARNED if name in values}:
        labels = values[kept.get("labels", TOKENS)]
        found["labels"] = combine_labels(values[TOKENS], labels, masks, lengths, is_causal=True)
    return found, lengths.astype(np.int64)


def _rows(
    table: pa.Table, numbers: list[int], pieces: Any, entries: NDArray[Any], offsets: NDArray[Any], capacity: int
) -> pa.Table:
    """The rows of consecutive bins: their pieces end to end, with the columns that tell documents apart."""
    edges = offsets[numbers[0] : numbers[-1] + 2]
    found = pieces[entries[edges[0] : edges[-1]]].drop_columns([_LENGTH]).combine_chunks()
    lengths = compute.list_value_length(found[TOKENS]).to_numpy()
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    rows = edges - edges[0]
    positions = np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1].astype(np.int32), lengths)
    lists = {name: _lists(starts[rows], found[name].chunk(0).flatten()) for name in found.column_names}
    lists[POSITIONS] = _lists(starts[rows], positions.astype(np.uint16 if capacity <= 2**16 else np.int32, copy=False))
    return pa.table(lists | {SEQ_LENGTHS: _lists(rows, lengths)})


def _lists(offsets: NDArray[np.int64], values: Any) -> pa.ListArray:
    """A list array whose lists begin at all `offsets` but the last."""
    assert offsets[-1] == len(values) < 2**31
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))

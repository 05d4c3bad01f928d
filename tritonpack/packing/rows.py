"""Rows of a `datasets.Dataset`: `map` joins the documents of bins, and its cache holds what is done."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import datasets
import numpy as np
import pyarrow as pa
from datasets.fingerprint import Hasher
from numpy.typing import NDArray
from pyarrow import compute, types

from tritonpack import __version__
from tritonpack.packing.bins import Algorithm, Packing, pack
from tritonpack.packing.collator import (
    LABELS,
    LEARNED,
    LEFT_OUT,
    MADE,
    MASK,
    PER_TOKEN,
    POSITIONS,
    SEQ_LENGTHS,
    check_names,
    masked_labels,
    naming,
    quote,
    read_feature,
)
from tritonpack.packing.lengths import TOKENS, Overlong, check_integer, table_lengths

_INT8 = (MASK, "special_tokens_mask", *LEARNED)
_KNOWN = (TOKENS, LABELS, *PER_TOKEN)
_BATCH_TOKENS = 4 * 2**20  # of the documents that are joined at a time
Place = Callable[[int], str]  # the number of a document -> where it is, for messages


def packed_dataset(
    dataset: Any, capacity: int, *, overlong: Overlong, algorithm: Algorithm, max_items: int | None,
    columns: Sequence[str] | None, jobs: int, folder: str | os.PathLike[str] | None = None, place: Place = str,
) -> tuple[Any, Packing]:  # fmt: skip
    """A `datasets.Dataset` of rows, one for each bin, with the format of the given one; and the packing.

    See `pack_dataset`. `folder` holds the files of the cache; None: the folder of the dataset's files, if it has any.
    """
    capacity, jobs = check_integer(capacity, "capacity"), check_integer(jobs, "jobs")
    pack([1], 1, overlong=overlong, algorithm=algorithm, max_items=max_items)  # checks options before documents
    if not len(dataset):
        raise ValueError("the dataset holds no document.")
    read, kept = choose_columns(dataset.column_names, columns)
    documents, lengths = dataset.select_columns(read).with_format("arrow"), table_lengths(dataset)
    if lengths is None or lengths.min() < 1:
        _refuse(documents, range(len(documents)), kept, place)
    packing = pack(lengths, capacity, algorithm=algorithm, max_items=max_items, overlong=overlong)
    if folder is None and dataset.cache_files:
        folder = os.path.dirname(dataset.cache_files[0]["filename"])
    options = (read, capacity, overlong, algorithm, max_items)
    name = Hasher.hash(repr([dataset._fingerprint, __version__, *options]))
    each = int(lengths[packing.items].sum()) // packing.num_bins  # tokens of the documents of a bin
    environment = os.environ
    try:
        rows = datasets.Dataset.from_dict({"bin": np.arange(packing.num_bins)}).with_format("arrow").map(
            partial(_rows, documents=documents, packing=packing, kept=kept, place=place), batched=True,
            batch_size=max(1, _BATCH_TOKENS // each), remove_columns=["bin"], desc="Packing documents",
            num_proc=None if jobs == 1 else min(jobs, packing.num_bins), new_fingerprint=name,
            cache_file_name=None if folder is None else os.path.join(folder, f"cache-{name}.arrow"),
        )  # fmt: skip
    finally:
        os.environ = environment  # noqa: B003 (with processes, `map` leaves a copy in its place)
    rows.info.description = f"{packing!r}. {packing.report}."
    return rows.with_format(dataset.format["type"], **dataset.format["format_kwargs"]), packing


def choose_columns(names: Sequence[str], asked: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """The columns to read, and the ones that rows keep: no masks if labels are made from them."""
    if TOKENS not in names:
        raise ValueError(
            f"the dataset has no column {TOKENS!r}; it has {quote(names) or 'none'}. Tokenize the text first."
        )
    if asked is None:
        asked = [name for name in names if name in _KNOWN]
        if unknown := [name for name in names if name not in (*_KNOWN, MASK, *LEFT_OUT)]:
            packed = " Rows of several documents are packed already." if SEQ_LENGTHS in unknown else ""
            raise ValueError(
                f"the dataset has the columns {quote(unknown)}, which may not hold one value per token.{packed} Name "
                f"those to keep, such as columns={','.join(asked)}, or remove the others (dataset.remove_columns)."
            )
    check_names(asked, "columns", {*MADE, SEQ_LENGTHS, MASK, *LEFT_OUT})
    if TOKENS not in asked or len(set(asked)) < len(asked) or not {*names}.issuperset(asked):
        raise ValueError(f"columns are {quote(asked)}; name {TOKENS!r}, and others of {quote(names)}, each once.")
    kept = [name for name in asked if LABELS in asked or name not in LEARNED]
    return [*asked, *(name for name in names if name == MASK)], kept


def _rows(bins: pa.Table, documents: Any, packing: Packing, kept: list[str], place: Place) -> pa.Table:
    """The rows of consecutive bins: their documents, or pieces of them, end to end, and the columns of boundaries."""
    bin_numbers = bins["bin"].to_numpy()
    edges = packing.offsets[bin_numbers[0] : bin_numbers[-1] + 2]
    entries = slice(edges[0], edges[-1])
    numbers, at = np.unique(packing.items[entries], return_inverse=True)
    try:
        values, whole = _checked(documents[numbers.tolist()], kept)
    except (pa.ArrowException, ValueError):
        _refuse(documents, numbers.tolist(), kept, place)
    lengths = packing.lengths[entries].astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    tokens = positions + np.repeat((np.cumsum(whole) - whole)[at] + packing.starts[entries], lengths)
    rows = edges - edges[0]
    lists = {name: _lists(starts[rows], column.take(pa.array(tokens))) for name, column in values.items()}
    lists[POSITIONS] = _lists(starts[rows], positions.astype(np.uint16 if packing.capacity <= 2**16 else np.int32))
    return pa.table(lists | {SEQ_LENGTHS: _lists(rows, packing.lengths[entries])})


def _checked(table: pa.Table, kept: list[str]) -> tuple[dict[str, pa.Array], NDArray[np.int64]]:
    """The columns of rows as the values of all documents, end to end, and the lengths of the documents.
    ValueError or pyarrow.ArrowException if a document can't be packed."""
    table.validate(full=True)  # Arrow doesn't check offsets when it reads
    values: dict[str, Any] = {}
    lengths = compute.list_value_length(table[TOKENS]).to_numpy()
    for name, column in zip(table.column_names, table.combine_chunks().columns, strict=True):
        here, flat = compute.list_value_length(column), column.chunk(0).flatten()
        if here.null_count or flat.null_count or not lengths.all() or not np.array_equal(here, lengths):
            raise ValueError(f"has an empty or missing value in {name}, or not one for each token.")
        if name in (*_KNOWN, MASK):
            if not types.is_integer(flat.type) and not (types.is_boolean(flat.type) and name in (*PER_TOKEN, MASK)):
                raise ValueError(f"has {flat.type} as {name}, not integers; convert the column.")
            flat = flat.cast(pa.int8() if name in _INT8 else pa.int32())
            least = 1 if name == MASK else -(2**31) if name == LABELS else 0
            lowest, highest = (bound.as_py() for bound in compute.min_max(flat).values())
            if lowest < least or (name in (MASK, *LEARNED) and highest > 1):
                raise ValueError(f"has a value in {name} that isn't allowed.")
        values[name] = flat
    if not values.keys().isdisjoint(LEARNED):
        values[LABELS] = pa.array(masked_labels(values, lengths))
    found = {name: column for name, column in values.items() if name in kept or name == LABELS}
    return found, lengths.astype(np.int64)


def _refuse(documents: Any, numbers: Iterable[int], kept: list[str], place: Place) -> NoReturn:
    """ValueError for the first of these documents that can't be packed, in the words of PackingCollator."""
    others = [name for name in documents.column_names if name not in (*_KNOWN, MASK)]
    for number in numbers:
        table = documents[[number]]
        with naming(f"document {place(number)}"):
            try:
                table.validate(full=True)
            except pa.ArrowException as error:
                raise ValueError(f"can't be read: {' '.join(str(error).split())}. Write the file again.") from error
            read_feature(table.to_pylist()[0], per_token=others)
            try:
                _checked(table, kept)
            except pa.ArrowException as error:
                raise ValueError(error) from error
    raise ValueError(f"the documents have no row of integers as {TOKENS!r} each; tokenize the text first.")


def _lists(offsets: NDArray[np.int64], values: Any) -> pa.ListArray:
    assert offsets[-1] == len(values) < 2**31
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))

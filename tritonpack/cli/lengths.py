"""Read document lengths from a file of numbers, or of lists of token ids, which are counted."""

from __future__ import annotations

import json
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.lengths import MAX_INT32, whole_lengths

TABLES = (".csv", ".jsonl", ".parquet")
LENGTHS = (".json", ".npy", ".txt", *TABLES)
# The columns that are read without --column; the first that a file has.
USUAL_COLUMNS = ("length", "lengths", "input_ids")
# Raised by json, numpy or pyarrow. numpy parses the header of an .npy file as Python.
_DAMAGED = (ValueError, OSError, EOFError, MemoryError, OverflowError, RecursionError, SyntaxError, TokenError)


def read_lengths(path: Path, column: str | None = None) -> NDArray[np.int64]:
    """(documents,) int64, the number of tokens of each document, in the order of the file.

    A document is an integer, which is its length, or a list of token ids.

    Args:
        path: .txt: integers. .json: a list of documents. .npy: a one-dimensional array of integers. .csv, .jsonl (an
            object on each line), .parquet: a table.
        column: the column of a table with the documents; None takes the only one, or the first of `USUAL_COLUMNS`.

    Raises:
        ValueError: its content isn't what its ending says, or a value is no document. The message names the file.
    """
    ending = path.suffix.lower()
    if ending not in LENGTHS:
        raise ValueError(f"{path} ends in {path.suffix!r}; lengths are read from {', '.join(LENGTHS)}")
    if column is not None and ending not in TABLES:
        raise ValueError(f"{path} has no columns, but --column {column} was asked for; leave it out")
    try:
        if ending == ".npy":
            lengths = np.load(path, allow_pickle=False)
        elif ending in TABLES:
            lengths = _read_table(path, column)
        else:
            text = path.read_text(encoding="utf-8-sig")
            lengths = _count_tokens([int(word) for word in text.split()] if ending == ".txt" else json.loads(text))
        lengths = whole_lengths(lengths)
        if lengths.max() > MAX_INT32:  # sums over documents stay within 64 bits
            raise ValueError(f"document {lengths.argmax()} has {lengths.max()} tokens; at most {MAX_INT32} are planned")
    except _DAMAGED as error:
        what = ". Save the file in UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        raise ValueError(f"{path} can't be read: {' '.join(str(error).split())}{what}") from error
    return lengths.astype(np.int64)


def _count_tokens(documents: Any) -> NDArray[Any]:
    if not isinstance(documents, list):
        raise ValueError(f"it holds {_shown(documents)}, not a list of documents")
    counts = [len(one) if isinstance(one, list) and all(type(x) is int for x in one) else one for one in documents]
    for number, tokens in enumerate(counts):
        if type(tokens) is not int:
            raise ValueError(f"document {number} is {_shown(tokens)}, neither a number of tokens nor a list of them")
    return np.array(counts, dtype=np.int64)


def _shown(value: Any) -> str:
    """A value as JSON writes it, cut if it is long."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _read_table(path: Path, column: str | None) -> NDArray[Any]:
    import pyarrow.json
    from pyarrow import compute, csv, dataset, types

    formats: dict[str, Any] = {
        ".csv": dataset.CsvFileFormat(csv.ParseOptions(newlines_in_values=True)),
        ".jsonl": dataset.JsonFileFormat(read_options=pyarrow.json.ReadOptions(block_size=2**26)),
        ".parquet": "parquet",
    }
    table = dataset.dataset(str(path), format=formats[path.suffix.lower()])
    names = table.schema.names
    if path.suffix.lower() == ".csv" and not any(map(str.isalpha, "".join(names))):
        first = ",".join(names)[:40]
        raise ValueError(f"its first line is {first!r}; write the names of the columns there, or make it a .txt file")
    name = column or next((name for name in (*USUAL_COLUMNS, *names[: len(names) == 1]) if name in names), None)
    if name not in names:
        listed = ", ".join(map(repr, names[:12])) + (", ..." if len(names) > 12 else "")
        raise ValueError(f"its columns are {listed or 'none'}; name the one with the lengths with --column")
    lengths: list[NDArray[Any]] = [np.zeros(0, np.int64)]
    for batch in table.to_batches(columns=[name]):  # the token ids of a whole file may exceed the memory
        values, kind = batch.column(0), batch.column(0).type
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            values, kind = compute.list_value_length(values), kind.value_type
        if not types.is_integer(kind) or values.null_count:
            what = "missing values (null)" if types.is_integer(kind) else f"values of the type {kind}"
            raise ValueError(f"column {name!r} has {what}, not integers or lists of token ids")
        lengths.append(np.asarray(values))
    return np.concatenate(lengths[1:] or lengths)

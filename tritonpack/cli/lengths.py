"""Read document lengths from a file of numbers, or of lists of token ids, which are counted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray

LENGTHS = (".json", ".jsonl", ".npy", ".parquet", ".csv", ".txt")
# The columns that are read without --column; the first that a file has.
USUAL_COLUMNS = ("length", "lengths", "input_ids")
_MOST = 2**31 - 1  # tokens of a document: sums over documents then stay within 64 bits
# Raised by json, numpy or pyarrow. numpy parses the header of an .npy file as Python.
_DAMAGED = (ValueError, OSError, EOFError, MemoryError, RecursionError, SyntaxError, TokenError)
_REMEDY = "Count the tokens of every document with your tokenizer, and write one whole number for each"


def read_lengths(path: Path, column: str | None = None) -> NDArray[np.int64]:
    """(documents,) int64, the number of tokens of each document, in the order of the file.

    A document is an integer, which is its length, or a list of token ids.

    Args:
        path: .json: a list of documents, a list of objects, or an object of columns. .jsonl (and .json): a document or
            an object on each line. .npy: a one-dimensional array of integers. .parquet: a table. .csv: columns
            separated by commas, with their names in the first line. .txt: a number on each line.
        column: the column with the documents; None takes the only column, or the first of `USUAL_COLUMNS`.

    Raises:
        ValueError: its content isn't what its ending says, or a value is no document. The message names the file, and
            the line, row or document.
    """
    ending = path.suffix.lower()
    if ending not in LENGTHS:
        raise ValueError(f"{path} ends in {path.suffix!r}; lengths are read from {', '.join(LENGTHS)}")
    try:
        if ending == ".npy":
            lengths = _read_array(path, column)
        elif ending in (".csv", ".parquet"):
            lengths = _read_table(path, column)
        else:
            lengths = _count_tokens(_read_documents(path, column), column)
        bad = np.flatnonzero((lengths < 1) | (lengths > _MOST))
        if len(bad):
            tokens = f"document {bad[0]} has {lengths[bad[0]]} tokens; a document has from 1 to {_MOST}"
            raise ValueError(f"{tokens}. {_REMEDY}")
        if not len(lengths):
            raise ValueError(f"it holds no document. {_REMEDY}")
    except _DAMAGED as error:
        what = "Save the file in UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        raise ValueError(f"{path} can't be read: {'. '.join(filter(None, (_one_line(error), what)))}") from error
    return lengths.astype(np.int64)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _read_documents(path: Path, column: str | None) -> Iterator[tuple[str, Any]]:
    """Where each document of JSON is, and the document, or an object that has it."""
    if path.suffix.lower() == ".json":
        try:
            content = json.loads(path.read_text(encoding="utf-8-sig"))
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":  # which a document on each line is
                raise
        else:
            if isinstance(content, dict):
                name = _choose_column(list(content), column)
                content = content[name]
                if isinstance(content, list):
                    content = [{name: document} for document in content]
            if not isinstance(content, list):
                raise ValueError(f"it holds {_shown(content)}, not a list of documents. {_REMEDY}")
            yield from ((f"document {number}", document) for number, document in enumerate(content))
            return
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.isspace():
                try:
                    document = json.loads(line)
                except (ValueError, RecursionError) as error:
                    what = "a number" if path.suffix.lower() == ".txt" else "JSON"
                    raise ValueError(f"line {number} isn't {what}: {line.strip()[:40]!r}") from error
                yield f"line {number}", document


def _count_tokens(documents: Iterator[tuple[str, Any]], column: str | None) -> NDArray[np.int64]:
    """The lengths of documents. All objects are read by one column."""
    lengths = []
    for where, document in documents:
        if isinstance(document, dict):
            column = _choose_column(list(document), column, where)
            document = document[column]
        elif column is not None:
            raise ValueError(f"{where} is {_shown(document)}, not an object with the column {column!r}")
        tokens = document
        if isinstance(document, list) and (not document or type(document[0]) is int):
            tokens = len(document)
        if type(tokens) is not int or not 1 <= tokens <= _MOST:
            what = f"neither a number of tokens from 1 to {_MOST} nor a list of token ids"
            raise ValueError(f"{where} is {_shown(document)}, {what}. {_REMEDY}")
        lengths.append(tokens)
    return np.array(lengths, dtype=np.int64)


def _read_table(path: Path, column: str | None) -> NDArray[Any]:
    from pyarrow import compute, csv, dataset, types

    form: Any = "parquet"
    if path.suffix.lower() == ".csv":
        form = dataset.CsvFileFormat(csv.ParseOptions(newlines_in_values=True))
    table = dataset.dataset(str(path), format=form)
    if form != "parquet" and not any(map(str.isalpha, "".join(table.schema.names))):
        first = ",".join(table.schema.names)[:40]
        raise ValueError(f"its first line is {first!r}; write the names of the columns there, or make it a .txt file")
    name = _choose_column(table.schema.names, column)
    lengths: list[NDArray[Any]] = [np.zeros(0, np.int64)]
    for batch in table.to_batches(columns=[name]):  # the token ids of a whole file may exceed the memory
        values, kind = batch.column(0), batch.column(0).type
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            values, kind = compute.list_value_length(values), kind.value_type
        if not types.is_integer(kind) or values.null_count:
            what = "missing values (null)" if types.is_integer(kind) else f"values of the type {kind}"
            raise ValueError(f"column {name!r} has {what}, not integers or lists of token ids. {_REMEDY}")
        lengths.append(np.asarray(values))
    return np.concatenate(lengths[1:] or lengths)


def _read_array(path: Path, column: str | None) -> NDArray[Any]:
    if column is not None:
        raise ValueError(f"an array has no columns, but --column {column} was asked for; leave it out")
    with path.open("rb") as file:
        values = np.lib.format.read_array(file, allow_pickle=False)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ValueError(f"it holds {values.dtype} of shape {values.shape}, not a row of integers. {_REMEDY}")
    return values


def _choose_column(names: Sequence[str], asked: str | None, where: str = "it") -> str:
    """The column to read: the one asked for, the first usual one, or the only one."""
    listed = ", ".join(map(repr, names[:12])) + (", ..." if len(names) > 12 else "") or "none"
    if asked is not None and asked not in names:
        raise ValueError(f"{where} has no column {asked!r}; it has {listed}. Name one of them with --column")
    found = [asked] if asked is not None else [name for name in USUAL_COLUMNS if name in names]
    if len(names) != 1 and not found:
        raise ValueError(f"{where} has the columns {listed}; name the one with the lengths with --column")
    return (found or names)[0]


def _shown(value: Any) -> str:
    """A value as JSON writes it, cut if it is long."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."

"""Read document lengths from a file of numbers, or of lists of token ids, which are counted."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritonpack.cli.files import require_lengths

# The columns that are read without --column; the first that a file has.
USUAL_COLUMNS = ("length", "lengths", "input_ids")
_MOST = 2**31 - 1  # tokens of a document: sums over documents then stay within 64 bits
# Raised by json, numpy or pyarrow. numpy parses the header of an .npy file as Python.
_DAMAGED = (ValueError, OSError, EOFError, MemoryError, RecursionError, SyntaxError, TokenError)
_REMEDY = "Count the tokens of every document with your tokenizer, and write one whole number for each"


class _UnreadableError(ValueError):
    """A file can't be read. The message continues a sentence that begins with the file's name."""


def read_lengths(path: Path, column: str | None = None) -> NDArray[np.int64]:
    """(documents,) int64, the number of tokens of each document, in the order of the file.

    A document is an integer, which is its length, or a list of token ids.

    Args:
        path: .json: a list of documents, a list of objects, or an object of columns. .jsonl (and .json): a document or
            an object on each line. .npy: a one-dimensional array of integers. .parquet: a table. .csv: columns
            separated by commas, semicolons or tabs, with their names in the first line; a single column may lack its
            name. .txt: a number on each line.
        column: the column with the documents; None takes the only column, or the first of `USUAL_COLUMNS`.

    Raises:
        ValueError: there is no such file, its content isn't what its ending says, or a value is no document. The
            message names the file, and the line, row or document.
    """
    require_lengths(path)
    ending = path.suffix.lower()
    try:
        if ending == ".npy":
            lengths = _read_npy(path, column)
        elif ending in (".csv", ".parquet"):
            lengths = (_read_csv if ending == ".csv" else _read_parquet)(path, column)
        else:
            lengths = _count(*_json_documents(path, column))
    except _UnreadableError as error:
        raise ValueError(f"{path}{error}") from error
    except ModuleNotFoundError as error:
        raise ValueError(f"{path} is read with pyarrow, which isn't installed; pip install pyarrow") from error
    except _DAMAGED as error:
        raise ValueError(f"{path} can't be read as a {path.suffix} file: {_reason(error)}") from error
    bad = np.flatnonzero((lengths < 1) | (lengths > _MOST))
    if len(bad):
        tokens = f"document {bad[0]}, has {lengths[bad[0]]} tokens; a document has from 1 to {_MOST}"
        raise ValueError(f"{path}, {tokens}. {_REMEDY}")
    if not len(lengths):
        raise ValueError(f"{path} holds no document. {_REMEDY}")
    return lengths.astype(np.int64)


def _reason(error: BaseException) -> str:
    """The message of an error of reading, in one line, with the remedy for another encoding."""
    return " ".join(str(error).split()) + (". Save the file in UTF-8" if isinstance(error, UnicodeDecodeError) else "")


Documents = Iterable[tuple[str, Any]]  # where each document is, and what is there


def _json_documents(path: Path, column: str | None) -> tuple[Documents, str | None]:
    """The documents of a JSON file or of lines, and the column that they still have to be read by."""
    if path.suffix.lower() == ".json":
        try:
            content = json.loads(path.read_text(encoding="utf-8-sig"))
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":  # which a document on each line is
                raise
        else:
            if isinstance(content, dict):
                content, column = content[_choose_column(list(content), column)], None
            if not isinstance(content, list):
                raise _UnreadableError(f" holds {_shown(content)}, not a list of documents. {_REMEDY}")
            return ((f", document {number}", document) for number, document in enumerate(content)), column
    return _lines(path), column


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    number, line = 0, ""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield f", line {number}", json.loads(line)
    except (UnicodeDecodeError, OSError) as error:
        raise _UnreadableError(f", line {number + 1} or one after it, can't be read: {_reason(error)}") from error
    except (ValueError, RecursionError) as error:
        what = "a number" if path.suffix.lower() == ".txt" else "JSON"
        raise _UnreadableError(f", line {number}, isn't {what}: {line.strip()[:40]!r}") from error


def _count(documents: Documents, column: str | None) -> NDArray[np.int64]:
    """The lengths of documents. All objects are read by one column."""
    lengths = []
    for where, document in documents:
        if isinstance(document, dict):
            column = _choose_column(list(document), column, where)
            document = document[column]
        elif column is not None:
            raise _UnreadableError(f"{where}, is {_shown(document)}, not an object with the column {column!r}")
        tokens = document
        if isinstance(document, list) and (not document or type(document[0]) is int):
            tokens = len(document)
        if type(tokens) is not int or not 1 <= tokens <= _MOST:
            what = f"neither a number of tokens from 1 to {_MOST} nor a list of token ids"
            raise _UnreadableError(f"{where}, is {_shown(document)}, {what}. {_REMEDY}")
        lengths.append(tokens)
    return np.array(lengths, dtype=np.int64)


def _read_csv(path: Path, column: str | None) -> NDArray[Any]:
    import pyarrow
    from pyarrow import csv

    with path.open(encoding="utf-8-sig") as file:
        first = next((line.strip() for line in file if not line.isspace()), "")
    parse = csv.ParseOptions(delimiter=max(",;\t", key=first.count), newlines_in_values=True)
    header = any(map(str.isalpha, first))
    # One thread, because only then errors name the row. Large blocks, because each must hold a whole row.
    read = csv.ReadOptions(use_threads=False, block_size=2**26, autogenerate_column_names=not header)
    names = csv.open_csv(path, read, parse).schema.names
    if not header and (column is not None or len(names) > 1):
        raise _UnreadableError(
            f" has no header: its first line is {first[:40]!r}. Write the names of the columns into the first line, or "
            "make a file of lengths alone and leave out --column"
        )
    name = _choose_column(names, column)
    convert = csv.ConvertOptions(include_columns=[name], column_types={name: pyarrow.int64()}, null_values=[])
    return np.asarray(csv.read_csv(path, read, parse, convert).column(name))


def _read_parquet(path: Path, column: str | None) -> NDArray[Any]:
    import pyarrow
    from pyarrow import compute, parquet, types

    lengths: list[NDArray[Any]] = []
    with parquet.ParquetFile(path) as file:
        name = _choose_column(file.schema_arrow.names, column)
        batches = file.iter_batches(columns=[name])  # the token ids of a whole file may exceed the memory
        while True:
            try:
                values = next(batches).column(name)
            except StopIteration:
                break
            except (pyarrow.ArrowException, OSError) as error:
                place = f", document {sum(map(len, lengths))} or one after it, column {name!r}"
                raise _UnreadableError(f"{place}, can't be read: {_reason(error)}") from error
            kind = values.type
            if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
                values, kind = compute.list_value_length(values), kind.value_type
            if not types.is_integer(kind) or values.null_count:
                what = "missing values (null)" if types.is_integer(kind) else f"values of the type {kind}"
                raise _UnreadableError(f", column {name!r}, has {what}, not integers or lists of token ids. {_REMEDY}")
            lengths.append(np.asarray(values))
    return np.concatenate(lengths) if lengths else np.zeros(0, np.int64)


def _read_npy(path: Path, column: str | None) -> NDArray[Any]:
    if column is not None:
        raise _UnreadableError(f" has no columns, but --column {column} was asked for; leave it out")
    with path.open("rb") as file:
        values = np.lib.format.read_array(file, allow_pickle=False)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise _UnreadableError(f" holds {values.dtype} of shape {values.shape}, not a row of integers. {_REMEDY}")
    return values


def _choose_column(names: Sequence[str], asked: str | None, where: str = "") -> str:
    """The column to read: the one asked for, the first usual one, or the only one."""
    listed = ", ".join(map(repr, names[:12])) + (", ..." if len(names) > 12 else "") or "none"
    if asked is not None and asked not in names:
        raise _UnreadableError(f"{where} has no column {asked!r}; it has {listed}. Name one of them with --column")
    found = [asked] if asked is not None else [name for name in USUAL_COLUMNS if name in names]
    if len(names) != 1 and not found:
        raise _UnreadableError(f"{where} has the columns {listed}; name the one with the lengths with --column")
    return (found or names)[0]


def _shown(value: Any) -> str:
    """A value as JSON writes it, cut if it is long."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."

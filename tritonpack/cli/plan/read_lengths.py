"""Document lengths from files: lists of numbers, or of documents whose tokens are counted."""

from __future__ import annotations

import csv
import json
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Columns that are taken without being asked for, the first that is there.
USUAL_COLUMNS = ("length", "lengths", "input_ids")
_REMEDY = "Count the tokens of every document with your tokenizer, and write one whole number for each"

Advance = Callable[[float], None]  # told the share of the file that has been read


class _UnreadableError(ValueError):
    """What is wrong, without the file's name."""


def read_lengths(path: Path, column: str | None = None, advance: Advance = lambda share: None) -> NDArray[np.int64]:
    """The tokens of each document of a file, in its order.

    A document is a whole number, its tokens, or a list, the tokens themselves. Files: .json, a list of documents, of
    objects with a column of documents, or an object of columns; .jsonl, a document or an object on each line; .npy,
    a row of integers; .csv, with a line of names if it has columns; .txt, a number on each line; .parquet, a table.

    Args:
        path: the file; its ending says what it is.
        column: where documents are in a table; None takes the only column, or else one of `USUAL_COLUMNS`.
        advance: called now and then with the share of the file that has been read.

    Returns:
        (documents,) int64, each at least 1.

    Raises:
        ValueError: no such file, one that isn't what its name says or that takes a package which isn't here, or a
            document that is neither; the message names the file, the line and the remedy.
    """
    reader = READERS.get(path.suffix.lower())
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name the file that holds the lengths: {', '.join(READERS)}")
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    if reader is None:
        raise ValueError(f"{path} ends in {path.suffix!r}; lengths are read from {', '.join(READERS)}")
    try:
        lengths = reader(path, column, advance)
    except _UnreadableError as error:
        raise ValueError(f"{path}{error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} isn't text in UTF-8, as a {path.suffix} file is: byte {error.start} is off"
        ) from error
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror or error}") from error
    if not len(lengths):
        raise ValueError(f"{path} holds no document. {_REMEDY}")
    return lengths


def _read_json(path: Path, column: str | None, advance: Advance) -> NDArray[np.int64]:
    text = path.read_text(encoding="utf-8-sig")
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        hint = "; with a document on each line it is a .jsonl file" if error.msg == "Extra data" else ""
        raise _UnreadableError(f", line {error.lineno}, isn't JSON: {error.msg}{hint}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of lists in lists
        raise _UnreadableError(f" isn't a list of documents: {error}") from error
    if isinstance(content, Mapping):
        content = content[_column(content, column)]
        column = None
    if not isinstance(content, list):
        raise _UnreadableError(f" holds {_kind(content)}, not a list of documents. {_REMEDY}")
    return _count(((f", document {number}", document) for number, document in enumerate(content)), column)


def _read_jsonl(path: Path, column: str | None, advance: Advance) -> NDArray[np.int64]:
    def documents() -> Iterator[tuple[str, Any]]:
        for where, line in _lines(path, advance):
            try:
                yield where, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise _UnreadableError(f"{where}, isn't JSON: {getattr(error, 'msg', error)}") from error

    return _count(documents(), column)


def _read_text(path: Path, column: str | None, advance: Advance) -> NDArray[np.int64]:
    if column is not None:
        raise _UnreadableError(f" has no columns, but --column {column} was asked for; leave it out")
    return _count(((where, _number(line)) for where, line in _lines(path, advance)), None)


def _read_csv(path: Path, column: str | None, advance: Advance) -> NDArray[np.int64]:
    def documents() -> Iterator[tuple[str, Any]]:
        rows = csv.reader(line for _, line in _lines(path, advance, blank=True))
        names: list[str] = []
        index = 0
        try:
            for row in filter(None, rows):
                where = f", line {rows.line_num}"
                if not names:
                    names = [cell.strip() for cell in row]
                    if len(row) > 1 or column is not None or isinstance(_number(row[0]), str):
                        index = names.index(_column(dict.fromkeys(names), column))
                        continue
                if len(row) != len(names):
                    raise _UnreadableError(f"{where}, has {len(row)} cells where the first line has {len(names)}")
                yield where, _number(row[index])
        except csv.Error as error:
            raise _UnreadableError(f", line {rows.line_num}, isn't CSV: {error}") from error

    return _count(documents(), None)


def _read_npy(path: Path, column: str | None, advance: Advance) -> NDArray[np.int64]:
    if column is not None:
        raise _UnreadableError(f" has no columns, but --column {column} was asked for; leave it out")
    with path.open("rb") as file:
        if file.read(6) != b"\x93NUMPY":
            raise _UnreadableError(" isn't a NumPy file, though it ends in .npy. Write it with numpy.save")
    try:
        values = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, MemoryError) as error:
        raise _UnreadableError(f" isn't a whole NumPy file of plain numbers: {error}") from error
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise _UnreadableError(f" holds {values.dtype} of shape {values.shape}, not a row of integers. {_REMEDY}")
    return _positive(values)


def _read_parquet(path: Path, column: str | None, advance: Advance) -> NDArray[np.int64]:
    try:
        import pyarrow
        from pyarrow import compute, parquet
    except ModuleNotFoundError as error:
        raise _UnreadableError(" is read with pyarrow, which isn't installed; pip install pyarrow") from error
    try:
        file = parquet.ParquetFile(path)
        name = _column(dict.fromkeys(file.schema_arrow.names), column)
        groups = []
        for group in range(file.num_row_groups):  # one at a time: token ids may be more than memory holds
            values = file.read_row_group(group, columns=[name]).column(name)
            if values.null_count:
                raise _UnreadableError(f", column {name!r}, has {values.null_count} missing values (null). {_REMEDY}")
            kind, types = values.type, pyarrow.types
            if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
                values, kind = compute.list_value_length(values), kind.value_type
            if not types.is_integer(kind):
                raise _UnreadableError(
                    f", column {name!r}, holds {kind}, neither integers nor lists of token ids. {_REMEDY}"
                )
            groups.append(values.to_numpy())
            advance((group + 1) / file.num_row_groups)
    except pyarrow.ArrowException as error:
        raise _UnreadableError(f" isn't a whole parquet file: {error}") from error
    return _positive(np.concatenate(groups)) if groups else np.zeros(0, np.int64)


READERS: dict[str, Callable[[Path, str | None, Advance], NDArray[np.int64]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".npy": _read_npy,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".txt": _read_text,
}


def _lines(path: Path, advance: Advance, blank: bool = False) -> Iterator[tuple[str, str]]:
    """Lines, each with its place; blank ones only if asked for."""
    size = max(path.stat().st_size, 1)
    done = 0
    with path.open(encoding="utf-8-sig", newline="") as file:
        for number, line in enumerate(file, 1):
            done += len(line)
            if number % 4096 == 0:
                advance(min(done / size, 1.0))
            if blank or not line.isspace():
                yield f", line {number}", line


def _count(documents: Iterable[tuple[str, Any]], column: str | None) -> NDArray[np.int64]:
    """Documents, each with its place, to lengths; by a column where they are objects."""
    lengths = array("q")
    chosen: str | None = None
    for where, document in documents:
        if isinstance(document, Mapping):
            if chosen is None or chosen not in document:
                chosen = _column(document, column or chosen, where)
            document = document[chosen]
        elif column is not None:
            raise _UnreadableError(f"{where}, is {_kind(document)}, not an object with the column {column!r}")
        lengths.append(_tokens(where, document))
    return np.frombuffer(lengths, dtype=np.int64) if lengths else np.zeros(0, np.int64)


def _tokens(where: str, document: Any) -> int:
    if isinstance(document, list):
        if document and type(document[0]) is not int:
            raise _UnreadableError(
                f"{where}, is a list that begins with {_kind(document[0])}, not with a token id. {_REMEDY}"
            )
        document = len(document)
    if type(document) is not int:
        raise _UnreadableError(
            f"{where}, is {_kind(document)}, neither a whole number nor a list of token ids. {_REMEDY}"
        )
    if not 1 <= document < 2**63:
        raise _UnreadableError(
            f"{where}, is a document of {document} tokens; every document needs at least one. {_REMEDY}"
        )
    return document


def _positive(values: NDArray[Any]) -> NDArray[np.int64]:
    bad = np.flatnonzero((values < 1) | (values > np.iinfo(np.int64).max))
    if len(bad):
        _tokens(f", document {bad[0]}", int(values[bad[0]]))
    return values.astype(np.int64)


def _column(columns: Mapping[str, Any], asked: str | None, where: str = "") -> str:
    names = list(columns)
    if asked is not None:
        if asked not in columns:
            raise _UnreadableError(f"{where} has no column {asked!r}; it has {_listed(names)}. Say which with --column")
        return asked
    usual = [name for name in USUAL_COLUMNS if name in columns]
    if len(names) != 1 and not usual:
        raise _UnreadableError(
            f"{where} has the columns {_listed(names)}; say with --column which one holds the lengths or token ids"
        )
    return usual[0] if usual else names[0]


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:12])) + (", ..." if len(names) > 12 else "") if names else "none"


def _number(cell: str) -> int | float | str:
    """The number that a cell holds; its text if it holds none."""
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            pass
    return cell.strip()


def _kind(value: Any) -> str:
    """What a value is, for those who don't know Python."""
    if value is None:
        return "missing (null)"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, float):
        return f"the number {value}" if math.isfinite(value) else f"{value}, no number"
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    return f"the {type(value).__name__} {value!r:.40}"

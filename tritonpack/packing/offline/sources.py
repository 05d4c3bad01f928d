"""Sources of documents: files of Arrow, Parquet and JSON lines, and datasets of the `datasets` library, in parts."""

from __future__ import annotations

import glob
import io
import json
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from pyarrow import ipc, parquet, types
from pyarrow import json as arrow_json

from tritonpack.packing.columns import LABELS, PER_TOKEN
from tritonpack.packing.documents import TOKENS
from tritonpack.packing.offline.documents import MASK

PART_BYTES = 64 * 2**20  # documents that are read at a time, in memory
_JSON_SHARE = 4  # Arrow takes many times the bytes of the text to read it
_FORMATS = {
    ".arrow": "arrow", ".feather": "arrow", ".parquet": "parquet", ".jsonl": "json", ".json": "json", ".ndjson": "json",
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Documents that are read at once.

    Attributes:
        file: the file; "" for a dataset.
        start, stop: what is read: bytes of JSON lines and of an Arrow stream, row groups, record batches, documents.
        first: the number of the part's first document in the file; None for JSON lines.
    """

    file: str
    start: int
    stop: int
    first: int | None


@contextmanager
def reading(what: str | Callable[[], str], form: str = "") -> Iterator[None]:
    """Turn errors of reading into a ValueError that names what was read.

    Args:
        what: the file or the documents, or a function that says which, called only for a message.
        form: what a whole file should be, such as " as a Parquet file"; other ValueErrors are then reworded, too.
    """
    try:
        yield
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        if not form and type(error) is ValueError:
            raise
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        where = what if isinstance(what, str) else what()
        raise ValueError(f"{where} can't be read{form}: {reason.rstrip('.')}. Write the file again.") from error


class Source(Protocol):
    """Documents in parts."""

    name: str  # for messages
    digest: dict[str, Any]  # of plain values: changes if the documents do
    columns: list[str]
    parts: list[Part]

    def read(self, part: Part, columns: Sequence[str]) -> pa.Table:
        """The columns of the documents of a part, in the order of the source."""
        ...

    def place(self, part: Part, number: int) -> str:
        """Where a document of a part is, for messages."""
        ...


def require_columns(names: Sequence[str], where: str, expected: Sequence[str], first: str) -> None:
    """ValueError unless the columns are those that are expected."""
    if set(names) != set(expected):
        raise ValueError(
            f"{where} has the columns {', '.join(names)}, but {first} has {', '.join(expected)}; give all documents "
            "the same columns."
        )


class _Files:
    """What sources of files share: their names, and a digest of their names, sizes and times of change."""

    def __init__(self, name: str, files: Sequence[str]) -> None:
        self.name = name
        self.files = list(files)
        folder = os.path.commonpath([os.path.dirname(os.path.abspath(file)) for file in files or ["."]])
        states = {}
        for file in self.files:
            with reading(file):
                states[os.path.relpath(file, folder)] = os.stat(file)
        self.digest = {"files": [[name, state.st_size, state.st_mtime_ns] for name, state in states.items()]}
        self.columns: list[str] = []
        self.parts: list[Part] = []

    def place(self, part: Part, number: int) -> str:
        assert part.first is not None
        return f"document {part.first + number} of {part.file}"

    def _add_columns(self, names: Sequence[str], file: str) -> None:
        """The columns of all files must be those of the first."""
        self.columns = self.columns or list(names)
        require_columns(names, file, self.columns, self.files[0])


class ArrowFiles(_Files):
    """Files of Arrow record batches: streams, as `datasets` writes them, or Arrow's file format (Feather)."""

    def __init__(self, name: str, files: Sequence[str]) -> None:
        super().__init__(name, files)
        self._schemas: dict[str, pa.Schema] = {}
        for file in self.files:
            with reading(file, " as an Arrow file"):
                batches = list(self._batches(file))
            self._add_columns(self._schemas[file].names, file)
            first, begin, documents, size = 0, None, 0, 0
            for start, stop, rows, length in batches:
                begin = start if begin is None else begin
                documents, size = documents + rows, size + length
                if size >= PART_BYTES or stop == batches[-1][1]:
                    if documents:
                        self.parts.append(Part(file, begin, stop, first))
                    first, begin, documents, size = first + documents, None, 0, 0

    def _batches(self, file: str) -> Iterator[tuple[int, int, int, int]]:
        """(start, stop, documents, bytes) of each record batch; start and stop are bytes of a stream, else numbers."""
        with pa.memory_map(file) as opened:  # reads the headers alone
            if opened.size() == 0:
                raise ValueError("it is empty")
            if opened.read(6) == b"ARROW1":
                reader = ipc.open_file(opened)
                self._schemas[file] = reader.schema
                for number in range(reader.num_record_batches):
                    batch = reader.get_batch(number)
                    yield number, number + 1, batch.num_rows, batch.nbytes
                return
            opened.seek(0)
            self._schemas[file] = schema = ipc.read_schema(opened)
            while True:
                start = opened.tell()
                try:
                    message = ipc.read_message(opened)
                except EOFError:
                    return
                if message is None or message.type != "record batch":
                    raise ValueError("it holds dictionaries; write it again with plain columns")
                rows = ipc.read_record_batch(message, schema).num_rows
                yield start, opened.tell(), rows, opened.tell() - start

    def read(self, part: Part, columns: Sequence[str]) -> pa.Table:
        schema = self._schemas[part.file]
        with pa.OSFile(part.file) as opened:  # not mapped, so that its pages don't count as memory of the process
            if opened.read(6) == b"ARROW1":
                reader = ipc.open_file(opened, options=ipc.IpcReadOptions(included_fields=_places(schema, columns)))
                return pa.Table.from_batches([reader.get_batch(number) for number in range(part.start, part.stop)])
            opened.seek(part.start)
            batches = []
            while opened.tell() < part.stop:
                message = ipc.read_message(opened)
                batches.append(ipc.read_record_batch(message, schema).select(list(columns)))
            return pa.Table.from_batches(batches)


class ParquetFiles(_Files):
    """Parquet files; a part is one or several row groups."""

    def __init__(self, name: str, files: Sequence[str]) -> None:
        super().__init__(name, files)
        for file in self.files:
            with reading(file, " as a Parquet file"):
                found = parquet.read_metadata(file)
                names = found.schema.to_arrow_schema().names
                groups = [found.row_group(number) for number in range(found.num_row_groups)]
            self._add_columns(names, file)
            first, begin, documents, size = 0, 0, 0, 0
            for number, group in enumerate(groups):
                values = sum(group.column(at).num_values for at in range(group.num_columns))
                documents, size = documents + group.num_rows, size + max(group.total_byte_size, 4 * values)
                if size >= PART_BYTES or number == len(groups) - 1:
                    if documents:
                        self.parts.append(Part(file, begin, number + 1, first))
                    first, begin, documents, size = first + documents, number + 1, 0, 0

    def read(self, part: Part, columns: Sequence[str]) -> pa.Table:
        with parquet.ParquetFile(part.file) as file:
            groups = list(range(part.start, part.stop))
            return file.read_row_groups(groups, columns=list(columns), use_threads=False)


class JsonFiles(_Files):
    """JSON lines: an object with the columns of a document on each line."""

    def __init__(self, name: str, files: Sequence[str]) -> None:
        super().__init__(name, files)
        for file in self.files:
            with reading(file), open(file, "rb") as opened:
                size = os.fstat(opened.fileno()).st_size
                start = 0
                while start < size:
                    opened.seek(min(start + PART_BYTES // _JSON_SHARE, size) - 1)
                    opened.readline()  # to the end of the line
                    stop = opened.tell()
                    opened.seek(start)
                    if not opened.read(min(stop - start, 4096)).isspace() or not self._is_blank(file, start, stop):
                        self.parts.append(Part(file, start, stop, None))
                    start = stop
        if self.parts:
            with reading(self.files[0]):
                self.columns = self._parsed(self.parts[0], 1).column_names

    @staticmethod
    def _is_blank(file: str, start: int, stop: int) -> bool:
        with open(file, "rb") as opened:
            opened.seek(start)
            return opened.read(stop - start).isspace()

    def read(self, part: Part, columns: Sequence[str]) -> pa.Table:
        table = self._parsed(part)
        integers = [name for name in columns if name in (TOKENS, MASK, *LABELS, *PER_TOKEN)]
        kinds = [table.schema.field(name).type for name in integers if name in table.column_names]
        unlike = any(not types.is_list(kind) or types.is_floating(kind.value_type) for kind in kinds)
        if unlike or set(table.column_names) != set(self.columns):
            if wrong := self._wrong_line(part, self._text(part), integers):
                raise ValueError(wrong)
            require_columns(table.column_names, self.place(part, 0), self.columns, "the first line")
        return table.select(list(columns))

    @staticmethod
    def _text(part: Part) -> bytes:
        with open(part.file, "rb") as opened:
            opened.seek(part.start)
            return opened.read(part.stop - part.start)

    def _parsed(self, part: Part, lines: int | None = None) -> pa.Table:
        """The documents of a part, or its first lines."""
        if lines is None:
            text = self._text(part)
        else:
            with open(part.file, "rb") as opened:
                opened.seek(part.start)
                text = b""
                while lines and opened.tell() < part.stop:
                    line = opened.readline()
                    text, lines = text + line, lines - (not line.isspace())
        options = arrow_json.ReadOptions(use_threads=False, block_size=max(len(text), 1) + 1)
        try:
            return arrow_json.read_json(io.BytesIO(text), read_options=options)
        except pa.ArrowException as error:
            if wrong := self._wrong_line(part, text, [TOKENS]):
                raise ValueError(wrong) from error
            raise

    def _wrong_line(self, part: Part, text: bytes, integers: Sequence[str]) -> str | None:
        """Which line isn't an object, has other columns or kinds of values than the first, or no row of integers."""
        kinds: dict[str, str] = {}
        for number, line in enumerate(line for line in text.split(b"\n") if line and not line.isspace()):
            try:
                document = json.loads(line)
            except (ValueError, RecursionError) as error:
                return f"{self.place(part, number)} isn't JSON: {error}. Write one object on each line."
            if not isinstance(document, dict):
                given = line[:40].decode(errors="replace")
                return f"{self.place(part, number)} isn't an object with 'input_ids', but {given!r}."
            if self.columns and not set(document) <= set(self.columns):
                require_columns(list(document), self.place(part, number), self.columns, "the first line")
            for name, values in document.items():
                wrong = _not_integers(values) if name in integers and values is not None else ""
                kind, first = _kind(values), kinds.get(name, "")
                if not first.startswith(kind):  # "a row of " fits all rows
                    kinds[name] = kind
                    if not kind.startswith(first):
                        wrong = wrong or f"holds {kind}, but {first} on an earlier line; convert one of them"
                if wrong or " and " in kind:
                    return f"{self.place(part, number)}: {name} {wrong or f'holds {kind}; write values of one kind'}."
        return None

    def place(self, part: Part, number: int) -> str:
        with open(part.file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as text:
            chunks = range(0, part.start, PART_BYTES)
            line = 1 + sum(text[at : min(at + PART_BYTES, part.start)].count(b"\n") for at in chunks)
            at = part.start
            while True:
                end = text.find(b"\n", at) + 1 or len(text)
                if not text[at:end].isspace():
                    if not number:
                        return f"line {line} of {part.file}"
                    number -= 1
                at, line = end, line + 1


class TableDataset:
    """A `datasets.Dataset`, read through its Arrow table."""

    def __init__(self, dataset: Any) -> None:
        self.name = "the dataset"
        self.dataset = dataset.with_format("arrow")
        self.columns = list(dataset.column_names)
        self.digest = {"fingerprint": dataset._fingerprint, "documents": len(dataset)}
        table = dataset.data
        each = max(1, PART_BYTES // max(1, table.nbytes // max(1, table.num_rows)))
        self.parts = [Part("", start, min(start + each, len(dataset)), start) for start in range(0, len(dataset), each)]

    def read(self, part: Part, columns: Sequence[str]) -> pa.Table:
        return self.dataset.select_columns(list(columns))[part.start : part.stop]

    def place(self, part: Part, number: int) -> str:
        return f"document {part.start + number}"


def find_files(path: str, split: str | None) -> tuple[str, list[str]] | None:
    """The format and the files of a path: a folder of save_to_disk, a file, a folder of files, or a pattern.

    Returns:
        None if there is no such path, and it may be a name on the Hub.

    Raises:
        ValueError: there is no such path, files of several or of unknown formats, a split that isn't there.
    """
    folder = Path(path).expanduser()
    if (folder / "dataset_dict.json").is_file():
        splits = _read_record(folder / "dataset_dict.json", lambda record: list(map(str, record["splits"])))
        if split not in splits:
            given = "" if split is None else f"; got {split!r}"
            raise ValueError(f"{path} has the splits {', '.join(splits)}; name one of them as split{given}.")
        folder, split = folder / str(split), None
    if (folder / "state.json").is_file():
        if split is not None:
            raise ValueError(f"{path} holds one dataset without splits; leave out split={split!r}.")
        names = _read_record(folder / "state.json", lambda record: [file["filename"] for file in record["_data_files"]])
        return "arrow", [str(folder / name) for name in names]
    if folder.is_dir():
        files = sorted(str(file) for file in folder.rglob("*") if file.suffix in _FORMATS and not file.is_dir())
    elif folder.exists():
        files = [str(folder)]
    elif any(sign in path for sign in "*?["):
        files = sorted(glob.glob(str(folder), recursive=True))
    elif (
        path.startswith((".", "/", "~"))
        or folder.suffix in _FORMATS
        or path.count("/") > 1
        or ("/" in path and folder.parent.is_dir())
    ):
        raise ValueError(f"there is no file or folder {path}.")
    else:
        return None
    if split is not None:
        raise ValueError(f"{path} holds files without splits; leave out split={split!r} and name the split's files.")
    known = ", ".join(_FORMATS)
    if not files:
        raise ValueError(f"{path} has no file that can be read; {known} can, and folders that save_to_disk wrote.")
    formats = {Path(file).suffix.lower() for file in files}
    if unknown := sorted(formats - set(_FORMATS)):
        raise ValueError(f"{path} ends in {unknown[0]!r}; documents are read from {known}. Convert it with datasets.")
    if len({_FORMATS[ending] for ending in formats}) > 1:
        raise ValueError(f"{path} has files of several formats, {', '.join(sorted(formats))}; name those of one.")
    return _FORMATS[formats.pop()], files


FILES: dict[str, Callable[[str, Sequence[str]], Source]] = {
    "arrow": ArrowFiles,
    "parquet": ParquetFiles,
    "json": JsonFiles,
}


def _read_record(path: Path, names: Callable[[Any], list[str]]) -> list[str]:
    """Names from a file of JSON that `save_to_disk` wrote."""
    with reading(str(path), " as save_to_disk writes it"):
        try:
            return names(json.loads(path.read_bytes()))
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


def _not_integers(values: Any) -> str:
    """What is wrong with a value of JSON that should be a row of integers; "" if nothing is."""
    if not isinstance(values, list):
        return f"holds {type(values).__name__}; write one integer per token, such as [1, 2]"
    given = [value for value in values if value is not None]
    kinds = sorted({type(value).__name__ for value in given})
    if len(kinds) > 1 or not set(kinds) <= {"int", "bool"}:
        return f"holds {' and '.join(kinds)}; write one integer per token"
    if large := [value for value in given if not -(2**63) <= value < 2**63]:
        return f"holds {large[0]}, which has more than 64 bits; write tokens' numbers"
    return ""


def _kind(value: Any) -> str:
    """What a value of JSON is, in words, such as "a row of a number"; a missing value is ""."""
    if isinstance(value, list):
        return f"a row of {' and '.join(sorted({_kind(one) for one in value} - {''}))}"
    if value is None:
        return ""
    return {bool: "true or false", str: "text", dict: "an object"}.get(type(value), "a number")


def _places(schema: pa.Schema, columns: Sequence[str]) -> list[int]:
    return [schema.get_field_index(name) for name in columns]

"""open_source: a dataset, a path or a name on the Hub as a source; streams are first copied into parts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from pyarrow import compute, ipc, types

from tritonpack.packing.documents import unreadable
from tritonpack.packing.offline.documents import choose_columns
from tritonpack.packing.offline.folder import Folder, write
from tritonpack.packing.offline.sources import (
    FILES,
    PART_BYTES,
    ArrowFiles,
    Part,
    Source,
    TableDataset,
    find_files,
    require_columns,
)

_WINDOW = 1000  # documents of a stream that are read at a time; the first window identifies the stream


class Stream:
    """An `IterableDataset`; it is read once, and copied into files of Arrow. Its first documents identify it."""

    def __init__(self, dataset: datasets.IterableDataset, name: str, digest: dict[str, Any]) -> None:
        self.name = name
        self._dataset = dataset
        window = self._next(iter(dataset.with_format("arrow").iter(_WINDOW)))
        self.digest = digest | {"first_documents": [len(window), _digest(window)]}

    def in_parts(
        self, folder: Folder, columns: Sequence[str] | None, progress: Callable[[str, int, int], Any]
    ) -> Source:
        """Copy the columns that rows keep; a copy that was interrupted goes on after the last whole file."""
        end = folder.work / "stream.json"
        files = sorted(map(str, folder.work.glob("stream-*.arrow")))
        if not end.exists():
            names = self._next(iter(self._dataset.with_format("arrow").iter(1))).column_names
            for tables in self._tables(_documents(files), names, columns):
                progress("copy", len(files), len(files) + 1)
                path = folder.work / f"stream-{len(files):06d}.arrow"
                write(path, partial(_write_table, table=pa.concat_tables(tables, promote_options="permissive")))
                files.append(str(path))
            if not files:
                raise ValueError(f"{self.name} holds no document.")
            write(end, lambda path: path.write_text(json.dumps(names)))
        return _Copied(self.name, files, json.loads(end.read_text()))

    def _tables(self, skipped: int, names: list[str], columns: Sequence[str] | None) -> Iterator[list[pa.Table]]:
        """Tables of the documents after those that are skipped, of PART_BYTES together."""
        tables: list[pa.Table] = []
        read = iter(self._dataset.skip(skipped).with_format("arrow").iter(_WINDOW))
        while len(table := self._next(read, skipped)):
            skipped += len(table)
            require_columns(table.column_names, f"a document of {self.name}", names, "the first")
            tables.append(table.select(choose_columns(names, columns, self.name).read))
            if sum(one.nbytes for one in tables) >= PART_BYTES:
                yield tables
                tables = []
        if tables:
            yield tables

    def _next(self, tables: Iterator[pa.Table], first: int = 0) -> pa.Table:
        """The next table, whose first document has this number; an empty one after the last."""
        try:
            return next(tables, pa.table({}))
        except Exception as error:
            raise unreadable(f"document {first} of {self.name}, or a document after it,", error) from error


class _Copied(ArrowFiles):
    """The copy of a stream; messages number its documents as the stream does."""

    def __init__(self, name: str, files: Sequence[str], columns: list[str]) -> None:
        super().__init__(name, files)
        self.columns = columns

    def place(self, part: Part, number: int) -> str:
        before = _documents(self.files[: self.files.index(part.file)])
        return f"document {before + (part.first or 0) + number} of {self.name}"


def open_source(dataset: Any, split: str | None) -> Source | Stream:
    """A source of documents.

    Raises:
        ValueError: something else than a dataset, a path or a name; a path or a name that can't be read.
    """
    if isinstance(dataset, (str, os.PathLike)):
        name = os.fspath(dataset)
        found = find_files(name, split)
        if found is not None:
            kind, files = found
            return FILES[kind](name, files)
        split = split or "train"
        try:
            stream = datasets.load_dataset(name, split=split, streaming=True)
        except Exception as error:  # of many kinds, by what is wrong with the name, the dataset or the network
            raise ValueError(
                f"there is no file or folder {name}, and datasets.load_dataset can't load it from the Hub "
                f"({type(error).__name__}: {str(error).splitlines()[0]})."
            ) from error
        return Stream(stream, name, {"hub": name, "split": split})
    if isinstance(dataset, (datasets.DatasetDict, datasets.IterableDatasetDict)):
        if split not in dataset:
            given = "" if split is None else f"; got {split!r}"
            raise ValueError(f"the dataset has the splits {', '.join(dataset)}; name one of them as split{given}.")
        dataset, split = dataset[split], None
    if isinstance(dataset, (datasets.Dataset, datasets.IterableDataset)):
        if split is not None:
            raise ValueError(f"split={split!r} is for paths and names; pass dataset[{split!r}].")
        if isinstance(dataset, datasets.IterableDataset):
            return Stream(dataset, "the stream", {"stream": str(dataset.info.dataset_name)})
        if dataset.format["type"] == "custom":
            raise ValueError(
                "the dataset has a transform (set_transform, with_transform), which makes documents when they are "
                "read. Make them before: dataset.map(function, batched=True)."
            )
        return TableDataset(dataset)
    raise ValueError(
        f"dataset must be a datasets.Dataset or IterableDataset, a path, or a name on the Hub; got "
        f"{type(dataset).__name__}. Of other documents make one: datasets.Dataset.from_list(documents), or "
        "datasets.IterableDataset.from_generator(function)."
    )


def _digest(table: pa.Table) -> str:
    """A digest of all values; the same for tables that hold the same in other chunks."""
    found = hashlib.sha256()
    for name in sorted(table.column_names):
        column = table.column(name)
        found.update(name.encode())
        if types.is_list(column.type) and types.is_integer(column.type.value_type) and not column.null_count:
            values = compute.list_flatten(column)
            if not values.null_count:
                for numbers in (compute.list_value_length(column), values):
                    found.update(numbers.to_numpy().astype(np.int64).tobytes())
                continue
        found.update(repr(column.to_pylist()).encode())
    return found.hexdigest()


def _documents(files: Sequence[str]) -> int:
    """The number of documents in the files of a stream's copy."""
    total = 0
    for file in files:
        with pa.memory_map(file) as opened:
            total += sum(batch.num_rows for batch in ipc.open_stream(opened))
    return total


def _write_table(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as file, ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)

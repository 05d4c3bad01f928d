"""The steps of pack_to_disk: measure documents, plan rows, sort documents by shard, write shards.

Every step reads and writes files from one end to the other, so documents needn't fit in memory, and a disk needn't be
fast at random reads. A unit of work is a part of the source, or a shard. Its result is a file, which a resumed run
finds.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc

from tritonpack.packing.bins import Packing
from tritonpack.packing.columns import POSITIONS, SEQ_LENGTHS
from tritonpack.packing.offline.documents import Columns, lengths_of, pieces_of, read_documents, with_offsets
from tritonpack.packing.offline.folder import Folder, write
from tritonpack.packing.offline.sources import Part, Source, reading

Progress = Callable[[str, int, int], Any]
_BATCH_BYTES = 16 * 2**20  # a record batch of rows


@dataclass(frozen=True)
class Layout:
    """Which entries lie in which row, and which rows in which shard.

    An entry is a document, or a piece of one. Entries are numbered in the order of the rows.

    Attributes:
        documents, starts, lengths: (entries,) int32, int64 and int32: the document, its first token, the tokens.
        rows: (rows + 1,) int64, the entry at which each row begins.
        shards: (shards + 1,) int64, the row at which each shard begins.
    """

    documents: NDArray[np.int32]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int32]
    rows: NDArray[np.int64]
    shards: NDArray[np.int64]

    @property
    def num_shards(self) -> int:
        return len(self.shards) - 1

    def digest(self) -> str:
        found = hashlib.sha256()
        for values in (self.documents, self.starts, self.rows, self.shards):
            found.update(values.tobytes())
        return found.hexdigest()


def measure(source: Source, columns: Columns, folder: Folder, jobs: int, progress: Progress) -> list[NDArray[np.int32]]:
    """Check all documents; the lengths of those of each part."""

    def one(number: int) -> None:
        path = folder.work / f"lengths-{number:06d}.npy"
        if not path.exists():
            part = source.parts[number]
            write(path, partial(_save, values=lengths_of(_read(source, part, columns))))

    for _ in _run(one, len(source.parts), jobs, progress, "measure"):
        pass
    lengths = []
    for number in range(len(source.parts)):
        path = folder.work / f"lengths-{number:06d}.npy"
        with reading(_temporary(path), " as a row of lengths"):
            lengths.append(np.load(path))
    return lengths


def _read(source: Source, part: Part, columns: Columns) -> pa.Table:
    """The documents of a part, checked. An error of reading names the first document that it may come from."""

    def what() -> str:
        return part.file if part.first is None else f"{source.place(part, 0)}, or a document after it,"

    with reading(what):
        table = source.read(part, columns.read)
        table.validate(full=True)  # Arrow doesn't check offsets when it reads
    return read_documents(table, columns, partial(source.place, part))


def _temporary(path: Path) -> str:
    return f"the temporary file {path} (remove it, and run the same command again)"


def lay_out(packing: Packing, seed: int | None, shard_bytes: int, token_bytes: int) -> Layout:
    """Shuffle the rows of a packing, unless the seed is None, and divide them into shards of about `shard_bytes`."""
    order = np.arange(packing.num_bins)
    if seed is not None:
        order = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed))).permutation(order)
    sizes = np.diff(packing.offsets)[order]
    rows = np.concatenate([[0], np.cumsum(sizes)])
    entries = np.repeat(packing.offsets[:-1][order] - rows[:-1], sizes) + np.arange(rows[-1])
    per_shard = max(1, min(shard_bytes, 2**31 - 1) // (packing.capacity * token_bytes))
    shards = np.append(np.arange(0, packing.num_bins, per_shard), packing.num_bins)
    return Layout(packing.items[entries], packing.starts[entries], packing.lengths[entries], rows, shards)


def sort(
    source: Source,
    columns: Columns,
    layout: Layout,
    lengths: Sequence[NDArray[np.int32]],
    capacity: int,
    folder: Folder,
    jobs: int,
    progress: Progress,
) -> NDArray[np.int64]:
    """Write the entries of each part in the order of the shards, one record batch for each shard.

    Returns:
        (parts + 1,) the first document of each part.
    """
    firsts = np.concatenate([[0], np.cumsum([len(one) for one in lengths])])
    by_document = np.argsort(layout.documents, kind="stable").astype(np.int32)
    edges = np.searchsorted(layout.documents[by_document], firsts)
    shard_edges = layout.rows[layout.shards]

    def one(number: int) -> None:
        path = _run_file(folder, number)
        if path.exists() or all(folder.shard(shard, layout.num_shards).exists() for shard in range(layout.num_shards)):
            return
        part = source.parts[number]
        documents = _read(source, part, columns)
        if not np.array_equal(lengths_of(documents), lengths[number]):
            raise ValueError(
                f"{source.place(part, 0)}, or a document after it, has changed since it was measured; start again."
            )
        pieces, first_piece = pieces_of(documents, capacity)
        entries = np.sort(by_document[edges[number] : edges[number + 1]])
        wanted = first_piece[layout.documents[entries] - firsts[number]] + layout.starts[entries] // capacity
        table = pieces.take(pa.array(wanted))
        cuts = np.searchsorted(entries, shard_edges)
        write(path, partial(_write_batches, table=table, cuts=cuts))

    for _ in _run(one, len(source.parts), jobs, progress, "sort"):
        pass
    return firsts


def write_shards(
    layout: Layout, firsts: NDArray[np.int64], capacity: int, folder: Folder, jobs: int, progress: Progress
) -> pa.Schema:
    """Write the shards; returns the schema of their rows."""

    def one(shard: int) -> None:
        path = folder.shard(shard, layout.num_shards)
        if not path.exists():
            write(path, lambda file: _write_shard(file, shard, layout, firsts, capacity, folder))

    for _ in _run(one, layout.num_shards, jobs, progress, "write"):
        pass
    with pa.OSFile(str(folder.shard(0, layout.num_shards))) as file:
        return ipc.open_stream(file).schema


def _write_shard(
    path: Path, shard: int, layout: Layout, firsts: NDArray[np.int64], capacity: int, folder: Folder
) -> None:
    rows = layout.rows[layout.shards[shard] : layout.shards[shard + 1] + 1]
    part = np.searchsorted(firsts, layout.documents[rows[0] : rows[-1]], side="right") - 1
    read = np.argsort(part, kind="stable")  # the order in which entries are read: by part, then by entry
    batches = []
    for number in np.unique(part):
        run = _run_file(folder, number)
        with reading(_temporary(run)), pa.OSFile(str(run)) as file:
            batches.append(ipc.open_file(file).get_batch(shard))
    place = np.empty(len(read), dtype=np.int64)
    place[read] = np.arange(len(read))
    pieces = pa.Table.from_batches(batches)
    per_batch = max(1, _BATCH_BYTES * (len(rows) - 1) // max(pieces.nbytes, 1))
    del batches
    pieces = pieces.combine_chunks()
    starts = range(0, len(rows) - 1, per_batch)
    tables = (
        join_rows(pieces.take(pa.array(place[some[0] - rows[0] : some[-1] - rows[0]])), some - some[0], capacity)
        for some in (rows[start : start + per_batch + 1] for start in starts)
    )
    first = next(tables)
    with pa.OSFile(str(path), "wb") as file, ipc.new_stream(file, first.schema) as writer:
        writer.write_table(first)
        for table in tables:
            writer.write_table(table)


def join_rows(pieces: pa.Table, rows: NDArray[np.int64], capacity: int) -> pa.Table:
    """Rows of consecutive pieces, with the columns that tell their documents apart.

    Args:
        pieces: the documents or pieces, one list each, in the order of the rows.
        rows: (rows + 1,) the piece at which each row begins.
        capacity: tokens that fit into a row.
    """
    lengths = lengths_of(pieces)
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    table = with_offsets(pieces, starts[rows])
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    positions = positions.astype(np.uint16 if capacity <= 2**16 else np.int32)
    offsets = pa.array(starts[rows].astype(np.int32))
    table = table.append_column(POSITIONS, pa.ListArray.from_arrays(offsets, pa.array(positions)))
    counts = pa.ListArray.from_arrays(pa.array(rows.astype(np.int32)), pa.array(lengths))
    return table.append_column(SEQ_LENGTHS, counts)


def _write_batches(path: Path, table: pa.Table, cuts: NDArray[np.int64]) -> None:
    table = table.combine_chunks()
    with pa.OSFile(str(path), "wb") as file, ipc.new_file(file, table.schema) as writer:
        for start, stop in pairwise(cuts.tolist()):
            batches = table.slice(start, stop - start).to_batches()
            writer.write_batch(batches[0] if batches else _no_rows(table.schema))


def _no_rows(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def _run_file(folder: Folder, part: int) -> Path:
    return folder.work / f"sorted-{part:06d}.arrow"


def _save(path: Path, values: NDArray[Any]) -> None:
    text = io.BytesIO()
    np.save(text, values)
    path.write_bytes(text.getvalue())  # np.save to a file may not notice that the disk is full


def _run(work: Callable[[int], None], count: int, jobs: int, progress: Progress, step: str) -> Iterator[None]:
    """Do the work in threads; the error of the first number that fails is raised.

    Arrow and NumPy leave Python's lock while they read, copy and write, so threads use all cores, with one copy of the
    plan.
    """
    progress(step, 0, count)
    pool = ThreadPoolExecutor(jobs)
    try:
        futures = [pool.submit(work, number) for number in range(count)]
        for number, future in enumerate(futures):
            future.result()
            progress(step, number + 1, count)
            yield
    finally:
        pool.shutdown(cancel_futures=True)

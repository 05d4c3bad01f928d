"""Pack Parquet files on a Spark cluster: the rows of tritonpack.pack_to_disk, made by many machines.

    pip install 'pyspark>=4' datasets          # Java 17 or later must be there
    python examples/pack_with_spark.py documents/ rows/ --capacity 32768 --master 'local[*]'

The driver gets the length of every document and plans the rows. Spark sorts the documents by row. Every run makes the
same rows in the same order, on however many machines: a document is known by its file and its place in the file.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, ByteType, IntegerType, LongType, StructField, StructType

from tritonpack import pack
from tritonpack.packing.offline.documents import Columns, choose_columns, lengths_of, pieces_of, read_documents
from tritonpack.packing.offline.steps import join_rows, lay_out

FILE, PLACE, ENTRY, ROW = "_file", "_place", "_entry", "_row"
Batches = Iterator[pa.RecordBatch]


def read(spark: SparkSession, source: str) -> tuple[DataFrame, Columns]:
    """The documents of Parquet files with the number of their file and their place in it, and the columns to keep."""
    found = spark.read.parquet(source)
    columns = choose_columns(found.columns, None, source)
    paths = sorted(row[0] for row in found.select("_metadata.file_path").distinct().collect())
    files = {path: number for number, path in enumerate(paths)}
    numbers = F.create_map(*(F.lit(value) for item in files.items() for value in item))
    file, place = numbers[F.col("_metadata.file_path")], F.col("_metadata.row_index")
    return found.select(*columns.read, file.alias(FILE), place.alias(PLACE)), columns


def checked(batch: pa.RecordBatch, columns: Columns, source: str) -> pa.Table:
    """The documents of a batch; ValueError names one that can't be packed."""
    files, places = batch.column(FILE), batch.column(PLACE)

    def place(number: int) -> str:
        return f"document {places[int(number)]} of file {files[int(number)]} of {source}, in the order of names"

    return read_documents(pa.Table.from_batches([batch]), columns, place)


def measure(documents: DataFrame, columns: Columns, source: str) -> tuple[np.ndarray, np.ndarray]:
    """(documents,) the tokens of each document in the order of files, and (files,) the first document of each file."""

    def lengths(batches: Batches) -> Batches:
        for batch in batches:
            tokens = pa.array(lengths_of(checked(batch, columns, source)))
            yield pa.RecordBatch.from_arrays([batch.column(FILE), batch.column(PLACE), tokens], [FILE, PLACE, "tokens"])

    found = documents.mapInArrow(lengths, f"{FILE} int, {PLACE} long, tokens int").toArrow()
    file, place, tokens = (np.asarray(column) for column in found.columns)
    order = np.lexsort((place, file))
    firsts = np.searchsorted(file[order], np.arange(file.max() + 1))
    assert np.array_equal(place[order] + firsts[file[order]], np.arange(len(order)))
    return tokens[order], firsts


def to_rows(columns: Columns, source: str, capacity: int, plan: Callable[[], dict]) -> tuple[Callable, Callable]:
    """The two functions that Spark runs on documents: number their pieces, and join sorted pieces to rows."""

    def number(batches: Batches) -> Batches:
        of = plan()
        for batch in batches:
            pieces, first_piece = pieces_of(checked(batch, columns, source), capacity)
            document = of["firsts"][np.asarray(batch.column(FILE))] + np.asarray(batch.column(PLACE))
            begin, end = of["begin"][document], of["begin"][document + 1]  # the entries of each document
            local = np.repeat(np.arange(len(document)), end - begin)
            within = np.arange(len(local)) - np.repeat(np.cumsum(end - begin) - (end - begin), end - begin)
            entry = of["entries"][begin[local] + within]
            table = pieces.take(pa.array(first_piece[local] + of["starts"][entry] // capacity))
            table = table.append_column(ENTRY, pa.array(entry, pa.int64()))
            row = np.searchsorted(of["rows"], entry, side="right") - 1
            yield from table.append_column(ROW, pa.array(row, pa.int64())).combine_chunks().to_batches()

    def join(batches: Batches) -> Batches:
        held = None
        for batch in batches:
            table = pa.Table.from_batches([batch])
            table = table if held is None else pa.concat_tables([held, table])
            row = np.asarray(table.column(ROW))
            whole = int(np.searchsorted(row, row[-1]))  # the last row may go on in the next batch
            held = table.slice(whole)
            yield from rows_of(table.slice(0, whole))
        if held is not None:
            yield from rows_of(held)

    def rows_of(pieces: pa.Table) -> Batches:
        if not len(pieces):
            return
        row = np.asarray(pieces.column(ROW))
        edges = np.concatenate([[0], np.flatnonzero(np.diff(row)) + 1, [len(row)]])
        found = join_rows(pieces.drop_columns([ENTRY, ROW]).combine_chunks(), edges, capacity)
        positions = found.column("position_ids").cast(pa.list_(pa.int32()))  # Spark has no unsigned integers
        found = found.set_column(found.column_names.index("position_ids"), "position_ids", positions)
        yield from found.combine_chunks().to_batches()

    return number, join


def main(
    source: str, out: str, capacity: int, *, overlong: str = "error", seed: int = 0, files: int = 8, master: str = ""
) -> int:
    """Pack; returns the number of rows."""
    if master.startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName("pack").config("spark.sql.execution.arrow.maxRecordsPerBatch", "4096")
    spark = (builder.master(master) if master else builder).getOrCreate()
    documents, columns = read(spark, source)
    lengths, firsts = measure(documents, columns, source)
    packing = pack(lengths, capacity, overlong=overlong)
    layout = lay_out(packing, seed, 2**27, columns.token_bytes)
    entries = np.argsort(layout.documents, kind="stable").astype(np.int32)
    begin = np.searchsorted(layout.documents[entries], np.arange(len(lengths) + 1))
    plan = {"firsts": firsts, "entries": entries, "begin": begin, "starts": layout.starts, "rows": layout.rows}
    shared = spark.sparkContext.broadcast(plan)

    kinds = {name: IntegerType() for name in columns.written}
    kinds |= {name: ByteType() for name in columns.written if name.endswith(("_mask", "_masks"))}
    pieces = [StructField(name, ArrayType(kind)) for name, kind in kinds.items()]
    rows = [
        *pieces,
        StructField("position_ids", ArrayType(IntegerType())),
        StructField("seq_lengths", ArrayType(IntegerType())),
    ]
    number, join = to_rows(columns, source, capacity, lambda: shared.value)
    numbered = documents.mapInArrow(
        number, StructType([*pieces, StructField(ENTRY, LongType()), StructField(ROW, LongType())])
    )
    ordered = numbered.repartitionByRange(files, ROW).sortWithinPartitions(ENTRY)
    ordered.mapInArrow(join, StructType(rows)).write.parquet(out)
    print(f"{packing!r} of at least {packing.lower_bound}. {packing.report}.")
    return packing.num_bins


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="Parquet files with tokenized documents")
    parser.add_argument("out", help="a new folder")
    parser.add_argument("--capacity", type=int, required=True, help="tokens of a row")
    parser.add_argument("--overlong", choices=["error", "truncate", "split", "drop"], default="error")
    parser.add_argument("--seed", type=int, default=0, help="decides the order of the rows")
    parser.add_argument("--files", type=int, default=8, help="files that are written")
    parser.add_argument("--master", default="", help="such as 'local[*]'; spark-submit sets it")
    main(**vars(parser.parse_args()))

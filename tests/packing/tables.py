"""Documents, and the files and datasets that hold them."""

import json
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("datasets")

import pyarrow as pa
from pyarrow import ipc, parquet

LENGTHS = [3, 9, 5, 2, 8, 1, 7, 4, 6, 6, 10, 2, 3, 5]


def documents(lengths=LENGTHS):
    """Documents whose tokens and labels tell where they come from."""
    return [
        {
            "input_ids": [100 * number + place for place in range(length)],
            "labels": [-100 if place < 2 else 100 * number + place for place in range(length)],
        }
        for number, length in enumerate(lengths)
    ]


def random_documents(count, longest, seed=0):
    lengths = np.random.default_rng(seed).integers(1, longest + 1, count)
    return documents(lengths.tolist())


def write_files(folder, kind, given, files=3):
    """Write documents as several files, each of several record batches, row groups or lines."""
    folder.mkdir(parents=True, exist_ok=True)
    edges = [len(given) * number // files for number in range(files + 1)]
    for number, (start, stop) in enumerate(pairwise(edges)):
        path = folder / f"{number}.{kind}"
        if kind == "jsonl":
            lines = [json.dumps(document) for document in given[start:stop]]
            path.write_text("\n\n".join(lines) + ("" if number else "\n"))  # blank lines, and a last one without end
            continue
        table = pa.Table.from_pylist(given[start:stop])
        if kind == "parquet":
            parquet.write_table(table, path, row_group_size=2)
        else:
            with ipc.new_stream(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=2)
    return folder


def documents_of(rows):
    """The documents of rows, as (row, document), cut at their seq_lengths."""
    found = []
    for number, row in enumerate(rows):
        start = 0
        for length in row["seq_lengths"]:
            names = [name for name in row if name not in ("seq_lengths", "position_ids")]
            found.append((number, {name: row[name][start : start + length] for name in names}))
            assert row["position_ids"][start : start + length] == list(range(length))
            start += length
        assert start == len(row["input_ids"]) == len(row["position_ids"])
    return found

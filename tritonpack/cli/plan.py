"""`tritonpack plan`: shows in a table how full and how even batches are, packed by tritonpack and in simpler ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from json import dumps, loads
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.table import Table

from tritonpack.cli.machine import console_beside, percent, require_writable, write_json
from tritonpack.packing.bins import pack
from tritonpack.packing.lengths import MAX_INT32, Overlong, count, fit_lengths, whole_lengths
from tritonpack.packing.planning.plan import Plan, plan_epoch
from tritonpack.packing.planning.statistics import plan_statistics

Lengths = NDArray[Any]  # (documents,) integers, each from 1 to the capacity
Measures = Mapping[str, Any]  # the fields of PlanStatistics

# The ending of a file of lengths -> what it holds; the first three have no columns.
CONTENT = {
    ".json": "a list of documents, in JSON and UTF-8", ".npy": "an array of integers", ".txt": "whole numbers",
    ".csv": "a table whose first line names the columns", ".jsonl": "JSON lines", ".parquet": "a Parquet file",
}  # fmt: skip
# The columns that are read without --column; the first that a file has.
USUAL_COLUMNS = ("length", "lengths", "input_ids")
OURS, PADDED = "tritonpack", "padded"


def padded_rows(lengths: Lengths, capacity: int, num_ranks: int, seed: int = 0) -> Plan:
    """Rows of as many documents as fit if all are padded to the longest document."""
    per_row = capacity // int(lengths.max())
    rows = len(lengths) // (per_row * num_ranks) * num_ranks
    order = np.random.default_rng(seed).permutation(len(lengths)).astype(np.int32)
    return Plan(order[: rows * per_row], np.arange(rows + 1) * per_row, num_ranks, capacity)


def next_fit_rows(lengths: Lengths, capacity: int, num_ranks: int, seed: int | Sequence[int] = 0) -> Plan:
    """Rows filled in order; a document that doesn't fit begins a new row. Rows are dealt out to the ranks."""
    order = np.random.default_rng(seed).permutation(len(lengths)).astype(np.int32)
    offsets = pack(lengths[order], capacity, algorithm="next_fit").offsets
    kept = offsets[: (len(offsets) - 1) // num_ranks * num_ranks + 1]
    return Plan(order[: kept[-1]], kept, num_ranks, capacity)


# The simpler ways, which leave out documents that don't make a whole step.
BASELINES: dict[str, Callable[..., Plan]] = {PADDED: padded_rows, "next-fit": next_fit_rows}

# The header of each column, the statistic that it shows, and how. docs/command-line.md explains them.
_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("steps", "num_steps", "{:,}".format),
    ("rows\nfull %", "efficiency", percent),
    ("ranks\nbusy %", "utilization", percent),
    ("busy by\ncost %", "cost_utilization", percent),
    ("L2 lag\nmean", "l2_lag", "{:,.0f}".format),
    ("L2 lag\nmost", "l2_lag_max", "{:,.0f}".format),
    ("padding\n%", "padding", lambda share: f"{100 * share:.1f}"),
    ("length\nspread", "spread", "{:.1f}x".format),
    ("covered\n%", "tokens_covered", percent),
)


def examine(
    *, path: Path, column: str | None, capacity: int, num_ranks: int, seed: int, overlong: Overlong, json: Path | None,
    **options: Any,
) -> None:  # fmt: skip
    """Read the lengths, plan them in each way, print the table, write the numbers. `options` are for `plan_epoch`."""
    given = {name: value for name, value in locals().items() if name != "options"} | options
    require_writable(json, read=path)
    console = console_beside(json)
    with console.status("reading lengths") as status:
        documents = read_lengths(path, column)
        remedy = "pass --overlong truncate, split or drop"
        fitted = fit_lengths(documents, capacity, overlong, name="--capacity", remedy=remedy)
        tokens, ways = int(documents.sum()), {}
        strategies: dict[str, Any] = {OURS: partial(plan_epoch, **options), **BASELINES}
        for name, strategy in strategies.items():
            status.update(f"planning: {name}")
            plan = strategy(fitted.lengths, capacity, num_ranks, seed=seed)
            found = plan_statistics(plan, fitted.lengths, padded=name == PADDED)
            covered = found.tokens_covered * int(fitted.lengths.sum()) / tokens  # of all, before any were dropped
            ways[name] = asdict(found) | {"tokens_covered": covered}

    size = f"{count(len(documents), 'document')}, {count(tokens, 'token')}"
    spread = f"from {documents.min():,} to {documents.max():,}, {documents.mean():,.0f} in the mean"
    console.print(f"{path.name}: {size}; {spread}.", markup=False)
    if fitted.report.documents:
        console.print(f"{fitted.report}.")
    console.print(table(ways))
    console.print(*findings(ways), sep="\n", markup=False)
    numbers = {"options": given, "documents": len(documents), "tokens": tokens, "ways": ways}
    write_json(json, numbers | {"overlong": asdict(fitted.report)})


def table(ways: Mapping[str, Measures]) -> Table:
    """One row per way. Without a step there is nothing to measure."""
    result = Table(box=SIMPLE_HEAD, padding=0)  # within the 80 columns of a plain terminal
    result.add_column("strategy", no_wrap=True)
    for header, *_ in _COLUMNS:
        result.add_column(header, justify="right", no_wrap=True)
    for name, measures in ways.items():
        shown = _COLUMNS if measures["num_steps"] else _COLUMNS[:1]
        cells = ["" if measures[key] is None else show(measures[key]) for _, key, show in shown]
        result.add_row(name, *cells, style="bold" if name == OURS else "")
    return result


def findings(ways: Mapping[str, Measures]) -> Iterator[str]:
    """The findings of the table about tritonpack's plan, in sentences."""
    ours, padded = ways[OURS], ways[PADDED]
    if padded["num_steps"]:
        times = ours["cost_utilization"] / padded["cost_utilization"]
        yield (
            f"By the cost of a Llama of 8 billion parameters padded rows take {times:.2f} times as long as "
            f"tritonpack's for the same tokens: {padded['padding']:.1%} of what they compute is padding."
        )
    if left_out := 1 - ours["tokens_covered"]:
        advice = "--tail spread or keep trains on all that --overlong leaves"
        yield f"tritonpack leaves {left_out:.2%} of the tokens out of an epoch; {advice}."


def read_lengths(path: Path, column: str | None = None) -> NDArray[np.int64]:
    """(documents,) int64, the number of tokens of each document, in the order of the file.

    Args:
        path: a file with one of the endings of `CONTENT`. A document is an integer, its length, or a list of token ids.
        column: the column of a table with the documents; None takes the only one, or the first of `USUAL_COLUMNS`.

    Raises:
        ValueError: its content isn't what its ending says, or a value is no document. The message names the file.
    """
    ending = path.suffix.lower()
    if ending not in CONTENT:
        raise ValueError(f"{path} ends in {path.suffix!r}; lengths are read from {', '.join(CONTENT)}")
    has_columns = ending in (".csv", ".jsonl", ".parquet")
    if column is not None and not has_columns:
        raise ValueError(f"{path} has no columns, but --column {column} was asked for; leave it out")
    try:
        lengths = whole_lengths(_read_column(path, ending, column) if has_columns else _read_list(path, ending))
        if lengths.max() > MAX_INT32:  # sums over documents stay within 64 bits
            raise ValueError(f"document {lengths.argmax()} has {lengths.max()} tokens; at most {MAX_INT32} are planned")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return lengths.astype(np.int64)


@contextmanager
def _parsing(ending: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # json, numpy and pyarrow raise many kinds
        raise ValueError(f"the file doesn't hold {CONTENT[ending]}: {' '.join(str(error).split())}") from error


def _read_list(path: Path, ending: str) -> NDArray[Any]:
    with _parsing(ending):
        if ending == ".npy":
            return np.load(path, allow_pickle=False)
        text = path.read_text(encoding="utf-8-sig")
        documents = [int(word) for word in text.split()] if ending == ".txt" else loads(text)
        if not isinstance(documents, list):
            raise ValueError(f"it holds {dumps(documents):.40}")
    counts = [len(one) if isinstance(one, list) and all(type(x) is int for x in one) else one for one in documents]
    for number, tokens in enumerate(counts):
        if type(tokens) is not int:
            raise ValueError(f"document {number} is {dumps(tokens):.40}, neither a number of tokens nor a list")
    return np.array(counts)


def _read_column(path: Path, ending: str, column: str | None) -> NDArray[Any]:
    import pyarrow.json
    from pyarrow import compute, csv, dataset, types

    formats: dict[str, Any] = {
        ".csv": dataset.CsvFileFormat(csv.ParseOptions(newlines_in_values=True)), ".parquet": "parquet",
        ".jsonl": dataset.JsonFileFormat(read_options=pyarrow.json.ReadOptions(block_size=2**26)),
    }  # fmt: skip
    with _parsing(ending):
        table = dataset.dataset(str(path), format=formats[ending])
        names = table.schema.names
        if ending == ".csv" and not any(map(str.isalpha, "".join(names))):
            raise ValueError(f"its first line is {','.join(names):.40}; without names, make it a .txt file")
    name = column or next((name for name in (*USUAL_COLUMNS, *names[: len(names) == 1]) if name in names), None)
    if name not in names:
        missing = f"there is no column {column!r}; " if column else ""
        listed = ", ".join(map(repr, names)) or "none"
        raise ValueError(f"{missing}its columns are {listed:.200}; name the one with the lengths with --column")
    values, kind = compute.field(name), table.schema.field(name).type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        values, kind = compute.list_value_length(values), kind.value_type
    if not types.is_integer(kind):
        raise ValueError(f"column {name!r} has values of the type {kind}, not integers or lists of token ids")
    with _parsing(ending):  # reads in parts, because the token ids of a whole file may exceed the memory
        lengths = table.to_table(columns={name: values})[name]
    if lengths.null_count:
        raise ValueError(f"column {name!r} has missing values (null), not integers or lists of token ids")
    return lengths.to_numpy()

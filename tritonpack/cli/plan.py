"""`tritonpack plan`: shows in a table how full and how even batches are, packed by tritonpack and in simpler ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.table import Table

from tritonpack.cli.lengths import read_lengths
from tritonpack.cli.machine import console_beside, percent, require_writable, write_json
from tritonpack.packing.bins import pack
from tritonpack.packing.lengths import Overlong, count, fit_lengths
from tritonpack.packing.planning.plan import Plan, plan_epoch
from tritonpack.packing.planning.statistics import plan_statistics

Lengths = NDArray[Any]  # (documents,) integers, each from 1 to the capacity
Measures = Mapping[str, Any]  # the fields of PlanStatistics


def padded_rows(lengths: Lengths, capacity: int, num_ranks: int, seed: int = 0) -> Plan:
    """Rows of as many documents as fit if all are padded to the longest document."""
    per_row = capacity // int(lengths.max())
    rows = len(lengths) // (per_row * num_ranks) * num_ranks
    return Plan(_shuffled(lengths, seed)[: rows * per_row], np.arange(rows + 1) * per_row, num_ranks, capacity)


def next_fit_rows(lengths: Lengths, capacity: int, num_ranks: int, seed: int | Sequence[int] = 0) -> Plan:
    """Rows filled in order; a document that doesn't fit begins a new row. Rows are dealt out to the ranks."""
    order = _shuffled(lengths, seed)
    offsets = pack(lengths[order], capacity, algorithm="next_fit").offsets
    kept = offsets[: (len(offsets) - 1) // num_ranks * num_ranks + 1]
    return Plan(order[: kept[-1]], kept, num_ranks, capacity)


def _shuffled(lengths: Lengths, seed: int | Sequence[int]) -> NDArray[np.int32]:
    return np.random.default_rng(seed).permutation(len(lengths)).astype(np.int32)


OURS, PADDED = "tritonpack", "padded"
# The simpler ways, which leave out documents that don't make a whole step: functions of (lengths, capacity, num_ranks,
# seed=).
BASELINES: dict[str, Callable[..., Plan]] = {PADDED: padded_rows, "next-fit": next_fit_rows}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.1f}"


# The header of each column, the statistic that it shows, and how. docs/command-line.md explains them.
_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("steps", "num_steps", _number),
    ("rows\nfull %", "efficiency", percent),
    ("ranks\nbusy %", "utilization", percent),
    ("busy by\ncost %", "cost_utilization", percent),
    ("L2 lag\nmean", "l2_lag", _number),
    ("L2 lag\nmost", "l2_lag_max", _number),
    ("padding\n%", "padding", lambda share: f"{100 * share:.1f}"),
    ("length\nspread", "spread", "{:.1f}x".format),
    ("covered\n%", "tokens_covered", percent),
)


def examine(
    *, path: Path, column: str | None, capacity: int, num_ranks: int, seed: int, overlong: Overlong, json: Path | None,
    **options: Any,
) -> None:  # fmt: skip
    """Read the lengths, plan them in each way, print the table, write the numbers.

    The arguments are the command's options; `options` are those that only `plan_epoch` takes.
    """
    given = {**locals(), **options}
    del given["options"]
    require_writable(json, inputs=[path])
    console = console_beside(json)
    with console.status("reading lengths") as status:
        documents = read_lengths(path, column)
        fitted = fit_lengths(
            documents, capacity, overlong, name="--capacity", remedy="pass --overlong truncate, split or drop"
        )
        tokens, ways = int(documents.sum()), {}
        strategies: dict[str, Any] = {OURS: partial(plan_epoch, **options), **BASELINES}
        for name, strategy in strategies.items():
            status.update(f"planning: {name}")
            plan = strategy(fitted.lengths, capacity, num_ranks, seed=seed)
            ways[name] = measure(name, plan, fitted.lengths, tokens)

    size = f"{count(len(documents), 'document')}, {count(tokens, 'token')}"
    spread = f"from {documents.min():,} to {documents.max():,}, {documents.mean():,.0f} in the mean"
    console.print(f"{path.name}: {size}; {spread}.", markup=False)
    if fitted.report.documents:
        console.print(f"{fitted.report}.")
    console.print(table(ways))
    console.print(*findings(ways), sep="\n", markup=False)
    numbers = {"options": given, "documents": len(documents), "tokens": tokens, "ways": ways}
    write_json(json, numbers | {"overlong": asdict(fitted.report)})


def measure(name: str, plan: Plan, lengths: Lengths, total_tokens: int) -> Measures:
    """The statistics of a plan.

    `total_tokens` counts all documents as they were before they were truncated, split or dropped.
    """
    found = plan_statistics(plan, lengths, padded=name == PADDED)
    return asdict(found) | {"tokens_covered": found.tokens_covered * int(lengths.sum()) / total_tokens}


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
    if without := [name for name in ways if not ways[name]["num_steps"]]:
        yield f"There are too few documents for a step of {', '.join(without)}, which leave out an incomplete step."
    if padded["num_steps"]:
        times = ours["cost_utilization"] / padded["cost_utilization"]
        yield (
            f"By the cost of a Llama of 8 billion parameters padded rows take {times:.2f} times as long as "
            f"tritonpack's for the same tokens: {padded['padding']:.1%} of what they compute is padding."
        )
    if left_out := 1 - ours["tokens_covered"]:
        advice = "--tail spread or keep trains on all that --overlong leaves"
        yield f"tritonpack leaves {left_out:.2%} of the tokens out of an epoch; {advice}."

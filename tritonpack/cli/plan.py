"""`tritonpack plan`: shows in a table, and in rows of letters, how full and how even batches are, packed and padded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from tritonpack.cli.lengths import read_lengths
from tritonpack.cli.machine import console_beside, require_writable, write_json
from tritonpack.cli.strategies import BASELINES, OURS, PADDED, Result, measure
from tritonpack.packing.lengths import Overlong, count, fit_lengths
from tritonpack.packing.planning.plan import Plan, plan_epoch
from tritonpack.packing.planning.statistics import EVEN_LENGTH

# The header of each column, the statistic that it shows, and whether it compares ranks. docs/command-line.md explains
# them.
_COLUMNS = (
    ("steps", "num_steps", False),
    ("rows\nfull %", "efficiency", False),
    ("ranks\nbusy %", "utilization", True),
    ("busy by\ncost %", "cost_utilization", True),
    ("L2 lag\nmean", "l2_lag", True),
    ("L2 lag\nmost", "l2_lag_max", True),
    ("padding\n%", "padding", False),
    ("length\nspread", "spread", False),
    ("covered\n%", "tokens_covered", False),
)
_DRAWN, _WIDTH = 8, 72  # rows, and letters of a full row
# Okabe and Ito's palette, which people with common forms of color blindness can tell apart, its dark colors lighter.
_COLORS = ("#56B4E9", "#E69F00", "#66C2A5", "#CC79A7", "#F0E442", "#E0885A")


def examine(
    *, path: Path, column: str | None, capacity: int, num_ranks: int, seed: int, overlong: Overlong, json: Path | None,
    **options: Any,
) -> None:  # fmt: skip
    """Read the lengths, plan them with each strategy, print the table and the first rows, write the numbers.

    Args:
        path: the file of lengths.
        json: the file for the numbers; with "-" they go to standard output and the table to standard error.
        **options: further options of `plan_epoch`. The others are the command's.

    Raises:
        ValueError: the lengths can't be read or planned, or an output can't be written.
        OSError: a result can't be written.
    """
    given = {**locals(), **options}
    del given["options"]
    require_writable(json, inputs=[path])
    console = console_beside(json)
    with console.status("reading lengths") as status:
        documents = read_lengths(path, column)
        fitted = fit_lengths(documents, capacity, overlong, name="--capacity")
        tokens, results = int(documents.sum()), []
        strategies: dict[str, Any] = {OURS: partial(plan_epoch, **options), **BASELINES}
        for name, strategy in strategies.items():
            status.update(f"planning: {name}")
            plan = strategy(fitted.lengths, capacity, num_ranks, seed=seed)
            results.append(measure(name, plan, fitted.lengths, tokens))

    size = f"{count(len(documents), 'document')}, {count(tokens, 'token')}"
    spread = f"from {documents.min():,} to {documents.max():,}, {documents.mean():,.0f} in the mean"
    console.print(f"{path.name}: {size}; {spread}.", markup=False)
    if fitted.report.documents:
        console.print(f"{fitted.report}.")
    console.print(table(results))
    console.print(*findings(results), sep="\n", markup=False)
    console.print(*rows_of_letters(results[0].plan, fitted.lengths, seed), sep="\n")
    ways = {result.name: result.measures for result in results}
    numbers = {"options": given, "documents": len(documents), "tokens": tokens, "ways": ways}
    write_json(json, numbers | {"overlong": asdict(fitted.report)})


def table(results: Sequence[Result]) -> Table:
    """One row per strategy. On one rank no column compares ranks, and none is 0 everywhere."""
    result = Table(box=SIMPLE_HEAD, padding=0)  # within the 80 columns of a plain terminal
    result.add_column("strategy", no_wrap=True)
    alone = results[0].plan.num_ranks == 1
    shown = [c for c in _COLUMNS if not alone or (not c[2] and any(found.measures[c[1]] for found in results))]
    for header, *_ in shown:
        result.add_column(header, justify="right", no_wrap=True)
    for name, _, measures in results:
        planned = bool(measures["num_steps"])  # without a step there is nothing to measure
        cells = [_cell(key, measures[key]) if planned or key == "num_steps" else "" for _, key, _ in shown]
        result.add_row(name, *cells, style="bold" if name == OURS else "")
    return result


def findings(results: Sequence[Result]) -> Iterator[str]:
    """What the table says about tritonpack's plan, in sentences."""
    measures = {found.name: {key: value or 0.0 for key, value in found.measures.items()} for found in results}
    ours, padded = measures[OURS], measures[PADDED]
    if without := [name for name in measures if not measures[name]["num_steps"]]:
        yield f"There are too few documents for a step of {', '.join(without)}, which leave out an incomplete step."
    yield (
        "Costs are those of a Llama of 8 billion parameters: attention to a document of "
        f"{EVEN_LENGTH:,} tokens takes as long as all else."
    )
    if padded["num_steps"]:
        times = ours["cost_utilization"] / padded["cost_utilization"]
        waits = ", and ranks wait for the longest documents" if results[0].plan.num_ranks > 1 else ""
        yield (
            f"By this cost padded rows take {times:.2f} times as long as tritonpack's for the same tokens: "
            f"{padded['padding']:.1%} of what they compute is padding{waits}."
        )
    if left_out := 1 - ours["tokens_covered"]:
        advice = "--tail spread or keep trains on all that --overlong leaves"
        yield f"tritonpack leaves {left_out:.2%} of the tokens out of an epoch; {advice}."


def rows_of_letters(plan: Plan, lengths: NDArray[np.integer], seed: int) -> Iterator[str | Text]:
    """The first rows of tritonpack's plan, and the same documents padded, in random order; a letter a document."""
    rows = [plan.row(*divmod(n, plan.num_ranks)) for n in range(min(_DRAWN, plan.num_steps * plan.num_ranks))]
    order = np.random.default_rng(seed).permutation(np.concatenate(rows)).tolist()
    letter = {document: number for number, document in enumerate(order)}
    yield f"The first rows of tritonpack's plan, of {count(plan.capacity, 'token')} each; a letter is a document:"
    yield _drawn([[(letter[one], int(lengths[one])) for one in row.tolist()] for row in rows], plan.capacity)
    per_row, padded = plan.capacity // int(lengths.max()), []
    for begin in range(0, len(order), per_row):
        part = lengths[order[begin : begin + per_row]].tolist()
        padded.append([x for number, n in enumerate(part, begin) for x in ((number, n), (None, max(part) - n))])
    yield f"The same documents take {count(len(padded), 'padded row')} (a dot is padding)" + (
        f"; the first {_DRAWN}:" if len(padded) > _DRAWN else ":"
    )
    yield _drawn(padded[:_DRAWN], plan.capacity)


def _drawn(rows: Sequence[Sequence[tuple[int | None, int]]], capacity: int) -> Text:
    """Rows of segments, each a document's number, or None for padding, and its tokens."""
    picture = Text(no_wrap=True)
    for row in rows:
        for (number, length), end in zip(row, accumulate(length for _, length in row), strict=True):
            cells = _WIDTH * end // capacity - _WIDTH * (end - length) // capacity
            what = "." if number is None else ascii_uppercase[number % 26]
            picture.append(what * cells, "dim" if number is None else f"black on {_COLORS[number % len(_COLORS)]}")
        picture.append("\n")
    return picture


def _cell(key: str, value: float | None) -> str:
    if value is None:
        return ""
    if key == "padding":
        return f"{100 * value:.1f}"
    if key == "spread":
        return f"{value:.1f}x"
    if key in ("num_steps", "l2_lag", "l2_lag_max"):
        return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.1f}"
    return "100" if value == 1 else f"{min(100 * value, 99.99):.2f}"  # 100 means all

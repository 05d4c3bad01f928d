"""`tritonpack plan`: shows in a table and a picture how full and how even batches are, packed and padded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tritonpack.cli.figures import draw_plan
from tritonpack.cli.lengths import read_lengths
from tritonpack.cli.machine import console_beside, require_writable, write_json
from tritonpack.cli.strategies import BASELINES, NEXT_FIT, OURS, PADDED, Result, measure
from tritonpack.packing.lengths import Overlong, count, fit_lengths
from tritonpack.packing.planning.plan import plan_epoch
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


def examine(
    *, path: Path, column: str | None, capacity: int, num_ranks: int, seed: int, overlong: Overlong, out: Path,
    json: Path | None, **options: Any,
) -> None:  # fmt: skip
    """Read the lengths, plan them with each strategy, print the table, write the numbers and the picture.

    Args:
        path: the file of lengths.
        out: a folder or a .png file.
        json: the file for the numbers; with "-" they go to standard output and the table to standard error.
        **options: further options of `plan_epoch`. The others are the command's.

    Raises:
        ValueError: the lengths can't be read or planned, or an output can't be written.
        OSError: a result can't be written.
    """
    given = {**locals(), **options}
    del given["options"]
    if out.suffix.lower() not in ("", ".png") and not out.is_dir():
        advice = "name a file that ends in .png, or a folder without an ending"
        raise ValueError(f"--out {out} ends in {out.suffix}, and the picture is a PNG; {advice}")
    picture = out if out.suffix.lower() == ".png" else out / "plan.png"
    require_writable(json, "--json", [path, picture])
    require_writable(picture, "--out", [path])
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
    ways = {result.name: result.measures for result in results}
    numbers = {"options": given, "documents": len(documents), "tokens": tokens, "ways": ways}
    write_json(json, numbers | {"overlong": asdict(fitted.report)})
    other = next(result for result in results if result.name == NEXT_FIT)  # drawn beside tritonpack's
    title = f"{path.name}: {count(num_ranks, 'rank')} of {count(capacity, 'token')}"
    draw_plan(picture, results[0], other, fitted.lengths, title, seed)
    console.print(f"Picture: {picture}", soft_wrap=True, markup=False)


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
    ours, padded, plan = measures[OURS], measures[PADDED], results[0].plan
    if without := [name for name in measures if not measures[name]["num_steps"]]:
        yield f"There are too few documents for a step of {', '.join(without)}, which leave out an incomplete step."
    yield (
        "Costs are those of a Llama of 8 billion parameters: attention to a document of "
        f"{EVEN_LENGTH:,} tokens takes as long as all else."
    )
    if padded["num_steps"]:
        times = ours["cost_utilization"] / padded["cost_utilization"]
        waits = ", and ranks wait for the longest documents" if plan.num_ranks > 1 else ""
        yield (
            f"By this cost padded rows take {times:.2f} times as long as tritonpack's for the same tokens: "
            f"{padded['padding']:.1%} of what they compute is padding{waits}."
        )
    if plan.steps_together > 1:
        yield (
            f"A step holds about {count(round(ours['documents_per_step']), 'document')}, so {plan.steps_together} "
            f"steps are planned at once. A document moves by fewer than {3 * plan.steps_together} steps."
        )
    if left_out := 1 - ours["tokens_covered"]:
        advice = "--tail spread or keep trains on all that --overlong leaves"
        yield f"tritonpack leaves {left_out:.2%} of the tokens out of an epoch; {advice}."


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

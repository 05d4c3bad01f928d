"""`tritonpack plan`: what packing makes of documents of given lengths, beside simpler ways, as a table and a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tritonpack.cli.plan.reading import read_lengths
from tritonpack.cli.plan.report import as_dict, findings, legend, table
from tritonpack.cli.plan.ways import BASELINES, OURS, Result, Way, compare
from tritonpack.packing.lengths import FittedLengths, fit_lengths

_SHOWN = "next-fit"  # whose loads are drawn beside ours


@dataclass(frozen=True)
class Options:
    """What is to be planned.

    Attributes:
        path: of the lengths; `column` of it if it has several.
        out: a folder, or a picture that ends in .png.
        json: where the numbers go as well.
    """

    path: Path
    column: str | None
    capacity: int
    num_ranks: int
    epochs: int
    seed: int
    objective: str
    tail: str
    lookahead: float | None
    overlong: str
    model: str | None
    out: Path
    json: Path | None


def examine(options: Options) -> None:
    """Read the lengths, plan them each way, print the table, draw the picture.

    Raises:
        ValueError: lengths that can't be read or planned, a model that there isn't.
        OSError: a result that can't be written.
    """
    from tritonpack.cli.plan.figure import draw

    picture = options.out if options.out.suffix.lower() == ".png" else options.out / "plan.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    if options.json is not None:
        options.json.touch()  # before the work, which may take long
    console = Console()
    cost, cost_of = cost_model(options.model)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        reading = progress.add_task("reading lengths", total=1.0)
        documents = read_lengths(
            options.path, options.column, lambda share: progress.update(reading, completed=share)
        )
        progress.remove_task(reading)
        fitted = fit_lengths(documents, options.capacity, options.overlong, name="--capacity")
        ways = (_ours(options, cost), *BASELINES)
        planning = progress.add_task("planning", total=len(ways))
        results = []
        total = int(documents.sum())
        for result in compare(ways, fitted.lengths, total, options.capacity, options.num_ranks, options.seed, options.epochs, cost):
            results.append(result)
            progress.advance(planning)

    for line in _preface(options, documents, fitted, cost_of):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(table(results, options.epochs))
    for line in (*legend(results), *findings(results)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)

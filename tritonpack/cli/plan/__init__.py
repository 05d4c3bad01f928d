"""`tritonpack plan`: what packing makes of documents of given lengths, beside simpler ways; a table and a picture."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tritonpack.cli.machine import require_writable
from tritonpack.cli.plan.read_lengths import read_lengths
from tritonpack.cli.plan.report import as_dict, findings, legend, table
from tritonpack.cli.plan.strategies import BASELINES, Result, compare, our_way
from tritonpack.packing.cost import CostModel
from tritonpack.packing.lengths import Overlong, OverlongReport, fit_lengths
from tritonpack.packing.plan import Objective, Tail

# Python arguments with values, as errors of tritonpack.packing advise them: tail='keep' or 'spread'.
_ARGUMENTS = re.compile(r"\b(objective|overlong|tail)=('\w+'(?:(?:, | or )'\w+')*)")

_SHOWN = "next-fit"  # whose loads are drawn beside ours
_DEFAULT_MODEL = "a Llama of 8 billion parameters"


@dataclass(frozen=True)
class Options:
    """What is to be planned.

    Attributes:
        path: of the file of lengths; `column` of it, if it has several.
        capacity: tokens per row.
        num_ranks: rows per step.
        model: whose costs count, as `load_config` takes it; None means a Llama of 8 billion parameters.
        out: a folder for the picture, or a name for it that ends in .png.
        json: the file that gets the numbers as well.
    """

    path: Path
    column: str | None
    capacity: int
    num_ranks: int
    epochs: int
    seed: int
    objective: Objective
    tail: Tail
    lookahead: float
    steps_together: int
    overlong: Overlong
    model: str | None
    out: Path
    json: Path | None


def examine(options: Options) -> None:
    """Read the lengths, plan them each way, print the table, draw the picture.

    Raises:
        ValueError: lengths that can't be read or planned, a model that isn't there.
        OSError: a result that can't be written.
    """
    from tritonpack.cli.plan.figure import draw

    picture = options.out if options.out.suffix.lower() == ".png" else options.out / "plan.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    require_writable(options.json)
    console = Console()
    cost, whose = _cost(options.model)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading lengths", total=1.0)
        documents = read_lengths(options.path, options.column, lambda share: progress.update(task, completed=share))
        fitted = fit_lengths(documents, options.capacity, options.overlong, name="--capacity")
        count = len(fitted.lengths)
        ours = our_way(
            options.objective,
            options.tail,
            options.lookahead,
            options.steps_together,
            cost,
            placed=lambda documents: progress.advance(task, documents / count),
        )
        ways = (ours, *BASELINES)
        progress.reset(task, description="planning", total=len(ways) * options.epochs)
        results = compare(
            ways,
            fitted.lengths,
            total_tokens=int(documents.sum()),
            capacity=options.capacity,
            num_ranks=options.num_ranks,
            seed=options.seed,
            epochs=options.epochs,
            cost=cost,
            planned=lambda epochs: progress.update(task, completed=epochs),
        )

    for line in _preface(options, documents, fitted.report, cost, whose):
        console.print(line, markup=False, highlight=False)
    console.print(table(results, options.epochs))
    console.print(legend(results))
    if options.json is not None:
        numbers = as_json(options, documents, fitted.report, cost, results)
        options.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    for line in findings(results):
        console.print(line, markup=False, highlight=False)
    other = next(result for result in results if result.way.name == _SHOWN)
    title = f"{options.path.name}: {options.num_ranks:,} {'rank' if options.num_ranks == 1 else 'ranks'} of "
    draw(picture, results[0], other, fitted.lengths, cost, f"{title}{options.capacity:,} tokens", options.seed)
    console.print(f"Picture: {picture}", markup=False, highlight=False, soft_wrap=True)


def as_options(message: str) -> str:
    """An error of tritonpack.packing with the options of the command in the place of Python arguments."""
    return _ARGUMENTS.sub(lambda found: f"--{found[1]} {found[2].replace(chr(39), '')}", message)


def _cost(model: str | None) -> tuple[CostModel, str]:
    """What rows cost, and whose costs they are."""
    if model is None:
        cost = CostModel.from_shape(
            hidden_size=4096,
            num_layers=32,
            num_heads=32,
            head_dim=128,
            num_key_value_heads=8,
            intermediate_size=14336,
            vocab_size=128256,
        )
        return cost, _DEFAULT_MODEL
    from tritonpack.cli.model_source import load_config

    return CostModel.from_config(load_config(model, trust_remote_code=False)), model


def _preface(
    options: Options, documents: NDArray[np.int64], report: OverlongReport, cost: CostModel, whose: str
) -> Iterator[str]:
    yield (
        f"{options.path.name}: {len(documents):,} documents, {documents.sum():,} tokens; from {documents.min():,} to "
        f"{documents.max():,}, {documents.mean():,.0f} in the mean."
    )
    if report.documents:
        yield f"{report}."
    line = f"Costs are those of {whose}"
    if cost.per_square:
        even = cost.per_token / cost.per_square
        line += f", in which attention to documents of {even:,.0f} tokens takes as long as all else"
    yield f"{line}."


def as_json(
    options: Options, documents: NDArray[np.int64], report: OverlongReport, cost: CostModel, results: Sequence[Result]
) -> dict[str, Any]:
    """What was asked, and the numbers of every way."""
    asked = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}
    return {
        "options": asked,
        "documents": len(documents),
        "tokens": int(documents.sum()),
        "overlong": asdict(report),
        "cost": {"per_token": cost.per_token, "per_square": cost.per_square},
        "ways": as_dict(results),
    }

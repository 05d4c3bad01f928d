"""`tritonpack plan`: what packing makes of documents of given lengths, beside simpler ways; a table and a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tritonpack.cli.plan.reading import read_lengths
from tritonpack.cli.plan.report import as_dict, findings, legend, table
from tritonpack.cli.plan.ways import BASELINES, Result, compare, our_way
from tritonpack.packing.cost import CostModel
from tritonpack.packing.distributed import Objective, Tail
from tritonpack.packing.lengths import Overlong, OverlongReport, fit_lengths

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
    overlong: Overlong
    model: str | None
    out: Path
    json: Path | None


def examine(options: Options) -> bool:
    """Read the lengths, plan them each way, print the table, draw the picture.

    Returns:
        Whether there is a step to train on.

    Raises:
        ValueError: lengths that can't be read or planned, a model that isn't there.
        OSError: a result that can't be written.
    """
    from tritonpack.cli.plan.figure import draw

    picture = options.out if options.out.suffix.lower() == ".png" else options.out / "plan.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    for path in filter(None, (picture, options.json)):
        path.touch()  # before the work, which may take long
    console = Console()
    cost, whose = _cost(options.model)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading lengths", total=1.0)
        documents = read_lengths(options.path, options.column, lambda share: progress.update(task, completed=share))
        fitted = fit_lengths(documents, options.capacity, options.overlong, name="--capacity")
        ways = (our_way(options.objective, options.tail, options.lookahead, cost), *BASELINES)
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
            advance=lambda: progress.advance(task),
        )

    _print(console, _preface(options, documents, fitted.report, cost, whose))
    console.print(table(results, options.epochs))
    _print(console, legend(results))
    if options.json is not None:
        numbers = as_json(options, documents, fitted.report, cost, results)
        options.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    if not results[0].plan.num_steps:
        picture.unlink()
        _print(console, ["There is no step: too few documents for one. Plan for fewer ranks or with --tail keep."])
        return False
    _print(console, findings(results))
    other = next(result for result in results if result.way.name == _SHOWN)
    title = f"{options.path.name}: {options.num_ranks:,} {'rank' if options.num_ranks == 1 else 'ranks'} of "
    draw(picture, results[0], other, fitted.lengths, cost, f"{title}{options.capacity:,} tokens", options.seed)
    _print(console, [f"Picture: {picture}"])
    return True


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
    yield (
        f"Costs are those of {whose}: attention to a document of {cost.per_token / cost.per_square:,.0f} tokens takes as "
        "long as all else."
        if cost.per_square
        else f"Costs are those of {whose}, whose attention doesn't grow with a document's squared length."
    )


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


def _print(console: Console, lines: Iterable[str]) -> None:
    """Text as it is, neither coloured nor broken where a line of the terminal ends."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

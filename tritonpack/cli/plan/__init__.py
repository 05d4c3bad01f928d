"""`tritonpack plan`: shows in a table and a picture how full and how even batches are, packed and padded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from tritonpack.cli.files import STANDARD_OUTPUT, require_writable, write_json
from tritonpack.cli.plan.read_lengths import read_lengths
from tritonpack.cli.plan.report import findings, legend, table
from tritonpack.cli.plan.strategies import BASELINES, OUR_MEANING, OURS, Strategy, measure
from tritonpack.cli.words import count
from tritonpack.packing.lengths import Overlong, OverlongReport, fit_lengths
from tritonpack.packing.planning.cost import CostModel
from tritonpack.packing.planning.plan import Objective, Tail, plan_epoch

# Python arguments in error messages of tritonpack.packing, such as tail='keep' or 'spread'.
_ARGUMENTS = re.compile(r"\b(objective|overlong|tail)=('\w+'(?:(?:, | or )'\w+')*)")

_BESIDE_OURS = "next-fit"  # the strategy whose loads are drawn beside tritonpack's


@dataclass(frozen=True)
class Options:
    """The options of the command line.

    `path` is the file of lengths. `model` None is a Llama of 8 billion parameters. `out` is a folder or a .png file.
    With `json` "-" the numbers go to standard output and the table to standard error.
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
    steps_together: int | None
    overlong: Overlong
    model: str | None
    out: Path
    json: Path | None


def examine(options: Options) -> None:
    """Read the lengths, plan them with each strategy, print the table, write the numbers and the picture.

    Raises:
        ValueError: the lengths can't be read or planned, there is no such model, or an output can't be written.
        OSError: a result can't be written.
    """
    from tritonpack.cli.plan.figure import draw

    picture = _picture(options.out)
    model = [] if options.model is None else [Path(options.model), Path(options.model) / "config.json"]
    require_writable(options.json, "--json", [options.path, picture, *model])
    require_writable(picture, "--out", [options.path, *model])
    console = Console(stderr=options.json == STANDARD_OUTPUT)
    cost, owner = _cost(options.model)
    ours = partial(
        plan_epoch,
        objective=options.objective,
        cost_model=cost if options.objective == "cost" else None,
        tail=options.tail,
        lookahead=options.lookahead,
        steps_together=options.steps_together,
    )
    with console.status("reading lengths") as status:
        documents = read_lengths(options.path, options.column)
        fitted = fit_lengths(documents, options.capacity, options.overlong, name="--capacity")
        tokens = int(documents.sum())
        results = []
        for strategy in (Strategy(OURS, OUR_MEANING, ours), *BASELINES):
            status.update(f"planning {count(options.epochs, 'epoch')}: {strategy.name}")
            size = (options.capacity, options.num_ranks, options.epochs, options.seed)
            results.append(measure(strategy, fitted.lengths, *size, cost=cost, total_tokens=tokens))

    preface = _preface(options.path, documents, fitted.report, cost, owner)
    console.print(*preface, sep="\n", markup=False, highlight=False)
    console.print(table(results, options.epochs), legend(results))
    console.print(*findings(results), sep="\n", markup=False, highlight=False)
    if options.json is not None:
        numbers = {
            "options": asdict(options),
            "documents": len(documents),
            "tokens": tokens,
            "overlong": asdict(fitted.report),
            "cost": asdict(cost),
            "ways": {result.strategy.name: result.means for result in results},
        }
        write_json(options.json, numbers)
    other = next(result for result in results if result.strategy.name == _BESIDE_OURS)
    title = f"{options.path.name}: {count(options.num_ranks, 'rank')} of {count(options.capacity, 'token')}"
    draw(picture, results[0], other, fitted.lengths, cost, title, options.seed)
    console.print(f"Picture: {picture}", markup=False, highlight=False, soft_wrap=True)


def as_options(message: str) -> str:
    """An error message of tritonpack.packing with options in place of arguments: --tail keep for tail='keep'."""
    return _ARGUMENTS.sub(lambda found: f"--{found[1]} {found[2].replace(chr(39), '')}", message)


def _picture(out: Path) -> Path:
    """The file of the picture; ValueError for a name that looks like a picture of another format."""
    if out.suffix.lower() == ".png":
        return out
    if out.suffix and not out.is_dir():
        raise ValueError(
            f"--out {out} ends in {out.suffix}, and the picture is a PNG; name a file that ends in .png, or a folder "
            "without an ending"
        )
    return out / "plan.png"


def _cost(model: str | None) -> tuple[CostModel, str]:
    """The cost of rows, and the name of the model that it belongs to."""
    if model is not None:
        from tritonpack.cli.model_source import load_config

        return CostModel.from_config(load_config(model, trust_remote_code=False)), model
    cost = CostModel.from_shape(
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        head_dim=128,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
    )
    return cost, "a Llama of 8 billion parameters"


def _preface(
    path: Path, documents: NDArray[np.int64], report: OverlongReport, cost: CostModel, owner: str
) -> Iterator[str]:
    yield (
        f"{path.name}: {count(len(documents), 'document')}, {count(int(documents.sum()), 'token')}; from "
        f"{documents.min():,} to {documents.max():,}, {documents.mean():,.0f} in the mean."
    )
    if report.documents:
        yield f"{report}."
    line = f"The model whose cost counts: {owner}"
    if cost.per_square:
        even = cost.per_token / cost.per_square
        line += f", in which attention to documents of {count(round(even), 'token')} takes as long as all else"
    yield f"{line}."

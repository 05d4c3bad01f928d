"""`tritonpack plan`: shows in a table and a picture how full and how even batches are, packed and padded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tritonpack.cli.files import STANDARD_OUTPUT, require_writable, write_json
from tritonpack.cli.lengths import read_lengths
from tritonpack.cli.strategies import BASELINES, MEANINGS, NEXT_FIT, OURS, PADDED, Result, measure
from tritonpack.cli.words import count
from tritonpack.packing.lengths import Overlong, fit_lengths
from tritonpack.packing.planning.cost import CostModel
from tritonpack.packing.planning.plan import Plan, plan_epoch

# The header of each column, the statistic that it shows, what that means, and whether it compares ranks.
_COLUMNS = (
    ("steps", "num_steps", "of an epoch, each with one row of documents per rank (GPU)", False),
    ("rows\nfull %", "efficiency", "the share of the rows that holds tokens (efficiency); the less, the more steps",
     False),
    ("ranks\nbusy %", "utilization", "the share of their time that ranks compute, if time is proportional to tokens "
     "and all wait for the fullest rank (utilization)", True),
    ("busy by\ncost %", "cost_utilization", "the same with attention counted in, by documents' squared lengths (cost "
     "utilization)", True),
    ("L2 lag\nmean", "l2_lag", "of a step: sqrt(largest - smallest sum of a rank's squared lengths), in tokens", True),
    ("L2 lag\nmost", "l2_lag_max", "the largest of a step", True),
    ("padding\n%", "padding", "its share of what is computed", False),
    ("length\nspread", "spread", "of the steps' mean document lengths: 1x is chance, more means some steps of long "
     "documents, some of short", False),
    ("covered\n%", "tokens_covered", "the share of all tokens that is trained on; the rest is left over or dropped",
     False),
)  # fmt: skip


def examine(
    *, path: Path, column: str | None, capacity: int, num_ranks: int, epochs: int, seed: int, overlong: Overlong,
    model: str | None, out: Path, json: Path | None, objective: str, **options: Any,
) -> None:  # fmt: skip
    """Read the lengths, plan them with each strategy, print the table, write the numbers and the picture.

    Args:
        path: the file of lengths.
        model: None is a Llama of 8 billion parameters.
        out: a folder or a .png file.
        json: the file for the numbers; with "-" they go to standard output and the table to standard error.
        **options: further options of `plan_epoch`. The others are the command's.

    Raises:
        ValueError: the lengths can't be read or planned, there is no such model, or an output can't be written.
        OSError: a result can't be written.
    """
    given = {**locals(), **options}
    del given["options"]
    from tritonpack.cli.figures import draw_plan

    picture = _picture(out)
    read = [path, *([] if model is None else [Path(model), Path(model) / "config.json"])]
    require_writable(json, "--json", [*read, picture])
    require_writable(picture, "--out", read)
    console = Console(stderr=json == STANDARD_OUTPUT)
    cost, owner = _cost(model)
    options |= {"objective": objective, "cost_model": cost if objective == "cost" else None}
    with console.status("reading lengths") as status:
        documents = read_lengths(path, column)
        fitted = fit_lengths(documents, capacity, overlong, name="--capacity")
        tokens, results = int(documents.sum()), []
        ours: Callable[..., Plan] = partial(plan_epoch, **options)
        for name, strategy in ((OURS, ours), *BASELINES.items()):
            status.update(f"planning {count(epochs, 'epoch')}: {name}")
            size = (fitted.lengths, capacity, num_ranks, epochs, seed)
            results.append(measure(name, strategy, *size, cost=cost, total_tokens=tokens))

    def lines(*text: str) -> None:
        console.print(*text, sep="\n", markup=False, highlight=False)

    lines(
        f"{path.name}: {count(len(documents), 'document')}, {count(tokens, 'token')}; from {documents.min():,} to "
        f"{documents.max():,}, {documents.mean():,.0f} in the mean."
    )
    if fitted.report.documents:
        lines(f"{fitted.report}.")
    even = cost.per_square and count(round(cost.per_token / cost.per_square), "token")
    share = f", in which attention to documents of {even} takes as long as all else" if even else ""
    lines(f"The model whose cost counts: {owner}{share}.")
    console.print(table(results, epochs), legend(results))
    lines(*findings(results))
    if json is not None:
        ways = {result.name: result.means for result in results}
        numbers = {"options": given, "documents": len(documents), "tokens": tokens, "cost": asdict(cost), "ways": ways}
        write_json(json, numbers | {"overlong": asdict(fitted.report)})
    other = next(result for result in results if result.name == NEXT_FIT)  # drawn beside tritonpack's
    title = f"{path.name}: {count(num_ranks, 'rank')} of {count(capacity, 'token')}"
    draw_plan(picture, results[0], other, fitted.lengths, cost, title, seed)
    console.print(f"Picture: {picture}", markup=False, highlight=False, soft_wrap=True)


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
    shape = {
        "hidden_size": 4096, "num_layers": 32, "num_heads": 32, "head_dim": 128, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256,
    }  # fmt: skip
    return CostModel.from_shape(**shape), "a Llama of 8 billion parameters"


def table(results: Sequence[Result], epochs: int) -> Table:
    """One row per strategy."""
    title = f"Means over {epochs:,} epochs" if epochs > 1 else None
    result = Table(title=title, box=SIMPLE_HEAD, padding=0)  # within the 80 columns of a plain terminal
    result.add_column("strategy", no_wrap=True)
    columns = _columns(results)
    for header, _, _ in columns:
        result.add_column(header, justify="right", no_wrap=True)
    for name, _, means in results:
        planned = bool(means["num_steps"])  # without a step there is nothing to measure
        cells = [_cell(key, means[key]) if planned or key == "num_steps" else "" for _, key, _ in columns]
        result.add_row(name, *cells, style="bold" if name == OURS else "")
    return result


def legend(results: Sequence[Result]) -> Table:
    """The meaning of the strategies and of the columns."""
    result = Table.grid(padding=(0, 1))
    columns = [(header.replace("\n", " ").removesuffix(" %"), meaning) for header, _, meaning in _columns(results)]
    for rows in (MEANINGS.items(), columns):
        for row in rows:
            result.add_row(*row)
        result.add_row()
    return result


def _columns(results: Sequence[Result]) -> list[tuple[str, str, str]]:
    """The columns that say something: on one rank none that compares ranks, and none that is 0 everywhere."""
    alone = results[0].plan.num_ranks == 1
    shown = [c for c in _COLUMNS if not alone or (not c[3] and any(found.means[c[1]] for found in results))]
    return [column[:3] for column in shown]


def findings(results: Sequence[Result]) -> Iterator[str]:
    """What the table says about tritonpack's plan, in sentences."""
    means = {found.name: {key: value or 0.0 for key, value in found.means.items()} for found in results}
    ours, padded, plan = means[OURS], means[PADDED], results[0].plan
    if without := [name for name in means if not means[name]["num_steps"]]:
        yield f"There are too few documents for a step of {', '.join(without)}, which leave out an incomplete step."
    if padded["num_steps"]:
        times = ours["cost_utilization"] / padded["cost_utilization"]
        yield (
            f"By this cost padded rows take {times:.2f} times as long as tritonpack's for the same tokens: "
            f"{padded['padding']:.1%} of what they compute is padding"
            + (", and ranks wait for the longest documents." if plan.num_ranks > 1 else ".")
        )
    if plan.steps_together > 1:
        yield (
            f"A step holds about {count(round(ours['documents_per_step']), 'document')}, so {plan.steps_together} "
            f"steps are planned at once. A document moves by fewer than {3 * plan.steps_together} steps."
        )
    if left_out := 1 - ours["tokens_covered"]:
        yield (
            f"tritonpack leaves {left_out:.2%} of the tokens out of an epoch; --tail spread or keep trains on all that "
            "--overlong leaves."
        )


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

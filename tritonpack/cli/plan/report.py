"""The table of `tritonpack plan`, the meaning of its columns, and what it shows in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tritonpack.cli.plan.strategies import OURS, PADDED, Result
from tritonpack.cli.words import count

# The header of each column, the statistic that it shows, and what that means.
_COLUMNS = (
    ("steps", "num_steps", "of an epoch, each with one row of documents per rank (GPU)"),
    ("rows\nfull %", "efficiency", "the share of the rows that holds tokens (efficiency); the less, the more steps"),
    (
        "ranks\nbusy %",
        "utilization",
        "the share of their time that ranks compute, if time is proportional to tokens and all wait for the fullest "
        "rank (utilization)",
    ),
    (
        "busy by\ncost %",
        "cost_utilization",
        "the same with attention counted in, by documents' squared lengths (cost utilization)",
    ),
    ("L2 lag\nmean", "l2_lag", "of a step: sqrt(largest - smallest sum of a rank's squared lengths), in tokens"),
    ("L2 lag\nmost", "l2_lag_max", "the largest of a step"),
    ("padding\n%", "padding", "its share of what is computed"),
    (
        "length\nspread",
        "spread",
        "of the steps' mean document lengths: 1x is chance, more means some steps of long documents, some of short",
    ),
    ("covered\n%", "tokens_covered", "the share of all tokens that is trained on; the rest is left over or dropped"),
)
_BETWEEN_RANKS = ("utilization", "cost_utilization", "l2_lag", "l2_lag_max")  # say nothing of one rank


def table(results: Sequence[Result], epochs: int) -> Table:
    """One row per strategy."""
    title = f"Means over {epochs:,} epochs" if epochs > 1 else None
    result = Table(title=title, box=SIMPLE_HEAD, padding=0)  # within the 80 columns of a plain terminal
    result.add_column("strategy", no_wrap=True)
    columns = _columns(results)
    for header, _, _ in columns:
        result.add_column(header, justify="right", no_wrap=True)
    for found in results:
        planned = bool(found.means["num_steps"])  # without a step there is nothing to measure
        cells = [_cell(key, found.means[key]) if planned or key == "num_steps" else "" for _, key, _ in columns]
        result.add_row(found.strategy.name, *cells, style="bold" if found.strategy.name == OURS else "")
    return result


def legend(results: Sequence[Result]) -> Table:
    """The meaning of the strategies and of the columns."""
    result = Table.grid(padding=(0, 1))
    for found in results:
        result.add_row(found.strategy.name, found.strategy.meaning)
    result.add_row()
    for header, _, meaning in _columns(results):
        result.add_row(header.replace("\n", " ").removesuffix(" %"), meaning)
    result.add_row()
    return result


def _columns(results: Sequence[Result]) -> list[tuple[str, str, str]]:
    """The columns that say something: on one rank none that compares ranks, and none that is 0 everywhere."""
    if results[0].plan.num_ranks > 1:
        return list(_COLUMNS)
    return [
        column
        for column in _COLUMNS
        if column[1] not in _BETWEEN_RANKS and any(found.means[column[1]] for found in results)
    ]


def findings(results: Sequence[Result]) -> Iterator[str]:
    """What the table says about tritonpack's plan, in sentences."""
    means = {found.strategy.name: {key: value or 0.0 for key, value in found.means.items()} for found in results}
    ours, padded = means[OURS], means[PADDED]
    if without := [name for name in means if not means[name]["num_steps"]]:
        yield f"There are too few documents for a step of {', '.join(without)}, which leave out an incomplete step."
    if padded["num_steps"]:
        times = ours["cost_utilization"] / padded["cost_utilization"]
        yield (
            f"By this cost padded rows take {times:.2f} times as long as tritonpack's for the same tokens: "
            f"{padded['padding']:.1%} of what they compute is padding"
            + (", and ranks wait for the longest documents." if results[0].plan.num_ranks > 1 else ".")
        )
    together = results[0].plan.steps_together
    if together > 1:
        yield (
            f"A step holds about {count(round(ours['documents_per_step']), 'document')}, so {together} steps are "
            f"planned at once. A document moves by fewer than {3 * together} steps."
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

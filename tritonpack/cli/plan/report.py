"""The table of `tritonpack plan`, what its columns mean, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tritonpack.cli.plan.ways import OURS, PADDED, Result
from tritonpack.packing.statistics import PlanStatistics

_MEANINGS = (
    ("steps", "of one epoch, each with one row per rank."),
    ("full", "how much of the rows' capacity holds tokens (efficiency): what is missing are extra steps."),
    ("busy", "ranks wait for the one with the most tokens; the share of their time that they don't (utilization)."),
    (
        "by cost",
        "the same with attention, which grows with a document's squared length, counted in (cost utilization).",
    ),
    ("L2 lag", "sqrt(largest - smallest sum of squared lengths of a step's ranks), in tokens: mean and most."),
    ("padding", "of what is computed."),
    ("spread", "how far steps' mean document lengths lie apart, by shuffling alone 1x; more: some steps are all long."),
    ("covered", "tokens that the epoch trains on; the rest is left over at its end, or was cut or dropped."),
)


_HEADERS = ("steps", "full\n%", "busy\n%", "by cost\n%", "L2\nlag", "most\nlag", "padding\n%", "spread", "covered\n%")


def table(results: Sequence[Result], epochs: int) -> Table:
    """One row per way."""
    result = Table(box=SIMPLE_HEAD, padding=0)  # within the 80 columns of a plain terminal
    if epochs > 1:
        result.title = f"Means over {epochs} epochs"
    result.add_column("way", no_wrap=True)
    for header in _HEADERS:
        result.add_column(header, justify="right", no_wrap=True)
    for found in results:
        means = found.means
        result.add_row(
            found.way.name,
            _number(means["num_steps"]),
            _percent(means["efficiency"]),
            _percent(means["utilization"]),
            _percent(means["cost_utilization"]),
            _number(means["l2_lag"]),
            _number(means["l2_lag_max"]),
            f"{100 * (means['padding'] or 0):.1f}",
            "" if means["spread"] is None else f"{means['spread']:.1f}x",
            _percent(means["tokens_covered"]),
            style="bold" if found.way.name == OURS else "",
        )
    return result


def legend(results: Sequence[Result]) -> Iterator[str]:
    """What the ways and the columns are, a line each."""
    yield "Ways:"
    for found in results:
        yield f"  {found.way.name:11} {found.way.meaning}"
    yield "Columns:"
    for name, meaning in _MEANINGS:
        yield f"  {name:11} {meaning}"


def findings(results: Sequence[Result]) -> Iterator[str]:
    """What the table says of tritonpack's plan, in sentences."""
    means = {found.way.name: found.means for found in results}
    ours, padded = means[OURS], means[PADDED]
    assert ours["cost_utilization"] is not None
    assert padded["cost_utilization"]
    times = ours["cost_utilization"] / padded["cost_utilization"]
    yield (
        f"By this cost the same tokens take padded rows {times:.2f} times as long as tritonpack's: "
        f"{padded['padding']:.1%} of what they compute is padding, and ranks wait for the one with the longest documents."
    )
    if left_out := 1 - (ours["tokens_covered"] or 0):
        yield (
            f"tritonpack leaves {left_out:.2%} of the tokens out of an epoch; --tail spread or keep trains on all that "
            "--overlong leaves."
        )


def as_dict(results: Sequence[Result]) -> dict[str, Any]:
    """The statistics of every way for JSON: means over epochs, by the names of `PlanStatistics`."""
    return {found.way.name: found.means | {"documents_per_step": _per_step(found.epochs)} for found in results}


def _per_step(epochs: Sequence[PlanStatistics]) -> float:
    return sum(one.documents_per_step for one in epochs) / len(epochs)


def _percent(share: float | None) -> str:
    """Two digits, and 100 for nothing less than all."""
    if share is None:
        return ""
    return "100" if share == 1 else f"{min(100 * share, 99.99):.2f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.1f}"

"""The table of `tritonpack plan`, what its columns mean, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tritonpack.cli.plan.strategies import OURS, PADDED, Result
from tritonpack.packing.statistics import PlanStatistics

_MEANINGS = (
    ("steps", "of an epoch, each with one row of documents per rank (GPU)"),
    ("full", "the share of the rows that holds tokens (efficiency); the less, the more steps"),
    ("busy", "what is left of the ranks' time when all wait for the one with the most tokens (utilization)"),
    ("by cost", "the same with attention counted in, by documents' squared lengths (cost utilization)"),
    ("lag", "of a step: sqrt(largest - smallest sum of a rank's squared lengths), in tokens; in the mean, and at most"),
    ("padding", "its share of what is computed"),
    (
        "spread",
        "of the steps' mean document lengths: 1x is chance, more means some steps of long documents, some of short",
    ),
    ("covered", "the share of all tokens that is trained on; the rest is left over at the end, cut off or dropped"),
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


def legend(results: Sequence[Result]) -> Table:
    """What the ways and the columns are."""
    result = Table.grid(padding=(0, 1))
    for found in results:
        result.add_row(found.way.name, found.way.meaning)
    result.add_row()
    for name, meaning in _MEANINGS:
        result.add_row(name, meaning)
    result.add_row()
    return result


_FULL, _FEW = 0.98, 200  # rows less full, of steps with fewer documents, are worth a hint


def findings(results: Sequence[Result]) -> Iterator[str]:
    """What the table says of tritonpack's plan, in sentences."""
    means = {found.way.name: found.means for found in results}
    ours, padded = means[OURS], means[PADDED]
    assert ours["cost_utilization"] is not None
    assert padded["cost_utilization"]
    times = ours["cost_utilization"] / padded["cost_utilization"]
    yield (
        f"By this cost the same tokens take padded rows {times:.2f} times as long as tritonpack's: "
        f"{padded['padding']:.1%} of what they compute is padding, and ranks wait for the longest documents."
    )
    documents = next(_per_step(found.epochs) for found in results if found.way.name == OURS)
    if (ours["efficiency"] or 0) < _FULL and documents < _FEW:
        yield (
            f"A step holds about {documents:.0f} documents, few to combine: --steps-together 16 or more "
            "fills rows better, and moves documents by as many times two steps."
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

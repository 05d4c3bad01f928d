"""The planning strategies that the command compares: tritonpack's planner and simpler ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.baselines import interleaved_rows, next_fit_rows, padded_rows, shuffled_bins
from tritonpack.packing.plan import Plan
from tritonpack.packing.statistics import Cost, PlanStatistics, mean_over_epochs, plan_statistics

OURS = "tritonpack"
PADDED = "padded"


@dataclass(frozen=True)
class Strategy:
    """A way to plan an epoch.

    Attributes:
        name: its name in the table.
        meaning: one sentence for a reader who doesn't know it.
        plan: a function of (lengths, capacity, ranks, seed=, epoch=).
        padded: whether its rows are padded.
    """

    name: str
    meaning: str
    plan: Callable[..., Plan]
    padded: bool = False


OUR_MEANING = "steps planned one by one from shuffled documents: rows full, ranks equally loaded"
BASELINES = (
    Strategy(
        PADDED,
        "no packing: so many documents per row that the longest ones would fit, all padded to the row's longest",
        padded_rows,
        padded=True,
    ),
    Strategy(
        "interleaved",
        "the same number of documents per row, unpadded, each step's documents dealt out to the ranks by length",
        interleaved_rows,
    ),
    Strategy("next-fit", "rows filled in order; a document that doesn't fit begins a new row", next_fit_rows),
    Strategy(
        "best-fit", "the whole epoch packed at once, as tightly as possible; its rows are shuffled", shuffled_bins
    ),
)


@dataclass(frozen=True)
class Result:
    """The statistics of a strategy's plans, one for each epoch, and the plan of the first epoch."""

    strategy: Strategy
    plan: Plan
    epochs: tuple[PlanStatistics, ...]

    @property
    def means(self) -> dict[str, float | None]:
        """The mean over epochs of each number of the statistics."""
        steps = sum(one.documents_per_step for one in self.epochs) / len(self.epochs)
        return mean_over_epochs(self.epochs) | {"documents_per_step": steps}


def measure(
    strategy: Strategy,
    lengths: NDArray[np.int32],
    *,
    total_tokens: int,
    capacity: int,
    num_ranks: int,
    seed: int,
    epochs: int,
    cost: Cost,
) -> Result:
    """Plan every epoch with one strategy.

    Args:
        lengths: (pieces,) from 1 to `capacity`.
        total_tokens: the tokens of all documents, before they were truncated, split or dropped.

    Raises:
        ValueError: the strategy can't plan these lengths.
    """
    first: Plan | None = None
    found = []
    for epoch in range(epochs):
        plan = strategy.plan(lengths, capacity, num_ranks, seed=seed, epoch=epoch)
        first = first or plan
        found.append(plan_statistics(plan, lengths, cost=cost, total_tokens=total_tokens, padded=strategy.padded))
    assert first is not None
    return Result(strategy, first, tuple(found))

"""The planning strategies that the command compares: tritonpack's planner and simpler ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.baselines import interleaved_rows, next_fit_rows, padded_rows, shuffled_bins
from tritonpack.packing.plan import Plan
from tritonpack.packing.statistics import Cost, mean_over_epochs, plan_statistics

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


class Result(NamedTuple):
    """The plan that a strategy made of the first epoch, and the mean over epochs of each statistic."""

    strategy: Strategy
    plan: Plan
    means: dict[str, float | None]


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
    plans: list[Plan] = []
    found = []
    for epoch in range(epochs):
        plan = strategy.plan(lengths, capacity, num_ranks, seed=seed, epoch=epoch)
        plans = plans or [plan]
        found.append(plan_statistics(plan, lengths, cost=cost, total_tokens=total_tokens, padded=strategy.padded))
    per_step = sum(one.documents_per_step for one in found) / epochs
    return Result(strategy, plans[0], mean_over_epochs(found) | {"documents_per_step": per_step})

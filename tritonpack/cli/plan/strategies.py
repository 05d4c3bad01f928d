"""The ways to plan an epoch that the command compares: tritonpack's, and simpler ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.baselines import interleaved_rows, next_fit_rows, padded_rows, shuffled_bins
from tritonpack.packing.cost import CostModel
from tritonpack.packing.plan import Objective, Plan, Tail, plan_epoch
from tritonpack.packing.statistics import Cost, PlanStatistics, mean_over_epochs, plan_statistics

OURS = "tritonpack"
PADDED = "padded"


@dataclass(frozen=True)
class Way:
    """A way to plan an epoch.

    Attributes:
        name: as the table has it.
        meaning: one sentence for someone who never heard of it.
        plan: from (lengths, capacity, ranks, seed, epoch).
        padded: whether its rows are padded.
    """

    name: str
    meaning: str
    plan: Callable[[NDArray[np.int32], int, int, int, int], Plan]
    padded: bool = False


BASELINES = (
    Way(
        PADDED,
        "no packing: so many documents per row that the longest ones would fit, all padded to the row's longest",
        padded_rows,
        padded=True,
    ),
    Way(
        "interleaved",
        "the same number of documents per row, unpadded, each step's documents dealt out to the ranks by length",
        interleaved_rows,
    ),
    Way("next-fit", "rows filled in order, a new one begun where a document doesn't fit", next_fit_rows),
    Way(
        "best-fit",
        "the whole epoch packed at once, as tightly as can be, and its rows shuffled",
        shuffled_bins,
    ),
)


@dataclass(frozen=True)
class Result:
    """A way, what it made of the epochs, and the plan of the first."""

    way: Way
    plan: Plan
    epochs: tuple[PlanStatistics, ...]

    @property
    def means(self) -> dict[str, float | None]:
        """Each number of the statistics, the mean over epochs."""
        return mean_over_epochs(self.epochs)


def our_way(
    objective: Objective,
    tail: Tail,
    lookahead: float,
    steps_together: int,
    cost: CostModel,
    placed: Callable[[int], object] | None = None,
) -> Way:
    """tritonpack's planner with its options; `placed` is told of each step's number of documents."""

    def plan(lengths: NDArray[np.int32], capacity: int, num_ranks: int, seed: int, epoch: int) -> Plan:
        return plan_epoch(
            lengths,
            capacity,
            num_ranks,
            seed=seed,
            epoch=epoch,
            objective=objective,
            cost_model=cost if objective == "cost" else None,
            tail=tail,
            lookahead=lookahead,
            steps_together=steps_together,
            advance=placed,
        )

    return Way(OURS, "steps planned one by one from shuffled documents: rows full, ranks equally loaded", plan)


def compare(
    ways: Sequence[Way],
    lengths: NDArray[np.int32],
    *,
    total_tokens: int,
    capacity: int,
    num_ranks: int,
    seed: int,
    epochs: int,
    cost: Cost,
    planned: Callable[[int], object],
) -> list[Result]:
    """Plan the epochs each way.

    Args:
        lengths: (pieces,) from 1 to `capacity`.
        total_tokens: of the documents before they were fitted.
        planned: told of the number of epochs planned so far, those of all ways.

    Raises:
        ValueError: a way that can't plan these.
    """
    results: list[Result] = []
    for way in ways:
        plans: list[Plan] = []
        found: list[PlanStatistics] = []
        for epoch in range(epochs):
            plan = way.plan(lengths, capacity, num_ranks, seed, epoch)
            plans = plans or [plan]
            found.append(plan_statistics(plan, lengths, cost=cost, total_tokens=total_tokens, padded=way.padded))
            planned(len(results) * epochs + len(found))
        results.append(Result(way, plans[0], tuple(found)))
    return results

"""choose_steps_together: measures how many steps must be planned at once to fill the rows of a data set."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.cost import CostModel, document_costs
from tritonpack.packing.order import shuffled

_CANDIDATES = (1, 2, 4, 8, 16, 32, 64)
_SAMPLE = 16_384  # documents that are planned to measure a candidate, or as many as make _STEPS steps
_STEPS = 8
_GROUPS = 4  # of a candidate, at least
_ENOUGH = 0.001  # a number this close to the best is as good


def choose_steps_together(
    lengths: NDArray[np.int32],
    capacity: int,
    num_ranks: int,
    *,
    objective: str = "quadratic",
    cost_model: CostModel | None = None,
    lookahead: float = 0.01,
) -> int:
    """The fewest steps, of 1, 2, 4 to 64, that make almost as good plans as any of them when they are planned at once.

    Two measures count: how full the rows are, and how long the ranks of a step wait for its fullest row, or under the
    objective "cost" for its costliest row. A number must come within 0.1% of the best in both. They are measured on
    shuffled documents: a sample of them if there are many, several shuffles if there are few. The result depends only
    on the arguments, so it is the same on every rank and in every epoch.

    Args:
        lengths: (documents,) integers from 1 to `capacity`.
        capacity, num_ranks, objective, cost_model, lookahead: see `plan_epoch`.

    Raises:
        ImportError: numba can't be imported.
    """
    from tritonpack.packing.planner import plan_steps  # imports numba, which is slow

    per_step = num_ranks * capacity * len(lengths) // int(lengths.sum(dtype=np.int64)) + 1  # documents
    in_epoch = -(-int(lengths.sum(dtype=np.int64)) // (num_ranks * capacity))  # steps, at least
    candidates = [each for each in _CANDIDATES if each < 2 * in_epoch]
    sample = min(max(_SAMPLE, _STEPS * per_step), len(lengths))
    if in_epoch < _CANDIDATES[-1]:  # few steps show little, so more than one epoch is measured
        sample = max(sample, (_GROUPS * candidates[-1] + 1) * per_step)
    epochs = -(-sample // len(lengths))
    lengths = lengths[np.concatenate([shuffled(len(lengths), 0, epoch) for epoch in range(epochs)])[:sample]]
    costs = document_costs(lengths, capacity, num_ranks * _CANDIDATES[-1], objective, cost_model)
    level = objective == "cost"
    found: list[tuple[int, float, float]] = []
    for together in candidates:
        options: dict[str, Any] = {"lookahead": lookahead, "together": together, "level": level}
        step_of, rank_of = plan_steps(lengths, costs, num_ranks, capacity, target=capacity, **options)
        steps = int(step_of.max())  # without the last one, which isn't full
        if steps < _GROUPS * together:
            break
        rows = step_of * np.int64(num_ranks) + rank_of
        held = np.bincount(rows, weights=lengths)[: steps * num_ranks]
        loads = (np.bincount(rows, weights=costs) if level else held)[: steps * num_ranks].reshape(steps, num_ranks)
        full = float(held.sum()) / (steps * num_ranks * capacity)
        busy = float(loads.sum()) / (num_ranks * float(loads.max(axis=1).sum()))
        found.append((together, full, busy))
        if min(full, busy) >= 1 - _ENOUGH:
            break
    if not found:
        return 1
    goal = [(1 - _ENOUGH) * max(each[measure] for each in found) for measure in (1, 2)]
    good = [together for together, full, busy in found if full >= goal[0] and busy >= goal[1]]
    return good[0] if good else max(found, key=lambda each: each[1] * each[2])[0]

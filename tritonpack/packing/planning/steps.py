"""plan_steps: the steps of an epoch, from units in their shuffled order.

Units are chosen and put into rows (planner.py). Several steps can be planned as one group, which has more units to
combine; the rows of a group are then divided among its steps (dealing.py). In the end the rows of each step trade units
until their costs are about equal (trades.py).

Costs are integers, and the other sums are rounded alike everywhere, so every machine computes the same plan.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.planning.dealing import divide
from tritonpack.packing.planning.demands import Demands
from tritonpack.packing.planning.planner import fill_steps
from tritonpack.packing.planning.tournament import UNLIMITED
from tritonpack.packing.planning.trades import balance


def plan_steps(
    demands: Demands,
    costs: NDArray[np.int64],
    ranks: int,
    *,
    target: int,
    lookahead: float,
    together: int,
    level: bool,
    last_step: int | None = None,
) -> NDArray[np.int64]:
    """Plan steps until every unit is placed.

    Args:
        demands: what the units take, in the shuffled order.
        costs: (units,) at least 1.
        ranks: rows of a step.
        target: tokens up to which rows are filled, at most the capacity; a single unit may be longer.
        lookahead: the share of its tokens that a step is offered in addition.
        together: how many steps are planned as one large step; its rows are then divided among them.
        level: a row takes no more units once it has its share of the step's cost, even if it has room.
        last_step: the step that is offered all remaining units; its rows are filled up to the capacity.

    Returns:
        (units,) int64, the row of each unit, `step * ranks + rank`.
    """
    last = UNLIMITED if last_step is None else last_step
    lengths, kinds = demands.lengths, demands.kinds
    # numba compiles the loops without those over resources if there are none.
    others, budgets = (demands.others, demands.budgets) if len(demands.budgets) else (None, None)
    try:
        rows, order, groups = fill_steps(
            lengths, others, kinds, costs, ranks, demands.capacity, budgets, target, float(lookahead), together, level,
            last,
        )  # fmt: skip
        if ranks > 1 or together > 1:
            fills = divide(lengths, others, rows, order, groups, ranks, budgets, level)
        if ranks > 1:
            balance(lengths, others, kinds, costs, rows, order, ranks, fills, budgets)
    except SystemError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # it came while numba returned a result
            raise KeyboardInterrupt from error
        raise
    return rows

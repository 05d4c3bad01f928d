"""plan_statistics: measures how full the rows of a plan are, how even its ranks, and how random its steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritonpack.checks import check_flag
from tritonpack.packing.lengths import whole_lengths
from tritonpack.packing.planning.plan import Plan
from tritonpack.packing.units import Units
from tritonpack.removed import refuse_removed

EVEN_LENGTH = 29_446  # of documents whose attention costs as much as all else, in a Llama of 8 billion parameters


@dataclass(frozen=True)
class PlanStatistics:
    """The measures of a plan. Shares go from 0 to 1; a share of nothing is 1.

    Two steps of two ranks with room for 10 tokens. In the first step the ranks hold 10 and 8 tokens, in the second 5
    and 5, so they process 28 tokens in the time of 2 * (10 + 5). Document 6 is in no row:

    >>> plan = Plan(np.array([0, 1, 2, 3, 4, 5]), np.array([0, 3, 4, 5, 6]), num_ranks=2, capacity=10)
    >>> found = plan_statistics(plan, [4, 4, 2, 8, 5, 5, 2])
    >>> found.tokens, found.left_out, found.efficiency, round(found.utilization, 4)
    (28, 1, 0.7, 0.9333)
    >>> found.l2_lag_max == (8 * 8 - (4 * 4 + 4 * 4 + 2 * 2)) ** 0.5
    True

    Attributes:
        num_steps, num_ranks, capacity, filler_rows: see `Plan`. Filler rows take time, and don't count as tokens.
        documents, tokens: in the rows, but for documents that filler rows repeat.
        left_out: the documents of `lengths` that are in no row.
        efficiency: tokens / (steps * ranks * capacity): how full the rows are.
        utilization: tokens / (ranks * the sum over steps of the fullest rank's tokens): the share of time in which
            ranks don't wait for the fullest rank, if time is proportional to tokens.
        cost_utilization: the same with 29,446 * tokens + sum(length**2), the cost of a Llama of 8 billion parameters.
        l2_lag, l2_lag_max: the root mean square over steps, and the largest, of the lag of a step in tokens:
            sqrt(largest - smallest sum of squared lengths of a rank).
        padding: the share of padding in padded rows; 0 for packed rows.
        spread: the standard deviation over steps of the mean document length, relative to random steps. It is above 1
            if some steps hold long documents and others short ones. None for fewer than three steps or equal lengths.
        tokens_covered: the share of all tokens that is in the plan, each document counted once.
    """

    num_steps: int
    num_ranks: int
    capacity: int
    documents: int
    tokens: int
    left_out: int
    filler_rows: int
    efficiency: float
    utilization: float
    cost_utilization: float
    l2_lag: float
    l2_lag_max: float
    padding: float
    spread: float | None
    tokens_covered: float


def plan_statistics(
    plan: Plan, lengths: Sequence[int] | NDArray[Any] | Units, *, padded: bool = False, **removed: Any
) -> PlanStatistics:
    """Measure a plan, in time and memory linear in its documents.

    Args:
        plan: the steps.
        lengths: (documents,) integers, the tokens of each document; or `Units`, whose `squares` count as squared
            lengths.
        padded: each document takes as many tokens as the longest of its row. Efficiency counts the documents' own
            tokens; utilization and L2 lag count padding, too.

    Raises:
        ValueError: lengths that aren't positive integers, no length for a document of the plan, a wrong option, padded
            rows of `Units`.
    """
    refuse_removed(removed, "plan_statistics()")
    if not isinstance(plan, Plan):
        raise ValueError(f"plan must be a Plan, such as plan_epoch returns; got {type(plan).__name__}.")
    tokens_of = lengths.tokens if isinstance(lengths, Units) else whole_lengths(lengths).astype(np.int64)
    squares_of = lengths.squares if isinstance(lengths, Units) else tokens_of**2
    if len(plan.items) and int(plan.items.max()) >= len(tokens_of):
        most, count = int(plan.items.max()), len(tokens_of)
        raise ValueError(f"the plan holds document {most}, but there are {count} lengths. Pass the plan's lengths.")
    if check_flag(padded, "padded") and isinstance(lengths, Units):
        raise ValueError("padded=True needs the lengths of documents: units don't tell their longest sequence.")

    shape = (plan.num_steps, plan.num_ranks)
    counts = np.diff(plan.offsets)  # (rows,)
    own = plan.sums(tokens_of)  # (steps, ranks)
    planned = plan.items[: plan.num_documents]
    tokens = int(tokens_of[planned].sum())
    # Sums of squares of a row stay below capacity**2 < 2**62. A running sum that wraps at 2**64 has right differences.
    squares = plan.sums(squares_of)
    loads = own
    if padded:
        longest = np.zeros(len(counts), dtype=np.int64)  # (rows,)
        if len(plan.items):
            longest[counts > 0] = np.maximum.reduceat(tokens_of[plan.items], plan.offsets[:-1][counts > 0])
        loads, squares = (counts * longest).reshape(shape), (counts * longest**2).reshape(shape)
    lags = np.ptp(squares, axis=1).astype(np.float64)  # (steps,)

    costs = EVEN_LENGTH * loads.astype(np.float64) + squares.astype(np.float64)  # (steps, ranks)
    useful = EVEN_LENGTH * tokens + float(squares_of[planned].astype(np.float64).sum())

    covered = np.zeros(len(tokens_of), dtype=bool)
    covered[plan.items] = True
    per_step = counts.reshape(shape).sum(1)
    return PlanStatistics(
        num_steps=plan.num_steps,
        num_ranks=plan.num_ranks,
        capacity=plan.capacity,
        documents=plan.num_documents,
        tokens=tokens,
        left_out=int(np.count_nonzero(~covered)),
        filler_rows=plan.filler_rows,
        efficiency=_share(tokens, plan.num_steps * plan.num_ranks * plan.capacity),
        utilization=_share(tokens, plan.num_ranks * int(loads.max(1).sum())),
        cost_utilization=_share(useful, plan.num_ranks * float(costs.max(1).sum())),
        l2_lag=math.sqrt(lags.mean()) if len(lags) else 0.0,
        l2_lag_max=math.sqrt(lags.max(initial=0.0)),
        padding=1 - _share(int(own.sum()), int(loads.sum())),
        # The last step holds the remaining documents, so it is left out.
        spread=_spread(own.sum(1)[:-1], per_step[:-1], float(tokens_of.std())),
        tokens_covered=int(tokens_of[covered].sum()) / int(tokens_of.sum()),
    )


def _spread(tokens: NDArray[np.number], counts: NDArray[np.int64], sigma: float) -> float | None:
    """The spread of the mean lengths of steps, where sigma is the standard deviation of all lengths.

    The mean of n independent draws has the standard deviation sigma / sqrt(n).
    """
    tokens, counts = tokens[counts > 0], counts[counts > 0]
    if len(counts) < 2 or sigma == 0:
        return None
    return float(np.std(tokens / counts, ddof=1) / (sigma * np.sqrt(np.mean(1 / counts))))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 1.0

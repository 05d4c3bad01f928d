"""plan_statistics: how full a plan's rows are, how evenly its ranks are loaded, and how random its steps still are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tritonpack.checks import check_flag, is_number
from tritonpack.packing.lengths import check_integer, whole_lengths
from tritonpack.packing.plan import Plan


class Cost(Protocol):
    """What a row costs to train on: `per_token` for each token and `per_square` for each document's squared length."""

    @property
    def per_token(self) -> float: ...

    @property
    def per_square(self) -> float: ...


@dataclass(frozen=True)
class PlanStatistics:
    """What a plan makes of documents. Shares go from 0 to 1; a share of nothing is 1.

    Two steps of two ranks with room for 10 tokens each. In the first step the ranks hold 10 and 8 tokens, in the second
    5 and 5, so the ranks wait for (10 - 8) of 2 * (10 + 5) tokens' time; documents of 4, 4 and 2 tokens in the first
    row would take 12 if each were padded to 4, and padding all rows so would add 2 tokens to the 28. Document 6 is in
    no row:

    >>> lengths = [4, 4, 2, 8, 5, 5, 2]
    >>> plan = Plan(np.array([0, 1, 2, 3, 4, 5]), np.array([0, 3, 4, 5, 6]), num_ranks=2, capacity=10)
    >>> found = plan_statistics(plan, lengths)
    >>> found.tokens, found.efficiency, round(found.utilization, 4), round(found.padding_saved, 4)
    (28, 0.7, 0.9333, 0.0667)
    >>> found.l2_lag_max == (8 * 8 - (4 * 4 + 4 * 4 + 2 * 2)) ** 0.5, round(found.tokens_covered, 4)
    (True, 0.9333)

    Attributes:
        num_steps: steps.
        num_ranks: rows per step.
        capacity: tokens that fit into a row.
        documents: documents in the rows, one that is in two rows counted twice.
        tokens: their tokens.
        efficiency: tokens / (steps * ranks * capacity): how full rows are, so how few steps there are.
        utilization: tokens / (ranks * the sum over steps of the fullest rank's tokens): what is left of the ranks' time
            when all wait for the fullest, if time is proportional to tokens.
        cost_utilization: the same if a row takes per_token * tokens + per_square * the sum of its documents' squared
            lengths; None where no cost was given.
        l2_lag: of a step, sqrt(the largest sum of squared lengths of a rank - the smallest); over steps the root mean
            square, which is the average that the multipack project prints. In tokens.
        l2_lag_max: the largest of a step, in tokens.
        padding: the share of padding in what rows compute: 0 but for padded rows.
        padding_saved: the share that padding would have in these rows if each document were padded to the longest of
            its row; 0 for padded rows.
        spread: the standard deviation over steps of a step's mean document length, over that of independent draws: 1
            where steps are as alike as shuffling makes them, more where some hold long documents and others short
            ones. None where fewer than three steps tell, or all documents are equally long.
        tokens_covered: the share of all tokens that the plan holds, each document counted once.
        documents_covered: the share of all documents that the plan holds.
    """

    num_steps: int
    num_ranks: int
    capacity: int
    documents: int
    tokens: int
    efficiency: float
    utilization: float
    cost_utilization: float | None
    l2_lag: float
    l2_lag_max: float
    padding: float
    padding_saved: float
    spread: float | None
    tokens_covered: float
    documents_covered: float

    @property
    def documents_per_step(self) -> float:
        """The mean over steps; 0 where there is none."""
        return self.documents / self.num_steps if self.num_steps else 0.0

    def __str__(self) -> str:
        return (
            f"{self.num_steps:,} steps of {self.num_ranks} ranks, efficiency {self.efficiency:.2%}, utilization "
            f"{self.utilization:.2%}, L2 lag {self.l2_lag:,.0f} (at most {self.l2_lag_max:,.0f}), "
            f"{self.tokens_covered:.2%} of all tokens"
        )


def plan_statistics(
    plan: Plan,
    lengths: Sequence[int] | NDArray[Any],
    *,
    cost: Cost | None = None,
    total_tokens: int | None = None,
    padded: bool = False,
) -> PlanStatistics:
    """Measure a plan, in time and memory linear in its documents.

    Spread is judged by all steps but the last, which holds what was left over. Independent draws of n documents have
    means with the standard deviation sigma / sqrt(n), sigma being that of all lengths; so steps of different n are
    compared with sigma * sqrt(mean(1 / n)). That an epoch draws without replacement is left out: with k steps it lowers
    the expected spread by a factor of about sqrt(1 - 1/k) only.

    Args:
        plan: the steps.
        lengths: (documents,) integers, tokens of each document that the plan's items count.
        cost: anything with the numbers `per_token` and `per_square`, such as a `CostModel`.
        total_tokens: what `tokens_covered` is a share of, where that isn't the sum of lengths because documents were
            cut or dropped before they were planned.
        padded: each document takes as many tokens of its row as the row's longest. Efficiency still counts documents'
            own tokens only; utilization and L2 lag compare ranks by what they compute, padding included.

    Raises:
        ValueError: lengths that aren't a row of positive integers, or fewer than the plan speaks of; a total below 1.
    """
    if not isinstance(plan, Plan):
        raise ValueError(
            f"plan must be a Plan; got {type(plan).__name__}. plan_epoch makes one, and samplers have one."
        )
    tokens_of = whole_lengths(lengths).astype(np.int64)
    if len(plan.items) and int(plan.items.max()) >= len(tokens_of):
        raise ValueError(
            f"the plan holds document {int(plan.items.max())}, but there are only {len(tokens_of)} lengths. Pass the "
            "lengths that it was made from."
        )
    if total_tokens is not None:
        total_tokens = check_integer(total_tokens, "total_tokens", 1, 2**63 - 1)
    check_flag(padded, "padded")
    if cost is not None and not all(is_number(getattr(cost, name, None)) for name in ("per_token", "per_square")):
        raise ValueError(f"cost must have the numbers per_token and per_square, as a CostModel has; got {cost!r:.100}.")
    shape = (plan.num_steps, plan.num_ranks)
    counts = np.diff(plan.offsets)  # (rows,)
    longest = _longest(plan, tokens_of)  # (rows,)
    own = plan.sums(tokens_of)  # (steps, ranks)
    tokens, slots = int(own.sum()), int((counts * longest).sum())
    # Row sums of squares stay below capacity**2 < 2**62, and a running sum that wraps at 2**64 has right differences.
    squares = plan.sums(tokens_of**2)
    loads = own
    if padded:
        loads, squares = (counts * longest).reshape(shape), (counts * longest**2).reshape(shape)
    lags = np.ptp(squares, axis=1).astype(np.float64)  # (steps,)

    covered = np.zeros(len(tokens_of), dtype=bool)
    covered[plan.items] = True
    per_step = counts.reshape(shape).sum(1)
    return PlanStatistics(
        num_steps=plan.num_steps,
        num_ranks=plan.num_ranks,
        capacity=plan.capacity,
        documents=len(plan.items),
        tokens=tokens,
        efficiency=_share(tokens, plan.num_steps * plan.num_ranks * plan.capacity),
        utilization=_share(tokens, plan.num_ranks * int(loads.max(1).sum())),
        cost_utilization=None if cost is None else _cost_utilization(plan, tokens_of, loads, squares, cost),
        l2_lag=math.sqrt(lags.mean()) if len(lags) else 0.0,
        l2_lag_max=math.sqrt(lags.max(initial=0.0)),
        padding=1 - _share(tokens, slots) if padded else 0.0,
        padding_saved=0.0 if padded else 1 - _share(tokens, slots),
        spread=_spread(own.sum(1)[:-1], per_step[:-1], float(tokens_of.std())),
        tokens_covered=int(tokens_of[covered].sum()) / (total_tokens or int(tokens_of.sum())),
        documents_covered=int(covered.sum()) / len(covered),
    )


def mean_over_epochs(found: Sequence[PlanStatistics]) -> dict[str, float | None]:
    """The mean of each number over plans of several epochs, by its name; None where a plan has none."""
    means: dict[str, float | None] = {}
    for field in fields(PlanStatistics):
        values = [getattr(one, field.name) for one in found]
        means[field.name] = None if None in values else sum(values) / len(values)
    return means


def _longest(plan: Plan, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """(rows,): the longest document of each row, 0 where there is none."""
    longest = np.zeros(len(plan.offsets) - 1, dtype=np.int64)
    filled = np.diff(plan.offsets) > 0
    if filled.any():
        longest[filled] = np.maximum.reduceat(lengths[plan.items], plan.offsets[:-1][filled])
    return longest


def _cost_utilization(
    plan: Plan, lengths: NDArray[np.int64], loads: NDArray[np.number], squares: NDArray[np.number], cost: Cost
) -> float:
    """The documents' own cost over that of ranks which all wait for the costliest."""
    of_rank = cost.per_token * loads.astype(np.float64) + cost.per_square * squares.astype(np.float64)
    own = lengths[plan.items].astype(np.float64)
    useful = cost.per_token * own.sum() + cost.per_square * (own**2).sum()
    return _share(float(useful), plan.num_ranks * float(of_rank.max(1).sum()))


def _spread(tokens: NDArray[np.number], counts: NDArray[np.int64], sigma: float) -> float | None:
    """The spread of mean lengths over steps of so many tokens and documents, over that of independent draws."""
    tokens, counts = tokens[counts > 0], counts[counts > 0]
    if len(counts) < 2 or sigma == 0:
        return None
    return float(np.std(tokens / counts, ddof=1) / (sigma * np.sqrt(np.mean(1 / counts))))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 1.0

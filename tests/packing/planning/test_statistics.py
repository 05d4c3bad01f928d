import math

import numpy as np
import pytest

from tritonpack.packing import Units
from tritonpack.packing.planning.plan import Plan
from tritonpack.packing.planning.statistics import EVEN_LENGTH, plan_statistics


def plan_of(steps, capacity):
    """A plan from nested lists: documents of ranks of steps."""
    rows = [row for step in steps for row in step]
    items = np.array([item for row in rows for item in row], dtype=np.int32)
    return Plan(items, np.cumsum([0, *map(len, rows)]), num_ranks=len(steps[0]), capacity=capacity)


def naive(steps, lengths, capacity, padded):
    """The definitions of all measures in plain Python."""

    def tokens(row):
        return [max(lengths[i] for i in row) if padded else lengths[i] for i in row]

    def cost(values):
        return EVEN_LENGTH * sum(values) + sum(x * x for x in values)

    ranks, rows = len(steps[0]), [row for step in steps for row in step]
    planned = [i for row in rows for i in row]
    own = sum(lengths[i] for i in planned)
    squares = [[sum(x * x for x in tokens(row)) for row in step] for step in steps]
    lags = [math.sqrt(max(step) - min(step)) for step in squares]
    whole = [[i for row in step for i in row] for step in steps[:-1] if any(step)]
    means = [sum(lengths[i] for i in step) / len(step) for step in whole]
    sigma, spread = np.std(lengths), None
    if len(means) >= 2 and sigma:
        spread = np.std(means, ddof=1) / (sigma * math.sqrt(sum(1 / len(step) for step in whole) / len(whole)))
    slots = sum(len(row) * max(lengths[i] for i in row) for row in rows if row)
    return {
        "num_steps": len(steps), "num_ranks": ranks, "capacity": capacity, "filler_rows": 0,
        "documents": len(planned), "tokens": own, "left_out": len(lengths) - len(planned),
        "efficiency": own / (len(steps) * ranks * capacity),
        "utilization": own / (ranks * sum(max(sum(tokens(row)) for row in step) for step in steps)),
        "cost_utilization": cost([lengths[i] for i in planned])
        / (ranks * sum(max(cost(tokens(row)) for row in step) for step in steps)),
        "l2_lag": math.sqrt(sum(lag**2 for lag in lags) / len(lags)), "l2_lag_max": max(lags),
        "padding": 1 - own / slots if padded else 0.0, "spread": spread,
        "tokens_covered": sum(lengths[i] for i in planned) / sum(lengths),
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(15))
def test_random_plans_equal_definitions(seed):
    rng = np.random.default_rng(seed)
    num_steps, ranks, count = int(rng.integers(1, 9)), int(rng.integers(1, 6)), int(rng.integers(1, 60))
    lengths = rng.integers(1, int(rng.integers(2, 3000)), count)
    rows = [[[] for _ in range(ranks)] for _ in range(num_steps)]
    for item in rng.permutation(count)[: rng.integers(1, count + 1)].tolist():
        rows[rng.integers(num_steps)][rng.integers(ranks)].append(item)
    for padded in (False, True):
        found = plan_statistics(plan_of(rows, 10_000), lengths, padded=padded)
        assert vars(found) == pytest.approx(naive(rows, lengths.tolist(), 10_000, padded))


def test_squares_and_sums_exceed_64_bits():
    """The square of 2**31 - 1 tokens takes 62 bits, and the running sum of more than four squares more than 64."""
    longest = 2**31 - 1
    plan = plan_of([[[0], [1]], [[2], [3]], [[4], [5]]], longest)
    found = plan_statistics(plan, np.full(6, longest, dtype=np.int32))
    assert (found.tokens, found.efficiency, found.utilization, found.l2_lag_max) == (6 * longest, 1, 1, 0)
    assert found.cost_utilization == pytest.approx(1)
    uneven = plan_statistics(plan, np.array([longest, 1] * 3, dtype=np.int32))
    assert uneven.l2_lag == uneven.l2_lag_max == pytest.approx(longest)


def test_filler_rows_and_plans_of_nothing():
    rows = plan_of([[[0, 1], [2]], [[3], [1]]], 10)
    found = plan_statistics(Plan(rows.items, rows.offsets, 2, 10, filler_rows=1), [2, 3, 6, 4])
    assert (found.documents, found.tokens, found.left_out, found.filler_rows) == (4, 15, 0, 1)
    assert (found.efficiency, found.utilization) == (15 / 40, 15 / (2 * (6 + 4)))
    found = plan_statistics(Plan(np.zeros(0, np.int32), np.zeros(1, np.int64), 4, 10), [3, 4])
    assert (found.num_steps, found.tokens, found.tokens_covered, found.spread) == (0, 0, 0, None)
    assert (found.efficiency, found.utilization, found.cost_utilization) == (1, 1, 1)
    assert (found.l2_lag, found.l2_lag_max, found.padding) == (0, 0, 0)


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([3], {}, "holds document 1, but there are 1 lengths"),
        ([3, 0], {}, "document 1 has length 0"),
        (Units([3, 4], [9, 16]), {"padded": True}, "padded=True needs the lengths of documents"),
        ([3, 4], {"plan": []}, "plan must be a Plan, .*; got list"),
    ],
)
def test_refuses(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        plan_statistics(**{"plan": plan_of([[[0], [1]]], 9), "lengths": lengths, **options})

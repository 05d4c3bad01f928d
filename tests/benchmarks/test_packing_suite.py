"""The verdict of `benchmarks.packing.compare --suite`."""

import numpy as np
import pytest

pytest.importorskip("numba")

from benchmarks.packing.suite import OURS, Row, _losses, _ours, data_sets, measure
from tritonpack.packing.planning.plan import Plan

EVEN = Row(steps=10, covered=1, full=0.9, busy=0.9, lag=5, spread=1, milliseconds=2)


def test_measures_leave_out_the_last_step():
    plan = Plan(np.array([0, 1, 2, 3, 4]), np.array([0, 1, 2, 3, 4, 5, 5]), num_ranks=2, capacity=10)
    row = measure([plan], [np.array([10, 8, 6, 6, 1, 9])], 3.0)
    assert (row.steps, row.covered, row.full, row.busy) == (3, 31 / 40, 30 / 40, 30 / 32)
    assert row.lag == pytest.approx((36 / 2) ** 0.5)


@pytest.mark.parametrize(
    ("rival", "changes", "expected"),
    [
        ("multipack linear", {"full": 0.9005, "busy": 0.9005}, []),
        ("multipack linear", {"full": 0.902}, ["tiny: full 90.00%, multipack linear 90.20%"]),
        ("axolotl first-fit", {"busy": 0.95, "milliseconds": 1}, ["tiny: busy 90.00%, axolotl first-fit 95.00%"]),
        ("multipack linear", {"milliseconds": 1.5}, ["tiny: 2 ms, multipack linear 1.5 ms"]),
        ("trl", {"full": 1.0}, []),
    ],
)
def test_names_what_loses(rival, changes, expected):
    assert _losses("tiny", {OURS: EVEN, rival: EVEN._replace(**changes)}) == expected


@pytest.mark.parametrize("name", data_sets(np.full(100, 2048)))
def test_our_sampler_plans_every_data_set(name):
    capacity, draw = data_sets(np.full(2000, 2048))[name]
    plan = _ours().plan(draw(0), capacity, 8, 0, 0)
    assert plan.num_steps > 2
    assert plan.num_documents > 0.9 * len(draw(0))

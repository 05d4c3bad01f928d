"""The verdict of `benchmarks.packing.compare --suite`."""

import numpy as np
import pytest

pytest.importorskip("numba")

from benchmarks.packing.compare import all_of_ours
from benchmarks.packing.suite import OURS, Row, checked, losses, measure
from tritonpack.packing.planning.plan import Plan

EVEN = Row(steps=10, full=0.9, busy=0.9, cost=0.9, lag=5, most=9, spread=1, covered=1, milliseconds=2)


def test_measures_leave_out_the_last_step():
    plan = Plan(np.array([0, 1, 2, 3, 4]), np.array([0, 1, 2, 3, 4, 5, 5]), num_ranks=2, capacity=10)
    row = measure([plan], [np.array([10, 8, 6, 6, 1, 9])], 3.0, whole=False)
    assert (row.steps, row.covered, row.full, row.busy) == (3, 31 / 40, 30 / 40, 30 / 32)
    assert row.lag == pytest.approx((36 / 2) ** 0.5)
    assert measure([plan], [np.array([10, 8, 6, 6, 1, 9])], 3.0, whole=True).full == 31 / 60


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
    said = losses({"tiny": {OURS: EVEN, rival: EVEN._replace(**changes)}})
    assert said.endswith(f"that lose: {'; '.join(expected) or 'none'}.")


@pytest.mark.parametrize("sampler", all_of_ours(), ids=lambda sampler: sampler.name)
def test_plans_of_each_way_are_right(sampler):
    lengths = np.random.default_rng(0).integers(1, 65, 900)
    plans = [checked(sampler.plan(lengths, 256, 4, 0, epoch), lengths) for epoch in (0, 1)]
    assert plans[0].num_steps > 20
    assert plans[0].items.tolist() != plans[1].items.tolist()

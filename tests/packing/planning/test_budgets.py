"""Units with budgets: no row holds too much of anything, every unit is planned, and rows are full in what is scarce."""

import numpy as np
import pytest

from tests.packing.lengths import log_normal
from tests.packing.naive import fits_into
from tests.packing.planning.test_plan import AWKWARD, MODEL, deferrals
from tritonpack import Units
from tritonpack.packing import plan_epoch, plan_statistics
from tritonpack.packing.planning.order import shuffled
from tritonpack.packing.planning.plan import Plan, choose_steps_together, demands

OBJECTIVES = {"quadratic": {}, "linear": {"objective": "linear"}, "cost": {"objective": "cost", "cost_model": MODEL}}
CAPACITY = 4096


def chat_with_images(count, seed, share):
    """Text, and a share of documents with one to five images of 256 patches and a token for four patches."""
    rng = np.random.default_rng(seed)
    images = np.where(rng.random(count) < share, rng.integers(1, 6, count), 0)
    text = np.clip(rng.lognormal(5.5, 1, count), 10, CAPACITY).astype(np.int64)
    return Units.of_documents(
        np.where(images, 60 + 64 * images + rng.integers(0, 100, count), text), patches=256 * images
    )


def assert_sound(plan, units, budgets, *, everything=True):
    assert len(np.unique(plan.items[: plan.num_documents])) == plan.num_documents
    assert plan.sums(units.tokens).max() <= plan.capacity
    for name, most in budgets.items():
        assert plan.sums(units.resources[name]).max() <= most, name
    assert np.diff(plan.offsets).min() >= 1
    if everything:
        assert plan.num_documents == len(units)


def fewest_steps(units, ranks, budgets):
    totals = [(units.tokens.sum(), CAPACITY), *((units.resources[name].sum(), most) for name, most in budgets.items())]
    return max(-(-int(total) // (ranks * most)) for total, most in totals)


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("scarcity", [0.5, 1.0, 2.0])
def test_steps_are_near_the_lower_bound(share, scarcity):
    """Where patches are scarce rows are full of patches, where tokens are of tokens, and between of both."""
    units, ranks = chat_with_images(4000, 0, share), 4
    even = units.resources["patches"].sum() * CAPACITY / units.tokens.sum()  # rows can be full of both
    budgets = {"patches": max(1280, int(scarcity * even) // 256 * 256)}
    plan = plan_epoch(units, CAPACITY, ranks, budgets=budgets, tail="keep")
    assert_sound(plan, units, budgets)
    assert plan.num_steps <= 1.05 * fewest_steps(units, ranks, budgets) + 1
    tokens, patches = plan.sums(units.tokens)[:-1], plan.sums(units.resources["patches"])[:-1]
    full = (tokens.mean() / CAPACITY, patches.mean() / budgets["patches"])
    assert max(full) > 0.94
    if scarcity == 1.0:
        assert min(full) > 0.85, "rows are full of both"
    deferred, _ = deferrals(plan, shuffled(len(units), 0, 0))
    assert deferred.max() < 3 * plan.steps_together, "units with images must not wait"


@pytest.mark.parametrize("tail", ["drop", "spread", "keep"])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("together", [1, 4])
def test_no_row_exceeds_a_budget(together, objective, tail):
    for seed in range(4):
        units = chat_with_images(300, seed, 0.5)
        units = Units(units.tokens, units.squares, {**units.resources, "frames": units.tokens % 3})
        budgets = {"frames": 12, "patches": 1536}
        options = {"tail": tail, "steps_together": together, "epoch": seed, **OBJECTIVES[objective]}
        plan = plan_epoch(units, CAPACITY, 3, budgets=budgets, **options)
        assert_sound(plan, units, budgets, everything=tail != "drop")
        again = plan_epoch(units, CAPACITY, 3, budgets=dict(reversed(budgets.items())), **options)
        assert plan.items.tolist() == again.items.tolist(), "the order of budgets doesn't matter"


def small_case(seed):
    """Few units for many ranks; large ones take one resource or the other, so the right pairs must be found."""
    rng = np.random.default_rng(seed)
    count, ranks = int(rng.integers(1, 11)), int(rng.integers(1, 8))
    tokens, patches = rng.integers(1, 13, count), rng.integers(0, 13, count)
    if seed % 3:
        tokens, patches = np.where(rng.random(count) < 0.5, [tokens, 1 + patches // 5], [1 + tokens // 5, patches])
    return Units.of_documents(tokens, patches=patches), ranks


@pytest.mark.parametrize("tail", ["keep", "spread"])
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 10))])
def test_plans_whatever_brute_force_can_plan(part, tail):
    planned = repeated = 0
    for seed in range(150 * part, 150 * part + 150):
        units, ranks = small_case(seed)
        plan = plan_epoch(units, 12, ranks, budgets={"patches": 12}, tail=tail, epoch=seed, steps_together=1 + seed % 2)
        assert_sound(plan, units, {"patches": 12})
        takes = list(zip(units.tokens.tolist(), units.resources["patches"].tolist(), strict=True))
        most = len(units) // ranks * ranks
        possible = most > 0 and fits_into(takes, (12, 12), most)
        assert (plan.filler_rows == 0) == possible, (takes, ranks)
        planned += possible
        repeated += not possible
    assert min(planned, repeated) > 30


@pytest.mark.parametrize("name", AWKWARD)
def test_units_of_documents_are_planned_as_documents(name):
    lengths = AWKWARD[name]
    units = Units.of_documents(lengths, unused=np.zeros(len(lengths), dtype=np.int64))
    for options in (
        {"tail": "keep"},
        {"tail": "spread", "objective": "linear"},
        {"tail": "keep", **OBJECTIVES["cost"]},
    ):
        plan = plan_epoch(lengths, 1024, 4, **options)
        same = plan_epoch(units, 1024, 4, budgets={"unused": 0}, **options)
        assert (plan.items.tolist(), plan.offsets.tolist()) == (same.items.tolist(), same.offsets.tolist())


def pairs(seed):
    """Chosen and rejected answers of about equal length, and single documents that are as long as a pair."""
    rng = np.random.default_rng(seed)
    lengths = log_normal(3000, mean=300, high=1500, seed=seed)
    return Units.of_sequences([[n // 2, n - n // 2] if n > 1 and rng.random() < 0.5 else [n] for n in lengths.tolist()])


@pytest.mark.parametrize("make", [pairs])
@pytest.mark.parametrize("objective", ["quadratic", "cost"])
def test_attention_is_balanced_by_squares_of_sequences(objective, make):
    """Tokens alone, as if each unit were one document, don't tell the work of attention."""
    units = make(0)
    by_squares, by_tokens = (
        plan_statistics(plan_epoch(each, CAPACITY, 4, **OBJECTIVES[objective]), units, cost=MODEL)
        for each in (units, units.tokens)
    )
    assert by_squares.efficiency > by_tokens.efficiency - 0.003
    if objective == "quadratic":
        assert by_squares.l2_lag < 0.8 * by_tokens.l2_lag
    else:
        assert by_squares.cost_utilization > by_tokens.cost_utilization


def test_statistics_count_squares():
    units = Units.of_sequences([[3, 2], [5], [1, 1, 1]])
    plan = Plan(np.array([0, 2, 1]), np.array([0, 2, 3]), num_ranks=2, capacity=8)
    found = plan_statistics(plan, units, cost=MODEL)
    assert found.l2_lag_max == (25 - (13 + 3)) ** 0.5
    costs = [MODEL.per_token * 8 + MODEL.per_square * 16, MODEL.per_token * 5 + MODEL.per_square * 25]
    assert found.cost_utilization == pytest.approx(sum(costs) / (2 * max(costs)))
    with pytest.raises(ValueError, match="padded=True needs the lengths of documents"):
        plan_statistics(plan, units, padded=True)


def test_a_step_that_is_full_of_anything_is_full():
    """48 patches fill two steps of three ranks; their tokens fill a fifth."""
    units = Units.of_documents([8] * 12, patches=[4] * 12)
    plan = plan_epoch(units, 80, 3, budgets={"patches": 8})
    assert (plan.num_steps, plan.num_documents) == (2, 12)
    with pytest.raises(
        ValueError,
        match="96 tokens can't fill one step of 3 ranks with 80 tokens each to 95%",
    ):
        plan_epoch(units, 80, 3, budgets={"patches": 20})
    some = plan_epoch(units, 80, 3, budgets={"patches": 8}, order=np.arange(8))
    assert (some.num_steps, some.num_documents) == (1, 6)


def test_spread_makes_steps_equal_in_what_is_scarce():
    """Rows hold many units, and are full of patches where tokens are half."""
    rng = np.random.default_rng(0)
    units = Units.of_documents(rng.integers(10, 200, 4000), patches=rng.integers(0, 100, 4000))
    for budget, least in ((1000, 1), (1000, 60), (1200, 1), (1800, 1)):
        plan = plan_epoch(
            units, CAPACITY, 4, budgets={"patches": budget}, tail="spread", least_steps=least, steps_together=4
        )
        assert_sound(plan, units, {"patches": budget})
        held = plan.sums(units.resources["patches"]).sum(axis=1)
        assert held.min() > 0.9 * np.median(held)


def test_steps_together_are_chosen_by_what_is_scarce():
    """Rows hold two images, which combine badly, and any number of tokens."""
    rng = np.random.default_rng(0)
    units = Units.of_documents(rng.integers(1, 40, 3000), patches=rng.integers(200, 700, 3000))
    takes, _, limits = demands(units, 10**6, {"patches": 1024})
    assert choose_steps_together(takes, limits, 1) >= 16
    assert choose_steps_together(takes[:, :1], limits[:1], 1) == 1

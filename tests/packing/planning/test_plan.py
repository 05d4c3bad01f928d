"""plan_epoch: what holds for every plan, the ends of epochs, how good plans are, and what is refused."""

from collections import Counter
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import RandomState

from tests.packing.lengths import log_normal, openchat
from tests.packing.naive import fewest_bins
from tritonpack.packing import Units, plan_statistics
from tritonpack.packing.planning.plan import Plan, choose_steps_together, epoch_order, plan_epoch

DIGEST = "d5313fb1cffb290b"


def check_plan(plan, tokens, numbers, tail):
    """No row is too long or empty, no document comes twice, and none is left out but by tail="drop"."""
    rows, planned = plan.sums(tokens), plan.items[: plan.num_documents]
    assert not Counter(planned.tolist()) - Counter(numbers.tolist())
    assert plan.left_out == len(numbers) - len(planned)
    assert tail == "drop" or not plan.left_out
    assert rows.max(initial=0) <= plan.capacity
    assert rows.min(initial=1) > 0
    fillers = plan.items[plan.num_documents :]
    assert tokens[fillers].tolist() == np.resize(np.sort(tokens[planned]), plan.filler_rows).tolist(), "the shortest"
    assert np.diff(plan.offsets)[len(plan.offsets) - 1 - plan.filler_rows :].tolist() == [1] * plan.filler_rows


def deferrals(plan, order):
    """By how many steps each planned document comes later than the step that read it from the stream."""
    step_of = np.full(order.max() + 1, -1)
    step_of[plan.items] = np.repeat(np.arange(len(plan.offsets) - 1) // plan.num_ranks, np.diff(plan.offsets))
    steps = step_of[order]
    # A step has read the stream at least up to the last document that it or an earlier step takes.
    furthest = np.array([np.flatnonzero(steps == step).max() for step in range(plan.num_steps)])
    read_at = np.searchsorted(np.maximum.accumulate(furthest), np.arange(len(steps)))
    return (steps - read_at)[steps >= 0]


@st.composite
def cases(draw):
    """Lengths or units of one of several kinds, a capacity, a number of ranks, options."""
    capacity, ranks = draw(st.sampled_from([7, 64, 1000])), draw(st.sampled_from([1, 2, 3, 8, 17]))
    count, rng = draw(st.integers(1, 400)), np.random.default_rng(draw(st.integers(0, 10**6)))
    kinds = [
        rng.integers(1, capacity + 1, count),
        np.clip(capacity // 2 + rng.integers(-2, 3, count), 1, capacity),
        np.where(rng.random(count) < 0.1, capacity, rng.integers(1, max(2, capacity // 10), count)),
        np.clip(rng.lognormal(np.log(capacity / 10 + 1), 1, count), 1, capacity).astype(int),
        np.where(np.arange(count) < count // 2, capacity, 1),
    ]
    lengths = draw(st.sampled_from(kinds))
    squares = np.maximum(lengths, lengths**2 // rng.integers(1, 4, count)) if draw(st.booleans()) else lengths**2
    choices = {
        "tail": ["drop", "spread", "keep"], "objective": ["quadratic", "linear"], "least_steps": [1, 1, 4],
        "shuffle": [True, False], "seed": [0, 7],
        "done": [None, rng.random(count) < draw(st.floats(0, 1))],
    }  # fmt: skip
    options = {name: draw(st.sampled_from(values)) for name, values in choices.items()}
    return Units(lengths, squares), capacity, ranks, options


def plan_or_error(*arguments, **options):
    try:
        return plan_epoch(*arguments, **options)
    except ValueError as error:
        return str(error)


@given(cases())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_every_plan(case):
    units, capacity, ranks, options = case
    done, tail, least = options["done"], options["tail"], options["least_steps"]
    numbers = epoch_order(len(units), options["seed"], 0, options["shuffle"])
    numbers = numbers if done is None else numbers[~done[numbers]]
    plan = plan_or_error(units, capacity, ranks, **options)
    if isinstance(plan, str):
        light = tail == "drop" and done is None and units.tokens.sum() < 0.95 * ranks * capacity
        assert ("can't fill one step" if light else "can't make least_steps") in plan
        assert light or least * ranks >= len(numbers)
        return
    check_plan(plan, units.tokens, numbers, tail)
    assert plan.num_steps >= least or (tail == "drop" and done is not None) or not len(numbers)
    if done is None and len(units) >= 20 * ranks and least == 1:
        assert deferrals(plan, numbers).max() < 3 * plan.steps_together
    again = plan_epoch(units, capacity, ranks, **options)
    assert (again.items.tolist(), again.offsets.tolist()) == (plan.items.tolist(), plan.offsets.tolist())


def test_drop_leaves_out_a_last_step_that_is_not_full():
    for lengths, capacity in ((openchat(), 32768), (log_normal(3000, mean=150, high=1024), 1024)):
        keep, drop = (plan_epoch(lengths, capacity, 8, tail=tail) for tail in ("keep", "drop"))
        kept = len(drop.items)
        assert np.array_equal(keep.items[:kept], drop.items)
        assert drop.left_out == len(lengths) - kept > 0
        assert lengths[keep.items[kept:]].sum() < 0.95 * 8 * capacity
        assert keep.num_steps == drop.num_steps + 1
    for epoch in range(5):  # of documents of half a row and a bit 20 rows hold 20, and 38 have 96% of the tokens
        plan = plan_epoch(np.full(38, 51), 100, 20, epoch=epoch)
        assert (plan.num_steps, plan.num_documents, plan.filler_rows) == (1, 20, 0)
    with pytest.raises(ValueError, match="1,887 tokens can't fill one step of 20 ranks with 100 tokens each to 95%"):
        plan_epoch(np.full(37, 51), 100, 20)
    plan = plan_epoch(np.full(31, 100), 100, 32)  # 97% full: the last rank gets a filler row
    assert (plan.num_steps, plan.num_documents, plan.filler_rows) == (1, 31, 1)


def small_case(seed):
    """Few documents for many ranks, so that most cases are close to impossible."""
    rng = np.random.default_rng(seed)
    capacity, num_ranks, count = int(rng.choice([5, 7, 10, 12, 20])), int(rng.integers(1, 8)), int(rng.integers(1, 13))
    shortest, longest = (1, capacity) if seed % 2 else (capacity // 4, capacity // 2 + 1)
    lengths = rng.integers(shortest, longest + 1, count)
    if seed % 5 < 2:
        lengths[rng.integers(0, count, 1 + count // 3)] = capacity
    return lengths, capacity, num_ranks


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 10))])
def test_plans_whatever_brute_force_can_plan(part):
    """Whole steps are possible if all documents fit into so many rows: a row of two documents can be split."""
    found = Counter()
    for seed in range(200 * part, 200 * part + 200):
        lengths, capacity, num_ranks = small_case(seed)
        most = len(lengths) // num_ranks * num_ranks
        possible = most > 0 and fewest_bins(lengths.tolist(), capacity, len(lengths)) <= most
        keep, spread = (plan_epoch(lengths, capacity, num_ranks, tail=tail, epoch=seed) for tail in ("keep", "spread"))
        for plan in (keep, spread):
            check_plan(plan, lengths, np.arange(len(lengths)), "keep")
            assert (plan.filler_rows == 0) == possible, (lengths, capacity, num_ranks)
        assert spread.num_steps <= keep.num_steps
        found[possible] += 1
    assert min(found.values()) > 40


@pytest.mark.parametrize("tail", ["keep", "spread"])
def test_packs_shortest_documents_together_to_save_a_step(tail):
    """A step places 3, 3, 2, 2, 2 into rows of 3 + 2 and 3 + 2; two full rows hold them all.

    And 10 rows of 6 tokens, one with 1 besides: only steps long before the last have documents to give.
    """
    for lengths, capacity, ranks, steps in (([6, 6, 6, 3, 3, 2, 2, 2], 6, 5, 1), ([6] * 21 + [1] * 5, 10, 2, 11)):
        for epoch in range(10):
            plan = plan_epoch(lengths, capacity, ranks, tail=tail, epoch=epoch)
            check_plan(plan, np.array(lengths), np.arange(len(lengths)), tail)
            assert (plan.num_steps, plan.filler_rows) == (steps, 0)


@pytest.mark.parametrize("tail", ["spread", "keep", "drop"])
def test_missing_steps_get_documents(tail):
    lengths = log_normal(200, mean=60, high=256)
    for ranks, more in ((1, 0), (1, 7), (3, 1), (3, 7)):
        plan = plan_epoch(lengths, 256, ranks, tail=tail)
        longer = plan_epoch(lengths, 256, ranks, tail=tail, least_steps=plan.num_steps + more)
        assert longer.num_steps == plan.num_steps + more
        expected = plan.items if tail == "drop" and not more else np.arange(200)
        assert sorted(longer.items.tolist()) == sorted(expected.tolist()), "what drop leaves out comes first"
        tokens = longer.sums(lengths).sum(1)
        assert tail != "spread" or ranks == 1 or tokens.std() < 0.2 * tokens.mean(), "about equally full"


@pytest.mark.parametrize("epoch", range(2))
def test_openchat(epoch):
    """Our targets. multipack's two samplers are 98.2 and 99.6% full, with lags of 438 and 6500."""
    lengths = openchat()
    found = plan_statistics(plan_epoch(lengths, 32768, 8, epoch=epoch), lengths)
    assert min(found.efficiency, found.utilization, found.cost_utilization) >= 0.998
    assert found.l2_lag <= 250
    assert found.l2_lag_max <= 450
    linear = plan_statistics(plan_epoch(lengths, 32768, 8, epoch=epoch, objective="linear"), lengths)
    assert linear.utilization >= 0.999
    spread = plan_epoch(lengths, 32768, 8, tail="spread", epoch=epoch)
    assert spread.num_steps == -(-int(lengths.sum()) // (8 * 32768)), "as few as possible"
    tokens = spread.sums(lengths).sum(axis=1)
    assert tokens.min() > 0.95 * tokens.max(), "equally full"


@pytest.mark.parametrize(
    ("lengths", "capacity", "objective", "most"),
    [
        (openchat(), 32768, "linear", 1.1),
        (openchat(), 8192, "quadratic", 1.2),
        (log_normal(60_000), 32768, "quadratic", 1.1),
        (np.random.default_rng(0).integers(16385, 32769, 2000), 32768, "quadratic", 1.1),
    ],
)
def test_mean_lengths_of_steps_are_those_of_random_steps(lengths, capacity, objective, most):
    """Packing a whole epoch at once gives 4 to 13 times their spread."""
    plans = (plan_epoch(lengths, capacity, 8, epoch=epoch, objective=objective) for epoch in range(5))
    assert np.mean([plan_statistics(plan, lengths).spread for plan in plans]) <= most


def test_the_planner_s_plans(monkeypatch):
    """Every machine makes the plans of which this is a digest. They change with the planner alone, and states of
    samplers with them: a change of the digest needs a new version of states."""

    def order(count, *_):
        return RandomState(count).permutation(count).astype(np.int32)

    monkeypatch.setattr("tritonpack.packing.planning.plan.epoch_order", order)
    rng, found = RandomState(0), blake2b(digest_size=8)
    for number in range(240):
        capacity, count = [64, 1000, 8192][number % 3], [20, 150, 1500][rng.randint(3)]
        lengths = [
            rng.randint(1, capacity + 1, count),
            rng.randint(capacity // 5, capacity // 2, count),
            np.clip(capacity // 2 + rng.randint(-2, 3, count), 1, capacity),
            np.where(rng.random_sample(count) < 0.3, capacity * 3 // 5, rng.randint(1, capacity // 10, count)),
        ][rng.randint(4)].astype(np.int64)
        given = lengths if rng.randint(3) else Units(lengths, lengths**2 // 2 + lengths)
        options = {"tail": ["keep", "spread"][rng.randint(2)], "objective": ["linear", "quadratic"][rng.randint(2)]}
        plan = plan_epoch(given, capacity, [1, 2, 3, 8][rng.randint(4)], **options)
        found.update(plan.items.astype("<i4").tobytes() + plan.offsets.astype("<i8").tobytes())
    assert found.hexdigest() == DIGEST


@pytest.mark.parametrize(
    ("lengths", "capacity", "num_ranks", "expected"),
    [
        (log_normal(60_000), 32768, 64, 1),
        (np.random.default_rng(0).integers(513, 1025, 2000), 1024, 8, 1),  # each document a row: nothing to combine
        (openchat(), 4096, 1, 64),
        (openchat(), 8192, 8, 8),
        (np.full(9, 100), 1024, 4, 8),  # one step
    ],
)
def test_steps_are_planned_together_if_they_hold_few_documents(lengths, capacity, num_ranks, expected):
    assert choose_steps_together(lengths, capacity, num_ranks) == expected
    plan = plan_epoch(lengths, capacity, num_ranks, tail="keep")
    assert plan.steps_together == expected
    assert ("steps planned together" in repr(plan)) == (expected > 1)


def test_orders():
    lengths = log_normal(400, mean=60, high=256)
    plans = {
        str(plan_epoch(lengths, 256, 2, seed=seed, epoch=epoch).items.tolist()) for seed in (0, 1) for epoch in (0, 1)
    }
    assert len(plans) == 4
    plan = plan_epoch(np.full(64, 256), 1024, 2, shuffle=False)
    assert plan.steps_together == 1
    assert np.sort(plan.items.reshape(8, 8)).tolist() == np.arange(64).reshape(8, 8).tolist()
    done = np.array([True, False, True])
    assert plan_epoch([5, 5, 5], 8, 2, done=done).num_steps == 0, "the others may fill no step"
    assert plan_epoch([9, 5, 9], 8, 1, done=done, tail="keep").items.tolist() == [1]


REFUSED = [
    ({}, "800 tokens can't fill one step of 4 ranks with 1,024 tokens each to 95%.*tail='keep'"),
    ({"tail": "last"}, "tail must be one of 'drop', 'spread', 'keep'; got 'last'"),
    ({"objective": "cubic"}, "objective must be one of 'quadratic', 'linear'; got 'cubic'"),
    ({"seed": -1}, "seed must be an integer of at least 0; got -1"),
    ({"epoch": 0.5}, "epoch must be .* got 0.5"),
    ({"capacity": 99}, "8 of 8 documents are longer than the capacity of 99 tokens"),
    ({"capacity": 2**30 + 1}, "capacity must be an integer from 1 to 1073741824"),
    ({"num_ranks": 2**16 + 1}, "num_ranks must be an integer from 1 to 65536"),
    ({"tail": "keep", "least_steps": 3}, "8 documents can't make least_steps=3 steps in which each of 4 ranks has"),
    *(({"done": done}, "done must be 8 bools, one for each document; got") for done in ([True], np.zeros(8, int))),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        plan_epoch(**{"lengths": np.full(8, 100), "capacity": 1024, "num_ranks": 4, **options})


def test_rows_of_plans():
    plan = Plan(np.array([2, 0, 4, 1, 3]), np.array([0, 1, 3, 4, 5]), num_ranks=2, capacity=8)
    assert plan.sums(np.array([1, 10, 100, 1000, 10000])).tolist() == [[100, 10001], [10, 1000]]
    with pytest.raises(IndexError, match="step 2, rank 0 of a plan of 2 steps and 2 ranks"):
        plan.row(2, 0)
    for items, offsets, num_ranks, message in (
        ([0, 1], [0, 1], 1, "offsets must ascend from 0 to 2, the number of items"),
        ([0, 1, 2], [0, 1, 2, 3], 2, "3 rows don't make whole steps of 2 ranks"),
        ([0], [0, 1], 0, "num_ranks must be an integer from 1"),
    ):
        with pytest.raises(ValueError, match=message):
            Plan(np.array(items), np.array(offsets), num_ranks, capacity=8)

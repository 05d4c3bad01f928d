"""Units of several sequences with a budget per resource, in the distributed sampler: what it promises for documents."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.packing.lengths import log_normal
from tritonpack import CostModel, MultipackDistributedBatchSampler, Units, notices
from tritonpack.packing import plan_statistics

CAPACITY, BUDGETS = 512, {"images": 4, "patches": 900}


@pytest.fixture(autouse=True)
def other_settings_are_intended(monkeypatch):
    monkeypatch.setattr(notices, "said", {"other-settings": None, "same-epoch": None})


def random_units(count, seed=0):
    """Units of one to three sequences; a third of them have images."""
    random = np.random.default_rng(seed)
    lengths = log_normal(3 * count, mean=40, high=CAPACITY // 4, seed=seed).reshape(count, 3)
    sequences = [row[: random.integers(1, 4)].tolist() for row in lengths]
    images = random.integers(0, 4, count) * (random.random(count) < 0.34)
    return Units.of_sequences(sequences, patches=images * random.integers(50, 290, count), images=images)


UNITS = random_units(300)


def samplers(num_replicas, units=UNITS, capacity=CAPACITY, seed=5, budgets=BUDGETS, **options):
    return [
        MultipackDistributedBatchSampler(capacity, units, num_replicas, rank, seed, budgets=budgets, **options)
        for rank in range(num_replicas)
    ]


def assert_within(plan, units, capacity, budgets):
    """No row takes more than it has, of tokens and of every resource."""
    assert plan.sums(units.tokens).max(initial=0) <= capacity
    for name, budget in budgets.items():
        assert plan.sums(units.resources[name]).max(initial=0) <= budget, name


@pytest.mark.parametrize("tail", ["drop", "keep", "spread"])
@pytest.mark.parametrize("num_replicas", [1, 4])
def test_every_unit_once_within_every_budget(num_replicas, tail):
    ranks = samplers(num_replicas, tail=tail)
    for one in ranks:
        one.set_epoch(3)
    batches = [list(one) for one in ranks]
    plan = ranks[0].plan
    assert_within(plan, UNITS, CAPACITY, BUDGETS)
    assert {len(each) for each in batches} == {len(ranks[0])}
    seen = [unit for rows in batches for batch in rows for unit in batch]
    assert len(seen) - len(set(seen)) == plan.filler_rows
    assert len(set(seen)) + ranks[0].dropped_documents == len(UNITS)
    assert tail == "drop" or ranks[0].dropped_documents == 0
    tokens = ranks[0].tokens_per_step()
    assert tokens.sum() == UNITS.tokens[seen].sum()
    for name, most in {None: CAPACITY, **BUDGETS}.items():
        held = (UNITS.tokens if name is None else UNITS.resources[name])[seen].sum()
        assert ranks[0].efficiency(name) == pytest.approx(held / (len(plan) * num_replicas * most))


def test_efficiency_of_what_has_no_budget():
    with pytest.raises(ValueError, match="'pixels' has no budget; those with one are patches, images"):
        samplers(1)[0].efficiency("pixels")


class TestOverlong:
    units = Units.of_sequences([[3, 2]] * 30 + [[9, 9], [3, 1], [4, 4]], patches=[1] * 30 + [0, 20, 30])

    def test_is_an_error_that_names_the_unit(self):
        for capacity, message in (
            (16, "take more than a row has .the first: unit 30 takes 18 tokens, and the batch_max_length is 16"),
            (18, "2 of 33 units .*the first: unit 31 takes 20 patches, and the budget of patches is 16.*at least 30"),
        ):
            with pytest.raises(ValueError, match=message):
                samplers(1, self.units, capacity, budgets={"patches": 16})

    def test_is_dropped_and_counted(self):
        one = samplers(1, self.units, 16, budgets={"patches": 16}, overlong="drop", tail="keep")[0]
        assert sorted(unit for batch in one for unit in batch) == list(range(30))
        assert (one.report.documents, one.report.tokens_lost) == (3, 18 + 4 + 8)
        assert str(one.report) == "3 units that take more than a row has dropped: 30 tokens lost"
        assert one.lengths.tolist() == [5] * 30 + [0] * 3
        assert one.dropped_documents == 0

    def test_that_leaves_nothing(self):
        with pytest.raises(ValueError, match="drop' leaves nothing"):
            samplers(1, Units.of_documents([9, 2], patches=[0, 5]), 8, budgets={"patches": 4}, overlong="drop")


def test_refuses_budgets_that_do_not_match_the_units():
    for units, budgets, message in (
        (UNITS, {"patches": 900}, "the units have the resource 'images', and budgets="),
        (UNITS, {**BUDGETS, "pixels": 3}, "budgets has 'pixels', which isn't a resource of the units"),
        ([5, 3, 9], {"patches": 3}, r"budgets has 'patches', which isn't a resource of the units \(none\)"),
        (UNITS, {**BUDGETS, "images": -1}, "the budget of images must be an integer from 0"),
        (UNITS, [900], r"budgets must be a mapping from names of resources to integers; got \[900\]"),
    ):
        with pytest.raises(ValueError, match=message):
            samplers(1, units, budgets=budgets)


class TestStates:
    def test_of_plain_lengths_are_those_of_units(self):
        lengths = [5, 3, 9, 4, 7, 6, 8, 2, 5, 5, 9, 1] * 5
        one, other = (
            MultipackDistributedBatchSampler(16, each, 2, 0, 7, tail="keep")
            for each in (lengths, Units.of_documents(lengths))
        )
        every = list(one)
        other.load_state_dict(one.state_dict(batches_done=3))
        assert list(other) == every[3:]

    @pytest.mark.parametrize(
        ("budgets", "message"),
        [
            ([1], "can't be: budgets must be a mapping"),
            ({"patches": 900}, "can't be: the units have the resource 'images'"),
            ({"images": 4, "patches": "900"}, "can't be: the budget of patches must be .* got '900'"),
            ({"images": 4, "patches": 900, "pixels": 1}, "can't be: budgets has 'pixels'"),
        ],
    )
    def test_damaged_budgets_are_refused(self, budgets, message):
        one = samplers(2)[0]
        state = one.state_dict(batches_done=2)
        with pytest.raises(ValueError, match=message):
            one.load_state_dict(state | {"budgets": json.dumps(budgets)})
        assert one.state_dict(batches_done=2) == state

    @pytest.mark.parametrize("what", ["squares", "resources", "names"])
    def test_of_other_units(self, what):
        tokens, squares, resources = UNITS.tokens, UNITS.squares.copy(), dict(UNITS.resources)
        if what == "squares":
            squares[7] = tokens[7] ** 2 if squares[7] < tokens[7] ** 2 else tokens[7]
        elif what == "resources":
            resources["patches"] = np.roll(resources["patches"], 1)
        else:
            resources["pixels"] = resources.pop("patches")
        other = samplers(2, Units(tokens, squares, resources), budgets=dict.fromkeys(resources, 10**6))[0]
        with pytest.raises(ValueError, match=r"saved with other lengths: .* of '300 units with .* patches"):
            other.load_state_dict(samplers(2)[0].state_dict())


@st.composite
def interruptions(draw):
    """Units or documents, and the settings of the parts of an epoch: ranks, capacity, budgets, steps."""
    units = random_units(draw(st.integers(20, 90)), draw(st.integers(0, 10**6)))
    budgets = st.fixed_dictionaries({"patches": st.integers(867, 2000), "images": st.integers(3, 9)})
    if draw(st.booleans()):
        units, budgets = Units.of_documents(units.tokens), st.just({})
    parts = draw(
        st.lists(
            st.fixed_dictionaries(
                {
                    "num_replicas": st.integers(1, 5),
                    "capacity": st.sampled_from([CAPACITY, 600, 1000]),
                    "budgets": budgets,
                    "tail": st.sampled_from(["keep", "spread"]),
                    "cost_model": st.sampled_from([None, CostModel(3.0, 0.5)]),
                    "lookahead": st.sampled_from([0.0, 0.01, 0.2]),
                    "shuffle": st.booleans(),
                    "steps_together": st.sampled_from([1, 3]),
                    "steps": st.integers(0, 4),
                }
            ),
            min_size=1,
            max_size=4,
        )
    )
    return units, parts


def check_parts(units, parts, epoch):
    """Train on some steps with each part's settings, the last one to the end: each unit once, no row over a budget."""
    state, seen = None, []
    for number, part in enumerate(parts):
        options = dict(part)
        steps, options["objective"] = options.pop("steps"), "cost" if part["cost_model"] else "quadratic"
        ranks = samplers(options.pop("num_replicas"), units, **options)
        for one in ranks:
            one.set_epoch(epoch)
            if state is not None:
                one.load_state_dict(json.loads(json.dumps(state)))
        plan = ranks[0].plan
        assert_within(plan, units, part["capacity"], part["budgets"])
        iterators = [iter(one) for one in ranks]
        rows = []
        while number == len(parts) - 1 or steps > 0:
            step = [next(iterator, None) for iterator in iterators]
            if step[0] is None:
                assert step == [None] * len(ranks), "ranks with different numbers of batches"
                break
            rows += step
            steps -= 1
        assert all(rows), "a rank without a unit"
        fillers = max(0, plan.filler_rows + len(rows) - plan.num_steps * plan.num_ranks)
        seen += [unit for row in rows[: len(rows) - fillers] for unit in row]
        state = ranks[0].state_dict()
        assert [one.state_dict() for one in ranks] == [state] * len(ranks)
    assert sorted(seen) == list(range(len(units)))


@given(interruptions())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_every_unit_once_over_any_parts(case):
    check_parts(*case, epoch=1)


def test_a_smaller_budget_leaves_out_what_does_not_fit_now():
    one = samplers(2, tail="keep")[0]
    seen = one.plan.items[: one.plan.offsets[6]].tolist()
    state = one.state_dict(batches_done=3)
    small = {"patches": 300, "images": 4}
    with pytest.raises(ValueError, match=r"takes .* patches, and the budget of patches is 300"):
        samplers(1, budgets=small)
    other = samplers(1, budgets=small, overlong="drop", tail="keep")[0]
    other.load_state_dict(state)
    rest = [unit for batch in other for unit in batch]
    left_out = np.flatnonzero(UNITS.resources["patches"] > 300)
    assert not set(seen) & set(rest)
    assert set(range(len(UNITS))) - set(seen) - set(rest) == set(left_out.tolist()) - set(seen) != set()
    assert other.report.documents == len(left_out)
    assert_within(other.plan, UNITS, CAPACITY, small)


def test_efficiency_counts_what_filler_rows_repeat_once():
    units = Units.of_documents([40] * 5, patches=[4] * 5)
    sampler = MultipackDistributedBatchSampler(40, units, 4, 0, seed=0, budgets={"patches": 4}, tail="keep")
    assert sampler.plan.filler_rows == 3
    assert sampler.efficiency() == plan_statistics(sampler.plan, units).efficiency == 5 / 8
    assert sampler.efficiency("patches") == 5 / 8

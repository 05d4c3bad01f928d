"""Units of several sequences in the distributed sampler: what it promises for documents."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.packing.lengths import log_normal
from tritonpack import MultipackDistributedBatchSampler, Units, notices
from tritonpack.packing import plan_statistics

CAPACITY = 512


@pytest.fixture(autouse=True)
def other_settings_are_intended(monkeypatch):
    monkeypatch.setattr(notices, "said", {"other-settings": None, "same-epoch": None})


def random_units(count, seed=0):
    """Units of one to three sequences."""
    random = np.random.default_rng(seed)
    lengths = log_normal(3 * count, mean=40, high=CAPACITY // 4, seed=seed).reshape(count, 3)
    sequences = [row[: random.integers(1, 4)].tolist() for row in lengths]
    return Units.of_sequences(sequences)


UNITS = random_units(300)


def samplers(num_replicas, units=UNITS, capacity=CAPACITY, seed=5, **options):
    return [
        MultipackDistributedBatchSampler(capacity, units, num_replicas, rank, seed, **options)
        for rank in range(num_replicas)
    ]


@pytest.mark.parametrize("tail", ["drop", "keep", "spread"])
@pytest.mark.parametrize("num_replicas", [1, 4])
def test_every_unit_once_within_every_budget(num_replicas, tail):
    ranks = samplers(num_replicas, tail=tail)
    for one in ranks:
        one.set_epoch(3)
    batches = [list(one) for one in ranks]
    plan = ranks[0].plan
    assert plan.sums(UNITS.tokens).max() <= CAPACITY
    assert {len(each) for each in batches} == {len(ranks[0])}
    seen = [unit for rows in batches for batch in rows for unit in batch]
    assert len(seen) - len(set(seen)) == plan.filler_rows
    assert len(set(seen)) + ranks[0].dropped_documents == len(UNITS)
    assert tail == "drop" or ranks[0].dropped_documents == 0
    assert ranks[0].efficiency() == pytest.approx(UNITS.tokens[seen].sum() / (len(plan) * num_replicas * CAPACITY))


class TestOverlong:
    units = Units.of_sequences([[3, 2]] * 30 + [[9, 9], [3, 1], [4, 4]])

    def test_is_an_error_that_names_the_unit(self):
        message = "1 of 33 units is longer than the batch_max_length of 16 tokens .the first: unit 30, 18 tokens"
        with pytest.raises(ValueError, match=message):
            samplers(1, self.units, 16)

    def test_is_dropped_and_counted(self):
        one = samplers(1, self.units, 16, overlong="drop", tail="keep")[0]
        assert sorted(unit for batch in one for unit in batch) == [*range(30), 31, 32]
        assert str(one.report) == "1 unit longer than the capacity dropped: 18 tokens lost"
        assert one.lengths.tolist() == [5] * 30 + [0, 4, 8]
        assert one.dropped_documents == 0


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

    def test_of_other_units(self):
        squares = UNITS.squares.copy()
        squares[7] = UNITS.tokens[7] ** 2 if squares[7] < UNITS.tokens[7] ** 2 else UNITS.tokens[7]
        other = samplers(2, Units(UNITS.tokens, squares))[0]
        with pytest.raises(ValueError, match=r"saved with other lengths: .* of '300 units"):
            other.load_state_dict(samplers(2)[0].state_dict())


@st.composite
def interruptions(draw):
    """Units or documents, and the settings of the parts of an epoch: ranks, capacity, steps."""
    units = random_units(draw(st.integers(20, 90)), draw(st.integers(0, 10**6)))
    if draw(st.booleans()):
        units = Units.of_documents(units.tokens)
    parts = draw(
        st.lists(
            st.fixed_dictionaries(
                {
                    "num_replicas": st.integers(1, 5),
                    "capacity": st.sampled_from([CAPACITY, 600, 1000]),
                    "tail": st.sampled_from(["keep", "spread"]),
                    "objective": st.sampled_from(["quadratic", "linear"]),
                    "shuffle": st.booleans(),
                    "steps": st.integers(0, 4),
                }
            ),
            min_size=1,
            max_size=4,
        )
    )
    return units, parts


def check_parts(units, parts, epoch):
    """Train on some steps with each part's settings, the last one to the end: each unit once, no row too long."""
    state, seen = None, []
    for number, part in enumerate(parts):
        options = dict(part)
        steps = options.pop("steps")
        ranks = samplers(options.pop("num_replicas"), units, **options)
        for one in ranks:
            one.set_epoch(epoch)
            if state is not None:
                one.load_state_dict(json.loads(json.dumps(state)))
        plan = ranks[0].plan
        assert plan.sums(units.tokens).max(initial=0) <= part["capacity"]
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


def test_efficiency_counts_what_filler_rows_repeat_once():
    units = Units.of_documents([40] * 5)
    sampler = MultipackDistributedBatchSampler(40, units, 4, 0, seed=0, tail="keep")
    assert sampler.plan.filler_rows == 3
    assert sampler.efficiency() == plan_statistics(sampler.plan, units).efficiency == 5 / 8

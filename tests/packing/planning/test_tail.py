"""The ends of epochs: no document that fits is refused, whatever can be planned in whole steps is, and rows that repeat
documents are declared."""

import numpy as np
import pytest

from tests.packing.naive import fewest_bins
from tritonpack.packing.planning.plan import plan_epoch
from tritonpack.packing.planning.tail import check_tail

TAILS = ["keep", "spread"]


def assert_complete(plan, lengths, capacity):
    """Every document is in one row, every row has one and fits, and filler rows repeat one of another row."""
    count = len(lengths)
    assert sorted(plan.items[: plan.num_documents].tolist()) == list(range(count))
    tokens = plan.sums(np.asarray(lengths, dtype=np.int64))
    assert 0 < tokens.min() <= tokens.max() <= capacity
    assert np.diff(plan.offsets)[len(plan.offsets) - 1 - plan.filler_rows :].tolist() == [1] * plan.filler_rows
    fillers = plan.items[plan.num_documents :].tolist()
    expected = np.resize(np.sort(lengths), plan.filler_rows)
    assert [lengths[document] for document in fillers] == expected.tolist(), "the shortest"


def small_case(seed):
    """Few documents for many ranks, so that most cases are close to impossible."""
    rng = np.random.default_rng(seed)
    capacity, num_ranks, count = int(rng.choice([5, 7, 10, 12, 20])), int(rng.integers(1, 8)), int(rng.integers(1, 13))
    shortest, longest = (1, capacity) if seed % 2 else (capacity // 4, capacity // 2 + 1)
    lengths = rng.integers(shortest, longest + 1, count)
    if seed % 5 < 2:
        lengths[rng.integers(0, count, 1 + count // 3)] = capacity
    return lengths, capacity, num_ranks, {"epoch": seed}


def brute_force_plans(lengths, capacity, num_ranks):
    """Whether all documents divide into whole steps: a row can be split as long as it has two documents."""
    most = len(lengths) // num_ranks * num_ranks
    return most > 0 and fewest_bins(lengths.tolist(), capacity, len(lengths)) <= most


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 10))])
def test_plans_whatever_brute_force_can_plan(part, tail):
    planned = repeated = 0
    for seed in range(200 * part, 200 * part + 200):
        lengths, capacity, num_ranks, options = small_case(seed)
        plan = plan_epoch(lengths, capacity, num_ranks, tail=tail, **options)
        assert_complete(plan, lengths, capacity)
        possible = brute_force_plans(lengths, capacity, num_ranks)
        assert (plan.filler_rows == 0) == possible, (lengths, capacity, num_ranks)
        assert plan.num_steps <= plan_epoch(lengths, capacity, num_ranks, tail="keep", **options).num_steps
        planned += possible
        repeated += not possible
    assert min(planned, repeated) > 40


@pytest.mark.parametrize("tail", TAILS)
def test_packs_shortest_documents_together_to_save_a_step(tail):
    """A step places 3, 3, 2, 2, 2 into rows of 3 + 2 and 3 + 2; two full rows hold them all.

    And 10 rows of 6 tokens, one with 1 besides: only steps long before the last have documents to give.
    """
    for lengths, capacity, ranks, steps in (([6, 6, 6, 3, 3, 2, 2, 2], 6, 5, 1), ([6] * 21 + [1] * 5, 10, 2, 11)):
        for epoch in range(10):
            plan = plan_epoch(lengths, capacity, ranks, tail=tail, epoch=epoch)
            assert_complete(plan, lengths, capacity)
            assert (plan.num_steps, plan.filler_rows) == (steps, 0)


def test_drop_needs_tokens_of_one_step_and_then_plans_every_epoch():
    """80 documents of half a row and a bit: 20 rows hold 20 of them, and 40 of them have the tokens of a step."""
    enough = np.full(38, 51)  # 1,938 tokens; a step that is 95% full has 1,900
    for epoch in range(5):
        plan = plan_epoch(enough, 100, 20, epoch=epoch)
        assert (plan.num_steps, plan.num_documents, plan.filler_rows) == (1, 20, 0)
    with pytest.raises(ValueError, match="1,887 tokens can't fill one step of 20 ranks with 100 tokens each to 95%"):
        check_tail(enough[:37], 100, 20, "drop")
    plan = plan_epoch(np.full(31, 100), 100, 32, tail="drop")  # 97% full: the last rank gets a filler row
    assert (plan.num_steps, plan.num_documents, plan.filler_rows) == (1, 31, 1)
    assert plan.sums(np.full(31, 100)).tolist() == [[100] * 32]

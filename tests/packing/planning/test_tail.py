"""The ends of epochs: no document that fits is refused, whatever can be planned in whole steps is, and rows that repeat
documents are declared."""

import numpy as np
import pytest

from tests.packing.naive import fewest_bins
from tritonpack.packing.planning.plan import plan_epoch
from tritonpack.packing.planning.tail import _fit, check_tail, whole_steps

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


def test_borrows_latest_documents_of_fullest_rows_of_latest_steps():
    """Three steps of 3 ranks; ranks 0 and 2 of the last step have no document."""
    rows = np.array([0, 1, 2, 0, 3, 4, 5, 4, 5, 3, 7])
    lengths = np.array([5, 9, 9, 4, 2, 5, 4, 4, 6, 3, 1], dtype=np.int32)  # rows 3, 4, 5 hold 5, 9 and 10
    now, num_steps, empty = whole_steps(rows, lengths, 10, 3, 1)
    moved = {document: int(row) for document, row in enumerate(now) if row != rows[document]}
    assert (moved, num_steps, empty) == ({8: 6, 7: 8}, 3, 0)
    # Four ranks miss a document: three rows of the second step give one, and then the first step gives one.
    rows = np.array([0, 1, 2, 3, 4, 0, 0, 5, 6, 7, 8, 9, 5, 6, 8, 10])
    now, num_steps, empty = whole_steps(rows, np.ones(16, dtype=np.int64), 10, 5, 1)
    assert np.flatnonzero(now != rows).tolist() == [6, 12, 13, 14]
    assert (sorted(now[[6, 12, 13, 14]]), num_steps, empty) == ([11, 12, 13, 14], 3, 0)


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


@pytest.mark.parametrize("seed", range(30))
def test_search_finds_a_packing_if_there_is_one(seed):
    rng = np.random.default_rng(seed)
    lengths = sorted(rng.integers(2, 8, int(rng.integers(1, 10))).tolist(), reverse=True)
    fewest = fewest_bins(lengths, 12, len(lengths))
    for num_bins in range(1, 6):
        bins = _fit(lengths, num_bins, 12)
        assert (bins is not None) == (fewest <= num_bins)
        if bins is not None:
            assert max(np.bincount(bins, weights=lengths)) <= 12

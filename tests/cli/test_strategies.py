import numpy as np
import pytest

pytest.importorskip("rich")

from tritonpack.cli.strategies import interleaved_rows, next_fit_rows, padded_rows, shuffled_bins

BASELINES = [interleaved_rows, next_fit_rows, padded_rows, shuffled_bins]


@pytest.fixture
def lengths():
    return np.random.default_rng(3).integers(1, 65, 1000)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_each_document_once_and_no_row_above_capacity(baseline, ranks, lengths):
    plan = baseline(lengths, 256, ranks)
    assert plan.num_ranks == ranks
    assert len(set(plan.items.tolist())) == len(plan.items)
    assert plan.sums(lengths).max() <= 256
    assert np.diff(plan.offsets).min() > 0
    # The documents that are left out hold fewer tokens than a step.
    assert lengths.sum() - lengths[plan.items].sum() < ranks * 256


@pytest.mark.parametrize("baseline", BASELINES)
def test_seed_and_epoch_decide_the_order(baseline, lengths):
    def items(seed, epoch):
        return baseline(lengths, 256, 2, seed, epoch).items.tolist()

    assert items(1, 2) == items(1, 2)
    assert len({tuple(items(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


@pytest.mark.parametrize("baseline", BASELINES)
def test_too_few_documents_make_no_step(baseline):
    plan = baseline(np.array([5, 6]), 10, 8)
    assert plan.num_steps == 0
    assert len(plan.items) == 0


def test_padded_rows_fit_when_padded(lengths):
    plan = padded_rows(lengths, 300, 3)
    assert np.diff(plan.offsets).max() == 300 // lengths.max()
    assert len(plan.items) == len(lengths)


def test_interleaved_rows_deal_out_documents_by_length():
    lengths = np.arange(1, 101)
    plan = interleaved_rows(lengths, 500, 5)
    for step in range(plan.num_steps):
        rows = [lengths[plan.row(step, rank)] for rank in range(5)]
        dealt = np.stack(rows, 1).ravel()
        assert (np.diff(dealt) > 0).all()


def test_partial_last_step_has_no_empty_rank():
    plan = padded_rows(np.full(11, 10), 40, 2)  # 4 documents per row: 8 and 3
    assert [len(plan.row(1, rank)) for rank in (0, 1)] == [2, 1]
    assert padded_rows(np.full(9, 10), 40, 2).num_steps == 1


def test_next_fit_rows_equal_naive_loop(lengths):
    plan = next_fit_rows(lengths, 100, 1, seed=5)
    rows, row = [], []
    for item in plan.items.tolist():
        if lengths[row].sum() + lengths[item] > 100:
            rows.append(row)
            row = []
        row.append(item)
    rows.append(row)
    assert [found.tolist() for found in plan.rows_of_rank(0)] == rows
    assert len(plan.items) == len(lengths)


def test_shuffled_bins_are_best_fit_in_random_order(lengths):
    plan = shuffled_bins(lengths, 256, 1)
    assert plan.num_steps == -(-lengths.sum() // 256)
    sizes = np.diff(plan.offsets)  # without shuffling, rows of long documents would come first
    assert abs(np.corrcoef(np.arange(len(sizes)), sizes)[0, 1]) < 0.3

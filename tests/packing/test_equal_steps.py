"""least_steps: epochs with the same number of steps, in which each document stays once."""

import numpy as np
import pytest

from tests.packing.lengths import log_normal
from tritonpack import MultipackDistributedBatchSampler, dataloader
from tritonpack.packing import Plan, plan_epoch
from tritonpack.packing.equal_steps import divide_steps

LENGTHS = log_normal(200, mean=60, high=256)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("more", [0, 1, 7])
def test_steps_with_many_documents_are_divided(ranks, more):
    plan = plan_epoch(LENGTHS, 256, ranks, tail="spread")
    longer = plan_epoch(LENGTHS, 256, ranks, tail="spread", least_steps=plan.num_steps + more)
    assert longer.num_steps == plan.num_steps + more
    assert sorted(longer.items.tolist()) == list(range(200))
    assert longer.sums(LENGTHS).max() <= 256
    assert np.diff(longer.offsets).min() >= 1
    unchanged = {tuple(row) for rank in range(ranks) for row in plan.rows_of_rank(rank)}
    unchanged &= {tuple(row) for rank in range(ranks) for row in longer.rows_of_rank(rank)}
    assert len(unchanged) >= (plan.num_steps - more) * ranks


def test_a_step_may_become_more_than_two():
    items, offsets = np.arange(9, dtype=np.int32), np.array([0, 1, 2, 5, 9])
    rows = Plan(*divide_steps(items, offsets, 2, 4), num_ranks=2, capacity=8)
    assert [[rows.row(step, rank).tolist() for rank in range(2)] for step in range(4)] == [
        [[0], [1]], [[2], [5, 8]], [[3], [6]], [[4], [7]],
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"9 documents can't make least_steps=5 steps in which each of 2 ranks has"):
        divide_steps(items, offsets, 2, 5)


def test_no_step_stays_none():
    empty = np.zeros(0, np.int32), np.zeros(1, np.int64)
    assert divide_steps(*empty, 2, 4) == empty


def test_sampler_has_the_option():
    sampler = MultipackDistributedBatchSampler(256, LENGTHS, 1, 0, least_steps=100)
    assert len(sampler) == len(list(sampler)) == 100
    with pytest.raises(ValueError, match="least_steps must be an integer from 1"):
        MultipackDistributedBatchSampler(256, LENGTHS, 1, 0, least_steps=0)


def test_epochs_of_a_loader_have_the_same_number():
    documents = [{"input_ids": [1] * length} for length in LENGTHS.tolist()]
    loaders = [dataloader(documents, 256, seed=0, steps_together=1, epochs=epochs) for epochs in (1, 5)]
    lengths = []
    for epoch in range(5):
        for loader in loaders:
            loader.set_epoch(epoch)
        lengths.append([len(loader) for loader in loaders])
    plain, equal = zip(*lengths, strict=True)
    assert len(set(plain)) > 1
    assert set(equal) == {max(plain)}
    with pytest.raises(ValueError, match="epochs must be an integer from 1"):
        dataloader(documents, 256, epochs=0)

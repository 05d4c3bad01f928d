"""least_steps: epochs with the same number of steps, in which each document stays once."""

import numpy as np
import pytest

from tests.packing.lengths import log_normal
from tritonpack import MultipackDistributedBatchSampler, dataloader
from tritonpack.packing import plan_epoch

LENGTHS = log_normal(200, mean=60, high=256)


@pytest.mark.parametrize("tail", ["spread", "keep", "drop"])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("more", [0, 1, 7])
def test_missing_steps_get_documents(ranks, more, tail):
    plan = plan_epoch(LENGTHS, 256, ranks, tail=tail)
    longer = plan_epoch(LENGTHS, 256, ranks, tail=tail, least_steps=plan.num_steps + more)
    assert longer.num_steps == plan.num_steps + more
    expected = plan.items if tail == "drop" and not more else np.arange(len(LENGTHS))
    assert sorted(longer.items.tolist()) == sorted(expected.tolist()), "what drop leaves out comes first"
    assert longer.sums(LENGTHS).max() <= 256
    assert np.diff(longer.offsets).min() >= 1
    if tail == "spread" and ranks > 1:  # about equally full; a row alone holds few documents
        assert longer.sums(LENGTHS).sum(1).std() < 0.2 * longer.sums(LENGTHS).sum(1).mean()


@pytest.mark.parametrize("tail", ["spread", "keep"])
def test_as_many_steps_as_documents_allow(tail):
    plan = plan_epoch([5] * 9, 8, 2, tail=tail, least_steps=5)
    assert (plan.num_steps, plan.filler_rows, plan.num_documents) == (5, 1, 9)
    with pytest.raises(ValueError, match=r"9 documents can't make least_steps=6 steps in which each of 2 ranks has"):
        plan_epoch([5] * 9, 8, 2, tail=tail, least_steps=6)


def test_steps_that_are_missing_under_drop_come_from_the_last_one():
    """The documents that would be left out are enough for the steps."""
    for seed in range(20):
        plan = plan_epoch([4, 5, 8, 2, 7, 6, 4, 5, 3], 8, 3, seed=seed, tail="drop", least_steps=2)
        assert (plan.num_steps, plan.filler_rows) == (2, 0)


def test_epochs_of_a_sampler_have_the_same_number():
    samplers = [MultipackDistributedBatchSampler(256, LENGTHS, 1, 0, 0, steps_together=1, epochs=n) for n in (1, 5)]
    lengths = []
    for epoch in range(5):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        lengths.append([len(list(sampler)) for sampler in samplers])
    plain, equal = zip(*lengths, strict=True)
    assert len(set(plain)) > 1
    assert set(equal) == {max(plain)}
    with pytest.raises(ValueError, match="epochs must be an integer from 1"):
        MultipackDistributedBatchSampler(256, LENGTHS, 1, 0, epochs=0)


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

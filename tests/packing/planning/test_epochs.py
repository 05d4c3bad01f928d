"""Passes over one epoch, which cause a warning, and epochs with the same number of steps."""

import warnings

import numpy as np
import pytest
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from tests.packing.lengths import log_normal
from tritonpack import (
    BinDataset,
    MultipackBatchSampler,
    MultipackDistributedBatchSampler,
    PackingWarning,
    dataloader,
    notices,
)
from tritonpack.packing import plan_epoch

SHORT = [5, 3, 4, 4, 2, 6, 8, 8] * 3
LENGTHS = log_normal(200, mean=60, high=256)


def distributed(**options):
    return MultipackDistributedBatchSampler(8, SHORT, 2, 0, **options)


def multipack(sampler=None):
    return MultipackBatchSampler(RandomSampler(SHORT) if sampler is None else sampler, 2, 8, SHORT)


MAKERS = {
    "distributed": (distributed, True),
    "multipack": (multipack, True),
    "torch's distributed": (lambda: multipack(DistributedSampler(SHORT, 1, 0)), True),
    "in order": (lambda: distributed(shuffle=False), False),
    "a sequence": (lambda: multipack(SequentialSampler(SHORT)), False),
    "a range": (lambda: multipack(range(len(SHORT))), False),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    "passes",  # "3" is set_epoch(3) and a pass, "+" a pass, "-" a pass that is broken off, "r" a pass of a loaded state
    ["+", "+12", "01", "111", "-", "r", "++", "3+", "-+", "r+"],
)
def test_a_second_pass_over_one_epoch_warns(name, passes, monkeypatch):
    monkeypatch.setattr(notices, "said", {})
    make, is_shuffled = MAKERS[name]
    sampler = make()
    loader = DataLoader(BinDataset(range(len(SHORT))), batch_sampler=sampler, collate_fn=list)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for each in passes:
            if each.isdecimal():
                sampler.set_epoch(int(each))
            elif each == "r":
                sampler.load_state_dict(make().state_dict(batches_done=1))
            next(iter(loader)) if each == "-" else list(loader)
    said = [str(each.message) for each in found if each.category is PackingWarning]
    again = is_shuffled and len(passes) > 1 and passes[-1] == "+"
    assert len(said) == again
    assert not again or said[0].startswith(f"same-epoch: a sampler begins a second pass over epoch {sampler.epoch}, so")


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


FEW = log_normal(30, mean=100, high=250, seed=1)
DOCUMENTS = [{"input_ids": [1] * length} for length in FEW.tolist()]


@pytest.mark.parametrize(
    "make",
    [
        lambda epochs: MultipackDistributedBatchSampler(256, FEW, 1, 0, 0, tail="spread", epochs=epochs),
        lambda epochs: dataloader(DOCUMENTS, 256, seed=0, epochs=epochs),
    ],
    ids=["sampler", "loader"],
)
def test_epochs_have_the_same_number_of_steps(make):
    plain, equal = set(), set()
    for epochs, lengths in ((1, plain), (40, equal)):
        each = make(epochs)
        for epoch in range(40):
            each.set_epoch(epoch)
            lengths.add(len(each))
    assert len(plain) > 1
    assert equal == {max(plain)}
    with pytest.raises(ValueError, match="epochs must be an integer from 1"):
        make(0)

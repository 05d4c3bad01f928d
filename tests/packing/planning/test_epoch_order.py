"""The warning about a second pass over one epoch, and the cases without it."""

import warnings

import pytest
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from tritonpack import BinDataset, MultipackBatchSampler, MultipackDistributedBatchSampler, PackingWarning, notices

LENGTHS = [5, 3, 4, 4, 2, 6, 8, 8] * 3


def distributed(**options):
    return MultipackDistributedBatchSampler(8, LENGTHS, 2, 0, **options)


def multipack(sampler=None):
    return MultipackBatchSampler(RandomSampler(LENGTHS) if sampler is None else sampler, 2, 8, LENGTHS)


MAKERS = [distributed, multipack]


@pytest.fixture(autouse=True)
def no_earlier_warnings(monkeypatch):
    monkeypatch.setattr(notices, "_said", {})


def packing_warnings(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in found if warning.category is PackingWarning]


def passes(sampler, *epochs):
    """One pass per epoch, after set_epoch(epoch), or without it for None."""
    loader = DataLoader(BinDataset(range(len(LENGTHS))), batch_sampler=sampler, collate_fn=list)
    for epoch in epochs:
        if epoch is not None:
            sampler.set_epoch(epoch)
        list(loader)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("epochs", [(None, None, None), (3, None)])
def test_warns_of_second_pass(make, epochs):
    (message,) = packing_warnings(lambda: passes(make(), *epochs))
    epoch = epochs[0] or 0
    assert message.startswith(f"same-epoch: a sampler begins a second pass over epoch {epoch}, so the documents")
    assert f"set_epoch({epoch}) again" in message


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("epochs", [(None,), (None, 1, 2), (0, 1), (1, 1, 1)])
def test_no_warning_if_epochs_are_set(make, epochs):
    assert not packing_warnings(lambda: passes(make(), *epochs))


@pytest.mark.parametrize("make", MAKERS)
def test_warns_after_a_pass_that_was_broken_off(make):
    sampler = make()
    assert not packing_warnings(lambda: (next(iter(sampler)), len(sampler)))
    assert len(packing_warnings(lambda: list(sampler))) == 1


@pytest.mark.parametrize("make", MAKERS)
def test_no_warning_on_resume(make):
    sampler = make()
    list(sampler)
    state = sampler.state_dict(batches_done=1)

    def resume():
        sampler.load_state_dict(state)
        list(sampler)

    assert not packing_warnings(resume)
    assert len(packing_warnings(lambda: list(sampler))) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: distributed(shuffle=False),
        lambda: multipack(SequentialSampler(LENGTHS)),
        lambda: multipack(range(len(LENGTHS))),
        lambda: multipack(DistributedSampler(LENGTHS, 1, 0, shuffle=False)),
    ],
)
def test_no_warning_without_shuffling(make):
    assert not packing_warnings(lambda: passes(make(), None, None))


def test_warns_with_shuffling_distributed_sampler():
    assert len(packing_warnings(lambda: passes(multipack(DistributedSampler(LENGTHS, 1, 0)), None, None))) == 1


@pytest.mark.parametrize("make", [lambda: distributed(shard=False), multipack])
def test_no_warning_under_accelerate(make):
    data_loader = pytest.importorskip("accelerate.data_loader")
    loader = data_loader.prepare_data_loader(
        DataLoader(BinDataset(range(len(LENGTHS))), batch_sampler=make(), collate_fn=list),
        num_processes=2,
        process_index=0,
        put_on_device=False,
        even_batches=False,
    )
    assert not packing_warnings(lambda: [list(loader) for _ in range(3)])

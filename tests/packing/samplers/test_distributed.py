"""MultipackDistributedBatchSampler: the same plan on all ranks, exact lengths, exact resume."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.packing.lengths import log_normal
from tritonpack import MultipackBatchSampler, MultipackDistributedBatchSampler

LENGTHS = log_normal(700, mean=100, high=512)
CAPACITY = 512


def sampler(rank=0, num_replicas=4, lengths=LENGTHS, **options):
    return MultipackDistributedBatchSampler(CAPACITY, lengths, num_replicas, rank, **options)


def test_ranks_have_as_many_batches_and_different_documents():
    samplers = [sampler(rank) for rank in range(4)]
    batches = [list(one) for one in samplers]
    assert {len(one) for one in samplers} == {len(rows) for rows in batches} == {samplers[0].num_batches()}
    items = [item for rows in batches for batch in rows for item in batch]
    assert len(set(items)) == len(items)
    assert all(0 < LENGTHS[batch].sum() <= CAPACITY for rows in batches for batch in rows)
    assert all(type(item) is int for item in items)


def test_unsharded_sampler_yields_rows_of_all_ranks():
    rows = list(sampler(None, shard=False))
    assert rows == [batch for step in zip(*(sampler(rank) for rank in range(4)), strict=True) for batch in step]
    assert len(sampler(None, shard=False)) == len(rows)


def test_order_depends_on_epoch_and_seed():
    one = sampler()
    first = list(one)
    one.set_epoch(1)
    second = list(one)
    assert first != second
    one.set_epoch(0)
    assert list(one) == first == list(sampler())
    assert list(sampler(seed=1)) != first


def test_efficiency():
    one = sampler(tail="keep")
    assert one.efficiency() == LENGTHS.sum() / (len(one) * 4 * CAPACITY)


@pytest.mark.parametrize("tail", ["keep", "spread"])
def test_fewer_documents_than_ranks(tail):
    samplers = [sampler(rank, lengths=[300, 20, 7], tail=tail) for rank in range(4)]
    assert [len(one) for one in samplers] == [1] * 4
    assert samplers[0].plan.filler_rows == 1
    assert sorted(batch[0] for one in samplers[:3] for batch in one) == [0, 1, 2]
    assert list(samplers[3]) == [[2]], "the shortest document again"


def test_resumes_from_state_of_another_rank():
    source = sampler(rank=0)
    target = sampler(rank=3)
    target.load_state_dict(source.state_dict(batches_done=2))
    assert list(target) == list(sampler(rank=3))[2:]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (sampler(seed=1), "can't be resumed, because its seed was 1 and is 0"),
        (
            sampler(seed=0, lengths=np.roll(LENGTHS, 1)),
            "saved with other lengths: they were those of '700 documents with .*' and are those of '700",
        ),
    ],
)
def test_refuses_state_of_other_documents(other, message):
    target = sampler(seed=0)
    target.set_epoch(2)
    before = list(target)
    with pytest.raises(ValueError, match=message):
        target.load_state_dict(other.state_dict(batches_done=1))
    assert (target.epoch, list(target)) == (2, before)


def test_seed_is_that_of_torch():
    torch.manual_seed(3)
    one = sampler()
    torch.manual_seed(4)
    assert (one.seed, sampler().seed, sampler(seed=5).seed) == (3, 4, 5)
    assert list(one) == list(sampler(seed=3)) != list(sampler())
    assert "seed=3" in repr(one)


def test_refuses_seed_of_one_process_among_several(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ValueError, match=r"seed=None takes torch's seed.*for 4 ranks in 8 processes.*such as seed=0"):
        sampler()
    sampler(seed=3)
    sampler(shuffle=False)


class Documents(torch.utils.data.Dataset):
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return index


def prepared(rank, loader):
    """The loader that accelerate makes for one of four processes."""
    data_loader = pytest.importorskip("accelerate.data_loader")
    return data_loader.prepare_data_loader(
        loader, num_processes=4, process_index=rank, put_on_device=False, even_batches=False
    )


def test_accelerate_divides_batches_and_sets_epochs():
    loaders = [
        prepared(rank, DataLoader(Documents(), batch_sampler=sampler(None, shard=False), collate_fn=list))
        for rank in range(4)
    ]
    for epoch in range(3):
        for rank, loader in enumerate(loaders):
            expected = sampler(rank)
            expected.set_epoch(epoch)
            assert list(loader) == list(expected)
            assert len(loader) == len(expected)


def test_accelerate_refuses_sharding_sampler():
    loader = DataLoader(Documents(), batch_sampler=sampler(1), collate_fn=list)
    with pytest.raises(ValueError, match=r"the batches of rank 1 only, of 4 ranks.*shard=False"):
        prepared(1, loader)


@pytest.mark.parametrize("options", [{"num_replicas": 1}, {"num_replicas": 3, "shard": False}])
def test_accelerate_refuses_sampler_for_other_processes(options, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    one = sampler(0, seed=0, **options)
    with pytest.raises(ValueError, match=r"plans for num_replicas=\d, and 4 processes can't divide its batches"):
        prepared(1, DataLoader(Documents(), batch_sampler=one, collate_fn=list))


@pytest.mark.parametrize("even_batches", [True, False])
def test_accelerate_loses_and_repeats_nothing(even_batches):
    data_loader = pytest.importorskip("accelerate.data_loader")
    one = sampler(None, shard=False, seed=3)
    assert one.num_batches() % 4, "would be lost if accelerate divided steps"
    seen = []
    for rank in range(4):
        loader = DataLoader(Documents(), batch_sampler=sampler(None, shard=False, seed=3), collate_fn=list)
        loader = data_loader.prepare_data_loader(
            loader, num_processes=4, process_index=rank, put_on_device=False, even_batches=even_batches
        )
        seen += [document for batch in loader for document in batch]
    assert sorted(seen) == sorted(one.plan.items.tolist())
    assert len(seen) + one.dropped_documents == len(LENGTHS)


def test_single_process_is_rank_0_of_1():
    one = MultipackDistributedBatchSampler(CAPACITY, LENGTHS)
    assert (one.num_replicas, one.rank) == (1, 0)


def test_refuses_launched_process_without_group(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ValueError, match=r"WORLD_SIZE is 8.*init_process_group"):
        MultipackDistributedBatchSampler(CAPACITY, LENGTHS)


def test_drop_overlong_documents():
    lengths = LENGTHS.copy()
    lengths[[3, 50]] = [600, 5000]
    with pytest.raises(ValueError, match="2 of 700 documents are longer than the batch_max_length of 512"):
        sampler(lengths=lengths)
    dropping = sampler(lengths=lengths, overlong="drop", tail="keep")
    assert (dropping.report.documents, dropping.report.tokens_lost) == (2, 5600)
    assert sorted(dropping.plan.items.tolist()) == [item for item in range(700) if item not in (3, 50)]


@pytest.mark.parametrize("overlong", ["truncate", "split"])
def test_refuses_to_cut_documents(overlong):
    message = rf"overlong must be 'error' or 'drop'; got '{overlong}'.*minimum\(lengths, 512\).*max_document_length=512"
    with pytest.raises(ValueError, match=message):
        sampler(overlong=overlong)


def test_advice_for_overlong_documents():
    message = r"513 tokens.*'drop', which leaves .*minimum\(lengths, 512\).*pack_dataset"
    with pytest.raises(ValueError, match=message) as caught:
        sampler(lengths=[5, 5, 5, 513])
    assert "overlong='truncate'" not in str(caught.value)
    with pytest.raises(ValueError, match=r"'drop', which leaves .*minimum\(lengths, 8\).*max_document_length=8"):
        MultipackBatchSampler(range(2), 1, 8, [4, 9])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 4}, "rank must be an integer from 0 to 3, because num_replicas is 4; got 4"),
        ({"rank": -1}, "rank must be .* got -1"),
        ({"num_replicas": 0}, "num_replicas must be an integer from 1 to .* got 0"),
        ({"rank": None}, "num_replicas=4 and rank=None don't say which rank this process is"),
        ({"lengths": []}, "lengths is empty"),
        ({"lengths": [5, 0, 3, 4]}, "document 1 has length 0"),
        ({"lengths": [5, -2, 3, 4]}, "document 1 has length -2"),
        ({"lengths": [5.0, float("nan")]}, "lengths must be a row of integers.*float64.*NaN"),
        ({"lengths": [5, 5, 5]}, "15 tokens can't fill one step of 4 ranks with 512 tokens each to 95%"),
        ({"lengths": [5, 5, 5, 513]}, "longer than the batch_max_length of 512"),
        ({"seed": -1}, "seed must be"),
        ({"tail": "all"}, "tail must be one of"),
        ({"objective": "cost"}, "cost_model of objective='cost' was removed"),
        ({"order": np.arange(8), "shuffle": False}, "shuffle=False has no effect on an order of your own"),
        ({"lookahead": 2}, "lookahead of MultipackDistributedBatchSampler.. was removed"),
        ({"budgets": {}}, "budgets of MultipackDistributedBatchSampler.. was removed"),
    ],
)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        sampler(**options)


@pytest.mark.parametrize("capacity", [0, -1, 512.0, True, 2**30 + 1])
def test_refuses_capacity(capacity):
    with pytest.raises(ValueError, match="batch_max_length must be an integer from 1 to 1073741824"):
        MultipackDistributedBatchSampler(capacity, LENGTHS, 4, 0)

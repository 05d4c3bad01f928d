"""MultipackDistributedBatchSampler: the same plan on all ranks, exact lengths, accelerate, refusals."""

from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.packing.lengths import log_normal
from tritonpack import BinDataset, MultipackDistributedBatchSampler, Units, dataloader
from tritonpack.packing import plan_epoch, plan_statistics

LENGTHS = log_normal(700, mean=100, high=512)
UNITS = Units.of_sequences([[length // 2 + 1, length // 3 + 1] for length in LENGTHS.tolist()])
CAPACITY = 512


def sampler(rank=0, num_replicas=4, lengths=LENGTHS, **options):
    return MultipackDistributedBatchSampler(CAPACITY, lengths, num_replicas, rank, **options)


@pytest.mark.parametrize("tail", ["drop", "keep", "spread"])
@pytest.mark.parametrize("lengths", [LENGTHS, UNITS], ids=["documents", "units"])
@pytest.mark.parametrize("num_replicas", [1, 4])
def test_ranks_take_their_rows_of_one_plan(num_replicas, lengths, tail):
    expected = plan_epoch(lengths, CAPACITY, num_replicas, tail=tail, seed=3, epoch=2)
    samplers = [sampler(rank, num_replicas, lengths, tail=tail, seed=3) for rank in range(num_replicas)]
    for rank, one in enumerate(samplers):
        one.set_epoch(2)
        assert list(one) == [row.tolist() for row in expected.rows_of_rank(rank)]
        assert len(one) == one.num_batches() == expected.num_steps
        assert all(type(item) is int for item in chain.from_iterable(one))
    assert one.dropped_documents == expected.left_out
    assert (one.dropped_documents > 0) == (tail == "drop")
    assert one.efficiency() == plan_statistics(expected, lengths).efficiency
    whole = sampler(None, num_replicas, lengths, tail=tail, seed=3, shard=False)
    whole.set_epoch(2)
    assert list(whole) == list(chain.from_iterable(zip(*samplers, strict=True)))


def test_seeds_and_places(monkeypatch):
    torch.manual_seed(3)
    one = sampler()
    torch.manual_seed(4)
    assert (one.seed, sampler().seed, sampler(seed=5).seed) == (3, 4, 5)
    assert list(one) == list(sampler(seed=3)) != list(sampler())
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ValueError, match=r"seed=None takes torch's seed.*for 4 ranks in 8 processes.*such as seed=0"):
        sampler()
    sampler(shuffle=False)
    with pytest.raises(ValueError, match=r"num_replicas=8 doesn't say which rank this process is, of 8 processes"):
        MultipackDistributedBatchSampler(CAPACITY, LENGTHS)
    monkeypatch.setenv("RANK", "3")
    placed = MultipackDistributedBatchSampler(CAPACITY, LENGTHS, seed=0)
    assert (placed.num_replicas, placed.rank) == (8, 3)
    monkeypatch.delenv("WORLD_SIZE")
    alone = MultipackDistributedBatchSampler(CAPACITY, LENGTHS)
    assert (alone.num_replicas, alone.rank) == (1, 0)


FEW = log_normal(30, mean=100, high=250, seed=1)


@pytest.mark.parametrize(
    "make",
    [
        lambda epochs: MultipackDistributedBatchSampler(256, FEW, 1, 0, 0, tail="spread", epochs=epochs),
        lambda epochs: dataloader([{"input_ids": [1] * n} for n in FEW.tolist()], 256, seed=0, epochs=epochs),
    ],
    ids=["sampler", "loader"],
)
def test_epochs_have_the_same_number_of_steps(make):
    lengths = {1: set(), 40: set()}
    for epochs, found in lengths.items():
        each = make(epochs)
        for epoch in range(40):
            each.set_epoch(epoch)
            found.add(len(each))
    assert len(lengths[1]) > 1
    assert lengths[40] == {max(lengths[1])}


def prepared(rank, batches, **options):
    """The loader that accelerate makes for one of four processes."""
    data_loader = pytest.importorskip("accelerate.data_loader")
    loader = DataLoader(BinDataset(range(700)), batch_sampler=batches, collate_fn=list)
    return data_loader.prepare_data_loader(
        loader, num_processes=4, process_index=rank, put_on_device=False, even_batches=False, **options
    )


def test_accelerate_divides_batches_and_sets_epochs(monkeypatch):
    one = sampler(None, shard=False, seed=3)
    assert one.num_batches() % 4, "would be lost if accelerate divided steps"
    loaders = [prepared(rank, sampler(None, shard=False, seed=3)) for rank in range(4)]
    for epoch in range(3):
        for rank, loader in enumerate(loaders):
            expected = sampler(rank, seed=3)
            expected.set_epoch(epoch)
            assert list(loader) == list(expected)
            assert len(loader) == len(expected)
    with pytest.raises(ValueError, match=r"the batches of rank 1, of 4 ranks.*shard=False"):
        prepared(1, sampler(1))
    monkeypatch.setenv("WORLD_SIZE", "4")
    for options in ({"num_replicas": 1}, {"num_replicas": 3, "shard": False}):
        with pytest.raises(ValueError, match=r"of \d ranks, which 4 processes can't divide"):
            prepared(1, sampler(0, seed=0, **options))


@pytest.mark.parametrize(
    ("noun", "make"), [("document", np.array), ("unit", lambda n: Units(n, np.minimum(n**2, 4 * n)))]
)
def test_overlong(noun, make):
    lengths = LENGTHS.astype(np.int64)
    lengths[[3, 50]] = [600, 5000]
    with pytest.raises(ValueError, match=f"2 of 700 {noun}s are longer than the row size of 512 tokens"):
        sampler(lengths=make(lengths))
    dropping = sampler(lengths=make(lengths), overlong="drop", tail="keep")
    assert str(dropping.report) == f"2 {noun}s longer than the capacity dropped: 5,600 tokens lost"
    assert dropping.lengths.tolist() == np.where(lengths > 512, 0, lengths).tolist()
    assert dropping.dropped_documents == 0
    assert sorted(dropping.plan.items.tolist()) == [item for item in range(700) if item not in (3, 50)]


REFUSED = [
    ({"rank": 4}, "rank must be an integer from 0 to 3, because num_replicas is 4; got 4"),
    ({"num_replicas": 0}, "num_replicas must be an integer from 1 to .* got 0"),
    ({"rank": None}, "num_replicas=4 doesn't say which rank this process is"),
    ({"lengths": [5, 0, 3, 4]}, "document 1 has length 0"),
    ({"lengths": [5, 5, 5]}, "15 tokens can't fill one step of 4 ranks with 512 tokens each to 95%"),
    ({"seed": -1}, "seed must be"),
    ({"tail": "all"}, "tail must be one of"),
    ({"epochs": 0}, "epochs must be an integer from 1"),
    ({"shard": 1}, "shard must be True or False"),
    ({"overlong": "split"}, r"overlong must be 'error' or 'drop'; got 'split'.*max_document_length"),
    ({"batch_max_length": 512.0}, "batch_max_length must be an integer from 1 to 1073741824"),
    ({"group": 5}, "leave out group, or num_replicas=4 and rank=0"),
    ({"group": 5, "num_replicas": None, "rank": None}, r"group must be a process group or a DeviceMesh.*mesh\['sp'\]"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refuses(options, message):
    given = {"batch_max_length": CAPACITY, "lengths": LENGTHS, "num_replicas": 4, "rank": 0, **options}
    with pytest.raises(ValueError, match=message):
        MultipackDistributedBatchSampler(**given)

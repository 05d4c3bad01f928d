"""MultipackBatchSampler: batches of bins by best-fit or next-fit, axolotl's calls, ranks, accelerate and Trainer."""

import inspect
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from tests.packing import naive
from tritonpack import BinDataset, MultipackBatchSampler

LENGTHS = np.random.default_rng(0).integers(1, 65, 500)
CAPACITY = 128


def batches_of(sampler=None, batch_size=3, **options):
    sampler = RandomSampler(LENGTHS) if sampler is None else sampler
    return MultipackBatchSampler(sampler, batch_size, CAPACITY, LENGTHS, **options)


def documents_of(batches):
    return list(chain.from_iterable(chain.from_iterable(batches)))


@pytest.mark.parametrize("bin_size", [None, 2])
def test_bins_are_those_of_plain_loops(bin_size):
    order = np.random.default_rng(1).permutation(len(LENGTHS)).tolist()
    expected = []
    for start in range(0, len(order), 150):
        group = order[start : start + 150]
        bins = naive.best_fit(LENGTHS[group].tolist(), CAPACITY, bin_size or len(group))
        expected += [[group[position] for position in items] for items in bins]
    found = batches_of(order, drop_last=False, group_size=150, bin_size=bin_size)
    assert list(chain.from_iterable(found)) == expected
    found = batches_of(range(500), sequential=True, drop_last=False, bin_size=bin_size, group_size=7)
    assert list(chain.from_iterable(found)) == naive.next_fit(LENGTHS.tolist(), CAPACITY, bin_size or 500)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("batch_size", [1, 7])
def test_length_is_exact_and_all_documents_are_counted(batch_size, drop_last):
    batches = batches_of(batch_size=batch_size, drop_last=drop_last)
    for epoch in range(5):
        batches.set_epoch(epoch)
        listed = list(batches)
        assert len(listed) == len(batches)
        assert listed == batches.generate_batches(set_stats=True)
        assert all(len(batch) == batch_size for batch in listed[: None if drop_last else -1])
        seen = documents_of(listed)
        assert len(seen) + batches.dropped_documents == len(LENGTHS) == len(set(seen)) + batches.dropped_documents
        assert all(LENGTHS[items].sum() <= CAPACITY for items in chain.from_iterable(listed))
        assert batches.efficiency() == LENGTHS[seen].sum() / (sum(map(len, listed)) * CAPACITY) > 0.9
    assert drop_last or batches.dropped_documents == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: RandomSampler(LENGTHS, replacement=True, num_samples=300, **options),
        lambda **options: SubsetRandomSampler(range(400), **options),
        lambda **options: WeightedRandomSampler([1.0] * 500, 300, **options),
    ],
)
def test_order_depends_on_seed_and_epoch_alone(make):
    """The state of the global generator differs between ranks; it has no effect, and stays."""
    orders = set()
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1)):
        runs = []
        for global_seed in (0, 1):
            torch.manual_seed(global_seed)
            state, sampler = torch.get_rng_state(), make(generator=torch.Generator().manual_seed(seed))
            batches, generator = batches_of(sampler), sampler.generator
            batches.set_epoch(epoch)
            runs.append(list(batches))
            assert torch.equal(torch.get_rng_state(), state)
            assert sampler.generator is generator
        assert runs[0] == runs[1]
        orders.add(str(runs[0]))
    assert len(orders) == 4


def test_default_seeds_processes_and_epochs(monkeypatch):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        assert (batches_of().seed, batches_of(num_replicas=2).seed) == (5, 0), "processes may be seeded differently"
    batches = batches_of(DistributedSampler(LENGTHS, num_replicas=1, rank=0))
    first = documents_of(batches)
    batches.set_epoch(3)
    assert documents_of(batches) != first, "passed on to a sampler that has set_epoch"
    assert batches_of().num_replicas == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (batches_of().num_replicas, batches_of(num_replicas=2).num_replicas) == (4, 2)


REFUSED = [
    ({"lengths": [4, 0]}, "document 1 has length 0"),
    ({"lengths": [4, 9]}, r"longer than the batch_max_len of 8 .*document 1, 9 tokens.*dataset.filter"),
    *(({"lengths": [4.0, value]}, "must be a row of integers.*float64") for value in (2.5, float("nan"), float("inf"))),
    ({"batch_size": 0}, "batch_size must be an integer from 1 .*got 0"),
    ({"batch_max_len": True}, "batch_max_len must be .*got True"),
    ({"bin_size": -1}, "bin_size must be an integer from 0 .*got -1"),
    ({"num_replicas": 0}, "num_replicas must be .*got 0"),
    ({"group_size": 0}, "group_size must be .*got 0"),
    ({"drop_last": 1}, "drop_last must be True or False; got int 1"),
    ({"sequential": "yes"}, "sequential must be True or False; got str 'yes'"),
    ({"sampler": 5}, "the sampler must yield document numbers; got 5"),
    ({"sampler": DistributedSampler([4, 3], 2, 0)}, "divides the documents among 2 ranks.*Pass a sampler of all"),
    ({"drop_last": False, "num_replicas": 2}, "drop_last=False doesn't give 2 processes equally many batches"),
    # at the first use of an epoch
    *(({"sampler": given}, "must yield document numbers, 0 to 1; got array") for given in ([], [0.5], [[0]])),
    ({"sampler": [0, 2, 7]}, "the sampler must yield document numbers, 0 to 1; got 2. Are these the lengths of"),
    ({"sampler": [-1]}, "must yield document numbers.*; got -1"),
    ({"batch_size": 2}, "2 documents make 1 bins of 8 tokens, fewer than one batch of batch_size=2 for each of num_re"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_refuses(change, message):
    options = {"sampler": range(2), "batch_size": 1, "batch_max_len": 8, "lengths": [4, 3]} | change
    for ask in (len, iter, MultipackBatchSampler.efficiency):
        with pytest.raises(ValueError, match=message):
            ask(MultipackBatchSampler(**options))


NAMES = """sampler batch_size batch_max_len lengths bin_size packing_efficiency_estimate drop_last num_count_samples
sequential group_size num_processes safe_mode mp_start_method"""


@pytest.mark.parametrize(
    "given",
    [
        {"bin_size": 200, "packing_efficiency_estimate": 0.97, "num_processes": 8, "mp_start_method": "spawn"},
        {"sequential": None, "safe_mode": None, "packing_efficiency_estimate": None, "mp_start_method": None},
        {"num_processes": 0, "bin_size": 0, "lengths": LENGTHS.astype(float).tolist()},
        {"lengths": torch.tensor(LENGTHS, dtype=torch.float32)},
    ],
)
def test_takes_axolotls_calls(given):
    """The same names in the same order; the ones without effect are accepted."""
    assert list(inspect.signature(MultipackBatchSampler).parameters)[:13] == NAMES.split()
    options = {"sampler": range(500), "batch_size": 3, "batch_max_len": CAPACITY, "lengths": LENGTHS} | given
    assert list(MultipackBatchSampler(**options)) == list(batches_of(range(500)))


def two_ranks(rank, path):
    """Runs in each of two processes; both must notice that they disagree."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.manual_seed(rank)
    numbers = list(range(len(LENGTHS)))
    orders = [None, None]
    torch.distributed.all_gather_object(orders, list(batches_of()))
    assert orders[0] == orders[1], "torch's sampler is reseeded alike"
    list(batches_of(numbers))
    mine = batches_of(numbers[::-1] if rank else numbers)
    assert len(mine) > 1  # without communication
    differ = r"in different orders.*the digest of the order is .* on rank 0 and .* on rank 1"
    with pytest.raises(ValueError, match=differ):
        iter(mine)
    torch.distributed.destroy_process_group()


def test_two_ranks(tmp_path):
    # fork, because a spawned process takes seconds to import.
    torch.multiprocessing.start_processes(two_ranks, (str(tmp_path / "meet"),), nprocs=2, start_method="fork")


def test_accelerate_sets_epoch_in_each_process():
    """With several processes accelerate wraps the batch sampler and looks for `set_epoch` on its `sampler` only."""
    data_loader = pytest.importorskip("accelerate.data_loader")
    for rank in (0, 1):
        torch.manual_seed(rank)
        batches, whole = batches_of(num_replicas=2), batches_of(num_replicas=2)
        loader = DataLoader(BinDataset(range(len(LENGTHS))), batch_sampler=batches, collate_fn=list)
        loader = data_loader.prepare_data_loader(
            loader, num_processes=2, process_index=rank, put_on_device=False, even_batches=False
        )
        for epoch in range(3):
            whole.set_epoch(epoch)
            expected = list(whole)
            assert list(loader) == expected[: len(expected) // 2 * 2][rank::2]
            assert batches.epoch == epoch


@pytest.mark.parametrize("even_batches", [True, False])
@pytest.mark.parametrize(("processes", "batch_size"), [(2, 1), (3, 3), (8, 2)])
@pytest.mark.fast("2-1-True", "3-3-False")
def test_every_document_is_seen_once_or_counted(processes, batch_size, even_batches):
    shard = pytest.importorskip("accelerate.data_loader").BatchSamplerShard
    for sampler in (range(500), range(490), range(333)):
        batches = batches_of(sampler, batch_size, num_replicas=processes)
        shards = [list(shard(batches, processes, rank, even_batches=even_batches)) for rank in range(processes)]
        assert len(set(map(len, shards))) == 1, "all processes have the same number of batches"
        seen = documents_of(chain.from_iterable(shards))
        assert len(seen) == len(set(seen)) == len(sampler) - batches.dropped_documents

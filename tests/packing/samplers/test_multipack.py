import inspect
import multiprocessing
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.packing import naive
from tritonpack import BinDataset, MultipackBatchSampler, PackingCollator

LENGTHS = np.random.default_rng(0).integers(1, 65, 500)
CAPACITY = 128


def batches_of(sampler=None, batch_size=3, **options):
    sampler = RandomSampler(LENGTHS) if sampler is None else sampler
    return MultipackBatchSampler(sampler, batch_size, CAPACITY, LENGTHS, **options)


def documents_of(batches):
    return list(chain.from_iterable(chain.from_iterable(batches)))


class TestBatches:
    @pytest.mark.parametrize("bin_size", [None, 2])
    def test_groups_are_packed_by_best_fit(self, bin_size):
        order = np.random.default_rng(1).permutation(len(LENGTHS)).tolist()
        expected = []
        for start in range(0, len(order), 150):
            group = order[start : start + 150]
            bins = naive.best_fit(LENGTHS[group].tolist(), CAPACITY, bin_size or len(group))
            expected += [[group[position] for position in items] for items in bins]
        batches = batches_of(order, drop_last=False, group_size=150, bin_size=bin_size)
        assert list(chain.from_iterable(batches)) == expected

    @pytest.mark.parametrize("bin_size", [None, 2])
    def test_sequential_keeps_order(self, bin_size):
        batches = list(
            batches_of(SequentialSampler(LENGTHS), sequential=True, drop_last=False, bin_size=bin_size, group_size=7)
        )
        assert documents_of(batches) == list(range(len(LENGTHS)))
        assert list(chain.from_iterable(batches)) == naive.next_fit(LENGTHS.tolist(), CAPACITY, bin_size or 500)

    @pytest.mark.parametrize("drop_last", [True, False])
    @pytest.mark.parametrize("batch_size", [1, 3, 7])
    def test_length_is_exact_and_all_documents_are_counted(self, batch_size, drop_last):
        batches = batches_of(batch_size=batch_size, drop_last=drop_last)
        for epoch in range(5):
            batches.set_epoch(epoch)
            length = len(batches)
            listed = list(batches)
            assert len(listed) == length
            assert listed == batches.generate_batches()
            assert all(len(batch) == batch_size for batch in listed[: None if drop_last else -1])
            seen = documents_of(listed)
            assert len(seen) + batches.dropped_documents == len(LENGTHS) == len(set(seen)) + batches.dropped_documents
            assert all(LENGTHS[items].sum() <= CAPACITY for items in chain.from_iterable(listed))
            tokens = LENGTHS[seen].sum()
            assert batches.efficiency() == tokens / (sum(map(len, listed)) * CAPACITY)
            assert batches.efficiency() > 0.9
        if not drop_last:
            assert batches.dropped_documents == 0

    def test_drop_overlong_documents(self):
        batches = MultipackBatchSampler(range(4), 1, 8, [5, 9, 8, 40], overlong="drop", drop_last=False)
        assert list(batches) == [[[0]], [[2]]]
        assert (batches.report.documents, batches.report.tokens_lost) == (2, 49)
        assert batches.efficiency() == 13 / 16


class TestEpochs:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: RandomSampler(LENGTHS),
            lambda: RandomSampler(LENGTHS, replacement=True, num_samples=300),
            lambda: SubsetRandomSampler(range(400)),
            lambda: WeightedRandomSampler([1.0] * 500, 300),
        ],
        ids=["random", "replacement", "subset", "weighted"],
    )
    def test_order_depends_on_seed_and_epoch_alone(self, make):
        """The state of the global generator differs between ranks and has no effect."""
        orders = set()
        for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1)):
            runs = []
            for global_seed in (0, 1):
                torch.manual_seed(global_seed)
                batches = batches_of(make(), seed=seed)
                batches.set_epoch(epoch)
                runs.append(list(batches))
            assert runs[0] == runs[1]
            orders.add(str(runs[0]))
        assert len(orders) == 4

    def test_default_seed_is_from_generator(self):
        def first(seed):
            return list(batches_of(RandomSampler(LENGTHS, generator=torch.Generator().manual_seed(seed))))

        assert first(3) == first(3) != first(4)
        assert first(3) == list(batches_of(seed=3))

    def test_default_seed_without_generator(self):
        """torch's seed in one process. Several processes may be seeded differently, so they take 0."""
        with torch.random.fork_rng():
            torch.manual_seed(5)
            assert (batches_of().seed, batches_of(num_replicas=2).seed) == (5, 0)
            assert list(batches_of()) == list(batches_of(seed=5))

    def test_sampler_and_global_generator_are_unchanged(self):
        sampler = RandomSampler(LENGTHS)
        state = torch.get_rng_state()
        list(batches_of(sampler))
        assert sampler.generator is None
        assert torch.equal(torch.get_rng_state(), state)

    def test_set_epoch_on_batch_sampler_and_its_sampler(self):
        batches = batches_of()
        first = list(batches)
        assert list(batches) == first
        batches.set_epoch(1)
        second = list(batches)
        assert second != first
        batches.sampler.set_epoch(0)
        assert list(batches) == first
        assert batches.epoch == 0

    def test_set_epoch_is_passed_on(self):
        sampler = DistributedSampler(LENGTHS, num_replicas=1, rank=0)
        batches = batches_of(sampler)
        batches.set_epoch(3)
        order = documents_of(batches)
        assert sampler.epoch == 3
        assert order != documents_of(batches_of(DistributedSampler(LENGTHS, num_replicas=1, rank=0)))


class TestLoading:
    @pytest.mark.parametrize(
        "method", [None, *sorted({"fork", "spawn"} & set(multiprocessing.get_all_start_methods()))], ids=str
    )
    @pytest.mark.fast("None", "fork")
    def test_one_row_per_batch(self, method):
        batches = batches_of(batch_size=40)
        loader = DataLoader(
            BinDataset([{"input_ids": list(range(length))} for length in LENGTHS.tolist()]),
            batch_sampler=batches,
            collate_fn=PackingCollator(),
            num_workers=0 if method is None else 1,
            multiprocessing_context=method,
        )
        lengths = [batch["cu_seq_lens_q"].diff().tolist() for batch in loader]
        assert lengths == [LENGTHS[list(chain.from_iterable(batch))].tolist() for batch in batches]
        assert len(loader) == len(lengths)


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"lengths": []}, "lengths is empty"),
            ({"lengths": [4, 0]}, "document 1 has length 0"),
            ({"lengths": [4, 9]}, r"longer than the batch_max_len of 8 .*document 1, 9 tokens"),
            ({"lengths": [4.0, float("nan")]}, "must be a row of integers"),
            ({"batch_size": 0}, "batch_size must be an integer from 1 .*got 0"),
            ({"batch_max_len": True}, "batch_max_len must be .*got True"),
            ({"bin_size": -1}, "bin_size must be an integer from 0 .*got -1"),
            ({"num_replicas": 0}, "num_replicas must be .*got 0"),
            ({"lengths": [4.0, 2.5]}, "must be a row of integers.*float64"),
            ({"lengths": [4.0, float("inf")]}, "must be a row of integers.*float64"),
            ({"group_size": 0}, "group_size must be .*got 0"),
            ({"drop_last": 1}, "drop_last must be True or False; got int 1"),
            ({"sequential": "yes"}, "sequential must be True or False; got str 'yes'"),
            ({"overlong": "truncate"}, "overlong must be 'error' or 'drop'; got 'truncate'.*pack_dataset"),
            ({"seed": -1}, "seed must be an integer of at least 0; got -1"),
        ],
    )
    def test_options(self, change, message):
        options = {"sampler": range(2), "batch_size": 1, "batch_max_len": 8, "lengths": [4, 3]} | change
        with pytest.raises(ValueError, match=message):
            MultipackBatchSampler(**options)

    @pytest.mark.parametrize(
        ("sampler", "message"),
        [
            ([], "the sampler yields no document"),
            ([0, 2, 7], "the sampler yields document 2, but there are lengths of 2 documents"),
            ([-1], "yields document -1"),
            ([0.5], "must yield document numbers; got float64"),
            ([[0]], r"must yield document numbers; .* shape \(1, 1\)"),
        ],
    )
    def test_samplers(self, sampler, message):
        batches = MultipackBatchSampler(sampler, 1, 8, [4, 3])
        for ask in (len, iter, MultipackBatchSampler.efficiency):
            with pytest.raises(ValueError, match=message):
                ask(batches)

    @pytest.mark.parametrize("sequential", [False, True])
    def test_refuses_sampler_of_dropped_documents(self, sequential):
        batches = MultipackBatchSampler([1], 1, 8, [5, 9], overlong="drop", sequential=sequential)
        with pytest.raises(ValueError, match="all documents of the sampler are longer than 8 tokens"):
            len(batches)

    def test_refuses_fewer_bins_than_one_batch(self):
        with pytest.raises(
            ValueError, match=r"2 documents make 1 bins of 8 tokens, fewer than batch_size=2.*drop_last=F"
        ):
            len(MultipackBatchSampler(range(2), 2, 8, [4, 3]))
        assert list(MultipackBatchSampler(range(2), 2, 8, [4, 3], drop_last=False)) == [[[0, 1]]]

    def test_refuses_epoch(self):
        with pytest.raises(ValueError, match=r"epoch must be an integer of at least 0; got 1.5"):
            batches_of().set_epoch(1.5)


def test_arguments_are_those_of_axolotl():
    """The same names in the same order; the ones without effect are accepted."""
    names = list(inspect.signature(MultipackBatchSampler).parameters)
    assert names[:13] == [
        "sampler",
        "batch_size",
        "batch_max_len",
        "lengths",
        "bin_size",
        "packing_efficiency_estimate",
        "drop_last",
        "num_count_samples",
        "sequential",
        "group_size",
        "num_processes",
        "safe_mode",
        "mp_start_method",
    ]
    batches = MultipackBatchSampler(
        range(500), 3, CAPACITY, LENGTHS, 200, 0.97, True, 4, False, 100_000, 8, True, "spawn"
    )
    assert list(batches) == list(batches_of(range(500), bin_size=200))


@pytest.mark.parametrize(
    "given",
    [
        {"sequential": None},
        {"safe_mode": None},
        {"num_processes": 0},
        {"bin_size": 0},
        {"packing_efficiency_estimate": 1.03},
        {"packing_efficiency_estimate": None},
        {"mp_start_method": None},
        {"lengths": LENGTHS.astype(float)},
        {"lengths": LENGTHS.astype(float).tolist()},
        {"lengths": torch.tensor(LENGTHS, dtype=torch.float32)},
    ],
    ids=lambda given: f"{next(iter(given))}-{type(next(iter(given.values()))).__name__}",
)
def test_values_that_axolotl_takes(given):
    options = {"sampler": range(500), "batch_size": 3, "batch_max_len": CAPACITY, "lengths": LENGTHS} | given
    assert list(MultipackBatchSampler(**options)) == list(batches_of(range(500)))


def test_members_that_axolotl_has():
    batches = batches_of(packing_efficiency_estimate=1.03, num_processes=2, safe_mode=None, mp_start_method="spawn")
    tokens = LENGTHS[documents_of(batches)].sum()
    assert batches.efficiency() == tokens / (len(batches) * 3 * CAPACITY)
    assert batches.generate_batches(set_stats=True) == list(batches)


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
    with pytest.raises(ValueError, match=r"samplers of ranks \[1\] yield documents in another order"):
        iter(mine)

    torch.distributed.destroy_process_group()


class TestRanks:
    def test_two_ranks(self, tmp_path):
        # fork, because a spawned process takes seconds to import.
        torch.multiprocessing.start_processes(two_ranks, (str(tmp_path / "meet"),), nprocs=2, start_method="fork")

    def test_refuses_sampler_that_divides_documents(self):
        with pytest.raises(ValueError, match=r"divides the documents among 2 ranks.*Pass a sampler of all documents"):
            batches_of(DistributedSampler(LENGTHS, num_replicas=2, rank=0))

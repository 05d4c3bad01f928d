"""Samplers on real processes: ranks that disagree all raise, ranks that don't come are named, seeds are rank 0's."""

import re
import warnings
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from tests.packing.lengths import log_normal
from tritonpack import MultipackDistributedBatchSampler, Units, dataloader, notices
from tritonpack.packing.samplers import ranks as ranks_module

LENGTHS = log_normal(200, mean=60, high=256)


def sampler(lengths=LENGTHS, capacity=256, **options):
    return MultipackDistributedBatchSampler(capacity, lengths, **options)


def on_all_ranks(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def error_of(call, kind=ValueError):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def differences(rank):
    """Options of each rank, and the message of all ranks."""
    return [
        ({"lengths": np.roll(LENGTHS, rank == 1)}, "the lengths is '200 doc.*' on ranks 0, 2 and '200 .*' on rank 1"),
        ({"lengths": Units(LENGTHS, LENGTHS + rank * (LENGTHS > 3))}, "'200 units .* on rank 0 and .* on rank 1 and"),
        ({"epochs": 1 + rank}, "differ: epochs is 1 on rank 0 and 2 on rank 1 and 3 on rank 2. Pass"),
        ({"shard": rank != 2}, "differ: shard is True on ranks 0, 1 and False on rank 2. Pass"),
        ({"seed": [0, None, None][rank]}, "differ: seed is 0 on rank 0 and None on ranks 1, 2. Pass"),
        ({"tail": ["drop", "keep", "keep"][rank]}, "differ: tail is 'drop' on rank 0 and 'keep' on ranks 1, 2. Pass"),
        ({"capacity": 256 + rank}, "differ: batch_max_length is 256 on rank 0 and 257 on rank 1 and 258 on rank 2. "),
    ]


def agree(rank):
    for options, message in differences(rank):
        error = error_of(lambda options=options: sampler(**options))
        assert on_all_ranks(error) == [error] * 3
        assert re.search(message, error), error

    torch.manual_seed(5 + rank)
    one = sampler()
    assert (one.num_replicas, one.rank, one.seed) == (3, rank, 5)
    parts = on_all_ranks(list(one))
    assert [batch for step in zip(*parts, strict=True) for batch in step] == list(sampler(seed=5, shard=False))
    for make in (sampler, lambda **place: dataloader([{"input_ids": [1]}] * 9, 8, **place)):
        if rank == 2:
            with pytest.raises(ValueError, match=r"rank=0 isn't this process, which is rank 2 of the 3 .* LOCAL_RANK"):
                make(num_replicas=3, rank=0)
    torch.manual_seed(7)
    assert (sampler().seed, one.seed, sampler(seed=np.int64(3)).seed) == (7, 5, 3), "fixed when the sampler was made"
    message = "seed=None takes torch's seed from rank 0, but a sampler for 1 ranks in 3 processes can't ask it"
    assert message in error_of(lambda: sampler(num_replicas=1, rank=0))
    if rank == 1:  # alone
        list(sampler(num_replicas=2, rank=0, seed=3))
        list(sampler(num_replicas=1, rank=0, shuffle=False))
    batches = list(sampler(seed=0))
    if rank == 0:
        assert list(DataLoader(Worker(), batch_size=None, num_workers=1)) == batches


def states(rank):
    one = sampler(seed=1, tail="keep")
    saved = [one.state_dict(batches_done=done) for done in (1, 2)]
    one.load_state_dict(saved[0])
    assert on_all_ranks(one.state_dict()) == [saved[0]] * 3
    error = error_of(lambda: one.load_state_dict(saved[rank == 2]))
    assert on_all_ranks(error) == [error] * 3
    assert "batches done is 1 on ranks 0, 1 and 2 on rank 2" in error
    assert one.state_dict() == saved[0], "unchanged"
    before = sampler(num_replicas=2, rank=0, seed=1, tail="keep")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        one.load_state_dict(before.state_dict(batches_done=3))
    changes = ["the number of ranks was 2 and is 3" in str(warning.message) for warning in found]
    assert on_all_ranks(sum(changes)) == [1, 0, 0]
    documents = [document for part in on_all_ranks(list(one)) for batch in part for document in batch]
    done = before.plan.items[: before.plan.offsets[6]].tolist()
    assert sorted(done + documents) == list(range(len(LENGTHS)))


class Worker(IterableDataset):
    """Makes a sampler in a worker of a DataLoader, which must not exchange anything."""

    def __iter__(self):
        return iter(sampler(seed=0))


def names_ranks_that_do_not_come(rank):
    assert timedelta(seconds=30) == ranks_module._NOTICE_AFTER, "as docs/packing.md says"
    ranks_module._NOTICE_AFTER = timedelta(seconds=0.1)
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()  # so that the others wait for rank 1 alone
    store.set_timeout(timedelta(seconds=2))
    if rank != 1:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            error = error_of(sampler, TimeoutError)
        message = f"rank 1 has not made this sampler, and rank {rank} waits, because all 3 ranks compare their settings"
        assert message in error
        assert "timeout of 0:00:02 has passed" in error
        assert [str(warning.message) for warning in found if message in str(warning.message)]


def one_of_three(rank, runs, store):
    notices.said.clear()  # what the parent of this process has said
    timeout = timedelta(seconds=600)  # of ranks that wait for one another
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3, timeout=timeout)
    for run in runs:
        run(rank)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("runs", [(agree, states), (names_ranks_that_do_not_come,)])
def test_three_ranks(runs, tmp_path):
    # fork, because a spawned process takes seconds to import; one group for all cases, because each needs numba.
    arguments = (runs, str(tmp_path / "store"))
    torch.multiprocessing.start_processes(one_of_three, arguments, nprocs=3, start_method="fork")

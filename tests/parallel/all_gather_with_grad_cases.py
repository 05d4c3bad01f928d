"""AllGatherWithGrad on several ranks: values, gradients, refusals."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tritonpack import AllGatherWithGrad
from tritonpack.parallel.comm import as_ranks


def world():
    return dist.get_rank(), dist.get_world_size()


def sizes(uneven):
    return [3 * (rank != 1) + rank if uneven else 3 for rank in range(world()[1])]


def shards(dim, uneven, dtype=torch.float64):
    """The shards of all ranks, computed alike on each; the shard of rank 1 is the shortest."""
    shapes = [[2, 5, 4] for _ in sizes(uneven)]
    for shape, size in zip(shapes, sizes(uneven), strict=True):
        shape[dim] = size
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def gathers(dim, uneven, given_lengths):
    rank, _ = world()
    given = shards(dim, uneven)
    gather = AllGatherWithGrad(dim=dim, lengths=sizes(uneven) if given_lengths else None)
    gathered = gather(given[rank])
    assert torch.equal(gathered, torch.cat(given, dim))
    assert gathered.is_contiguous()


def gathers_any_dtype():
    rank, size = world()
    for dtype in (torch.int64, torch.bool, torch.bfloat16, torch.float16):
        gathered = AllGatherWithGrad.apply(torch.full((2, rank + 1), rank).to(dtype))
        assert gathered.dtype == dtype
        assert torch.equal(gathered[0], torch.arange(size).repeat_interleave(torch.arange(1, size + 1)).to(dtype))


def gathers_over_a_mesh_and_a_transposed_shard():
    rank, size = world()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("sp",))
    given = shards(0, uneven=False)
    assert torch.equal(AllGatherWithGrad.apply(given[rank].mT, mesh["sp"], 0), torch.cat(given).mT)


def parameter_gradients(loss_of):
    """Gradients of w in tanh(w x), gathered: summed over ranks, and of the summed losses in one process."""
    rank, size = world()
    given = shards(1, uneven=True)
    w = torch.linspace(0.3, 1.1, given[0].shape[2], dtype=torch.float64, requires_grad=True)
    gathered = AllGatherWithGrad.apply(torch.tanh(given[rank] * w), None, 1)
    loss_of(gathered, rank).backward()
    dist.all_reduce(w.grad)
    alone = w.detach().clone().requires_grad_()
    whole = torch.tanh(torch.cat(given, 1) * alone)
    sum(loss_of(whole, other) for other in range(size)).backward()
    return w.grad, alone.grad


def replicated_loss(gathered, rank):
    return (gathered**3).sum() + gathered.flatten()[1:].mul(gathered.flatten()[:-1]).sum()


def strided_loss(gathered, rank):
    """Reads rows that other ranks own."""
    steps = gathered[:, 1:] * gathered[:, :-1]
    return (steps[:, rank :: world()[1]] ** 2).sum()


def sum_is_the_transpose_of_gathering(loss_of):
    """Backward gives the gradient of the sum of all ranks' losses, whichever rows they read."""
    ours, alone = parameter_gradients(loss_of)
    torch.testing.assert_close(ours, alone, rtol=1e-12, atol=0)


def half_precision_sums_in_float32():
    """256 and a 1 from each other rank: a sum in bfloat16 would lose each 1."""
    rank, size = world()
    shard = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
    gathered = AllGatherWithGrad.apply(shard)
    gathered.backward(torch.full_like(gathered, 256.0 if rank == 0 else 1.0))
    expected = torch.tensor(256.0 + size - 1).bfloat16()
    assert shard.grad.dtype == torch.bfloat16
    assert (shard.grad == expected).all()


def refused(message, call):
    with pytest.raises(ValueError, match=message):
        call()


def refuses_on_every_rank():
    """Only the last rank passes a wrong argument, and every rank raises."""
    rank, size = world()
    odd = rank == size - 1
    gather = AllGatherWithGrad.apply
    refused(r"their size along dim alone.*\(2, 3, 5\) along dim=1, float32", lambda: gather(torch.zeros(2, 3, 4 + odd)))
    refused(r"rank 0: \(2, 3\) along dim=1, float32", lambda: gather(torch.zeros((2, 3) + (4,) * odd)))
    refused("int64", lambda: gather(torch.zeros(2, 3, dtype=torch.int64 if odd else torch.float32)))
    refused("with the dimension dim.*dim=2", lambda: gather(torch.zeros(2, 3), None, 2 if odd else 1))
    refused("with the dimension dim.*dim=-3", lambda: gather(torch.zeros(2, 3), None, -3 if odd else 1))
    refused("no such tensor", lambda: gather([1.0] if odd else torch.zeros(2, 3)))
    refused("complex32", lambda: gather(torch.zeros(2, 3, dtype=torch.complex32 if odd else torch.float32)))
    refused("all or none need gradients.*needs gradients", lambda: gather(torch.zeros(2, 3, requires_grad=odd)))
    refused("backend of the group can reach", lambda: gather(torch.zeros(2, 3, device="meta" if odd else "cpu")))
    assert gather(torch.zeros(2, 3), None, -1 if odd else 1).shape == (2, 3 * size)


def refuses_malformed_arguments():
    _, size = world()
    refused("dim must be an integer; got 'rows'", lambda: AllGatherWithGrad(dim="rows"))
    refused(rf"for each of {size} ranks; got \[3\]", lambda: AllGatherWithGrad(lengths=[3]))
    lengths = [3] * size
    refused("lengths give rank . 3 along dim 1", lambda: AllGatherWithGrad.apply(torch.zeros(1, 2), None, 1, lengths))
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "sp"))
    refused("2 dimensions.*mesh", lambda: AllGatherWithGrad(mesh))


def refuses_a_group_without_this_rank():
    rank, size = world()
    group = dist.new_group(list(range(size - 1)))
    if rank == size - 1:
        refused("isn't in the group", lambda: AllGatherWithGrad(group))
    else:
        assert as_ranks(group).size == size - 1
        assert AllGatherWithGrad.apply(torch.zeros(1, 2), group).shape == (1, 2 * (size - 1))


CASES = {
    **{
        f"gathers dim {dim}, uneven {uneven}, lengths {given_lengths}": partial(gathers, dim, uneven, given_lengths)
        for dim in (0, 1, -1)
        for uneven in (False, True)
        for given_lengths in (False, True)
    },
    **{f"sum, {loss.__name__}": partial(sum_is_the_transpose_of_gathering, loss)
       for loss in (replicated_loss, strided_loss)},
}  # fmt: skip
CASES |= {
    case.__name__: case
    for case in (
        gathers_any_dtype,
        gathers_over_a_mesh_and_a_transposed_shard,
        half_precision_sums_in_float32,
        refuses_on_every_rank,
        refuses_malformed_arguments,
        refuses_a_group_without_this_rank,
    )
}

"""AllGatherWithGrad on several ranks: values, gradients, refusals."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tritonpack import AllGatherWithGrad


def world():
    return dist.get_rank(), dist.get_world_size()


def shards(dim, uneven, dtype=torch.float64):
    """The shards of all ranks, computed alike on each; the shard of rank 1 is the shortest. And their sizes."""
    sizes = [3 * (rank != 1) + rank if uneven else 3 for rank in range(world()[1])]
    generator = torch.Generator().manual_seed(7)
    every = torch.randn(sum(sizes), 5, 4, dtype=torch.float64, generator=generator).to(dtype)
    return [part.movedim(0, dim) for part in every.split(sizes)], sizes


def gathers(dim, uneven):
    for dtype in (torch.float64, torch.int64, torch.bool, torch.bfloat16):
        given, sizes = shards(dim, uneven, dtype)
        for lengths in (None, sizes):
            gathered = AllGatherWithGrad(dim=dim, lengths=lengths)(given[world()[0]])
            assert gathered.dtype == dtype
            assert torch.equal(gathered, torch.cat(given, dim))


def replicated_loss(gathered, rank):
    return (gathered**3).sum() + gathered.flatten()[1:].mul(gathered.flatten()[:-1]).sum()


def strided_loss(gathered, rank):
    """Reads rows that other ranks own."""
    steps = gathered[:, 1:] * gathered[:, :-1]
    return (steps[:, rank :: world()[1]] ** 2).sum()


def sum_is_the_transpose_of_gathering(loss_of):
    """Backward gives the gradient of the sum of all ranks' losses, whichever rows they read."""
    (rank, size), (given, _) = world(), shards(1, uneven=True)
    w, alone = (torch.linspace(0.3, 1.1, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    loss_of(AllGatherWithGrad.apply(torch.tanh(given[rank] * w), None, 1), rank).backward()
    dist.all_reduce(w.grad)
    whole = torch.tanh(torch.cat(given, 1) * alone)
    sum(loss_of(whole, other) for other in range(size)).backward()
    torch.testing.assert_close(w.grad, alone.grad, rtol=1e-12, atol=0)


def half_precision_sums_in_float32():
    """256 and a 1 from each other rank: a sum in bfloat16 would lose each 1."""
    rank, size = world()
    shard = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
    gathered = AllGatherWithGrad.apply(shard)
    gathered.backward(torch.full_like(gathered, 256.0 if rank == 0 else 1.0))
    assert shard.grad.dtype == torch.bfloat16
    assert (shard.grad == torch.tensor(256.0 + size - 1).bfloat16()).all()


def refused(message, call):
    with pytest.raises(ValueError, match=message):
        call()


def refuses_on_every_rank():
    """Only the last rank passes a wrong argument, and every rank raises."""
    rank, size = world()
    odd, x = rank == size - 1, torch.zeros(2, 3)
    gather = AllGatherWithGrad.apply
    for message, *given in (
        (r"their size along dim alone.*\(2, 3, 5\) along dim=1, torch.float32", torch.zeros(2, 3, 4 + odd)),
        (r"rank 0: \(2, 3\) along dim=1, torch.float32", torch.zeros((2, 3) + (4,) * odd)),
        ("int64", x.long() if odd else x),
        ("with the dimension dim.*dim=2", x, None, 2 if odd else 1),
        ("with the dimension dim.*dim=-3", x, None, -3 if odd else 1),
        ("no such tensor", [1.0] if odd else x),
        ("all or none need gradients.*needs gradients", torch.zeros(2, 3, requires_grad=odd)),
        ("backend of the group can reach", x.to("meta") if odd else x),
    ):
        refused(message, lambda given=given: gather(*given))
    assert gather(x, None, -1 if odd else 1).shape == (2, 3 * size)


def refuses_malformed_arguments():
    _, size = world()
    refused("dim must be an integer; got 'rows'", lambda: AllGatherWithGrad(dim="rows"))
    refused(rf"for each of {size} ranks; got \[3\]", lambda: AllGatherWithGrad(lengths=[3]))
    lengths = [3] * size
    refused("lengths give rank . 3 along dim 1", lambda: AllGatherWithGrad.apply(torch.zeros(1, 2), None, 1, lengths))
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "sp"))
    refused("2 dimensions.*mesh", lambda: AllGatherWithGrad(mesh))
    assert AllGatherWithGrad.apply(torch.zeros(1, 2), mesh["sp"]).shape == (1, 2 * size)


def refuses_a_group_without_this_rank():
    rank, size = world()
    group = dist.new_group(list(range(size - 1)))
    if rank == size - 1:
        refused("isn't in the group", lambda: AllGatherWithGrad(group))
    else:
        assert AllGatherWithGrad.apply(torch.zeros(1, 2), group).shape == (1, 2 * (size - 1))


CASES = {f"gathers dim {dim}, uneven {one}": partial(gathers, dim, one) for dim in (0, 1, -1) for one in (False, True)}
CASES |= {
    "sum, replicated_loss": partial(sum_is_the_transpose_of_gathering, replicated_loss),
    "sum, strided_loss": partial(sum_is_the_transpose_of_gathering, strided_loss),
    "half_precision_sums_in_float32": half_precision_sums_in_float32,
    "refuses_on_every_rank": refuses_on_every_rank,
    "refuses_malformed_arguments": refuses_malformed_arguments,
    "refuses_a_group_without_this_rank": refuses_a_group_without_this_rank,
}

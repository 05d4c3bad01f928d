"""`attend` on meshes of two dimensions: ranks divide heads along one, and keys travel along the other.

Results and gradients in float64 are within EXACT of one process, relative to the largest number of a tensor.
"""

from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.parallel.attention_cases import (
    ALIBI,
    BATCHES,
    LAYOUTS,
    TREES,
    Batch,
    differentiate,
    expected,
    low_precision,
    tensors,
)
from tritonpack.parallel import attend, make_layout

EXACT = 3e-15
KEYS = ("all_gather", "group_cast", "ring")
PAIR = ("group_cast", "ulysses")


@cache
def mesh_of(*shape):
    """A mesh of all ranks; its last two dimensions are those of an exchange."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "across", "within")[-len(shape) :])


def square():
    return mesh_of(2, dist.get_world_size() // 2)


def exact(got, wanted, what, whole=None):
    assert got.shape == wanted.shape, what
    finite = wanted.isfinite()
    assert torch.equal(got.isfinite(), finite), what
    if finite.any():
        scale = wanted if whole is None else whole
        error, size = (got - wanted)[finite].abs().max().item(), scale[scale.isfinite()].abs().max().item()
        assert error <= EXACT * size, f"{what}: {error:.1e} of {size:.1e}"


def results(batch, exchange, layout, group):
    """out and gradients of this rank's rows; the gradient of sinks is this rank's part."""
    *whole, sinks = tensors(batch)

    def call(q, k, v, sinks):
        return attend(q, k, v, batch.mask, layout, group, exchange=exchange, sinks=sinks, **batch.options)

    return differentiate(call, *(layout.shard(x, dist.get_rank()) for x in whole), sinks)


def agrees(make_batch, exchange, layout_name, parts=1):
    """Equals one process. `parts` is how many ranks get runs of the rows that the layout gives them together."""
    batch, size = make_batch(), dist.get_world_size()
    layout = make_layout(layout_name, batch.mask, size // parts).divide(parts)
    got, wanted = results(batch, exchange, layout, square()), expected(batch)
    for name, ours, whole in zip(("out", "dq", "dk", "dv", "dsinks"), got, wanted, strict=False):
        if name == "dsinks":
            dist.all_reduce(ours)
        exact(ours, whole if name == "dsinks" else layout.shard(whole, dist.get_rank()), name, whole)


def half_precision(exchange):
    low_precision(exchange, torch.bfloat16, group=square())


def same_bits(got, wanted):
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, wanted, strict=True))


def repeats(keys, along):
    """If all ranks lie along the dimension of one exchange, the bits are those of this exchange alone."""
    batch, size = BATCHES["all at once"](), dist.get_world_size()
    layout = make_layout("stripe", batch.mask, size)
    wanted = results(batch, along, layout, None)
    for pair in ((keys, "ulysses"), ("ulysses", keys)):
        mesh = mesh_of(size, 1) if pair[0] == along else mesh_of(1, size)
        same_bits(results(batch, pair, layout, mesh), wanted)


def on_a_mesh_without_names():
    batch, size = Batch(), dist.get_world_size()
    layout = make_layout("stripe", batch.mask, size)
    unnamed = DeviceMesh("cpu", torch.arange(size).view(2, -1))
    same_bits(results(batch, PAIR, layout, unnamed), results(batch, PAIR, layout, square()))


def refuses_options():
    """Every rank raises the same error."""
    size = dist.get_world_size()

    def refused(message, exchange, group=None, **given):
        batch = Batch(**given)
        layout = make_layout("stripe", batch.mask, size)
        with pytest.raises(ValueError, match=message):
            results(batch, exchange, layout, group or square())

    refused("gives every rank a query head, and there are 1 for 2 ranks", PAIR, heads=1, kv_heads=1)
    refused("each of 2 ranks needs equally many query heads .* are 9 query heads and 3", PAIR, heads=9, kv_heads=3)
    refused("needs an exchange for each, such as exchange=.*; got 'ring'", "ring")
    refused("is for a mesh of two dimensions, and the group has one", PAIR, dist.group.WORLD)


CASES = {
    **{f"{keys}, {layout}": partial(agrees, Batch, (keys, "ulysses"), layout) for keys in KEYS for layout in LAYOUTS},
    **{
        f"{keys}, {name}": partial(agrees, make, (keys, "ulysses"), "documents")
        for keys in KEYS
        for name, make in BATCHES.items()
        if name != "9 heads on 3 key heads"
    },
    **{
        f"{keys}, {name}": partial(agrees, make, (keys, "ulysses"), "zigzag")
        for keys in KEYS
        for name, make in (ALIBI | TREES).items()
        if keys != "group_cast" or name not in TREES
    },
    **{f"ulysses, {keys}": partial(agrees, BATCHES["all at once"], ("ulysses", keys), "documents") for keys in KEYS},
    **{f"{keys}, divided": partial(agrees, Batch, (keys, "ulysses"), "documents", 2) for keys in KEYS},
    **{f"{keys}, bfloat16": partial(half_precision, (keys, "ulysses")) for keys in KEYS},
    **{f"{keys}, along {along}": partial(repeats, keys, along) for keys in KEYS for along in (keys, "ulysses")},
    **{f"auto, {layout}": partial(agrees, Batch, ("auto", "ulysses"), layout) for layout in ("documents", "stripe")},
    "mesh without names": on_a_mesh_without_names,
    "refused options": refuses_options,
}

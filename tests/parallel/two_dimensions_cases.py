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
    STRIDES,
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


def exact(got, wanted, what):
    assert got.shape == wanted.shape, what
    finite = wanted.isfinite()
    assert torch.equal(got.isfinite(), finite), what
    if finite.any():
        error, size = (got - wanted)[finite].abs().max().item(), wanted[finite].abs().max().item()
        assert error <= EXACT * size, f"{what}: {error / size:.1e}"


def results(batch, exchange, layout, group):
    """out, lse and gradients of this rank's rows; the gradient of sinks is this rank's part."""
    q, k, v, dout, dlse, sinks = tensors(batch)
    rank, options = dist.get_rank(), batch.options | batch.exchange_options

    def call(q, k, v, sinks):
        return attend(q, k, v, batch.mask, layout, group, exchange=exchange, sinks=sinks, return_lse=True, **options)

    mine = [layout.shard(x, rank) for x in (q, k, v, dout)]
    return differentiate(call, *mine, layout.shard(dlse, rank, 1), sinks)


def agrees(make_batch, exchange, layout_name, parts=1):
    """Equals one process. `parts` is how many ranks get runs of the rows that the layout gives them together."""
    batch, size = make_batch(), dist.get_world_size()
    layout = make_layout(layout_name, batch.mask, size // parts, chunk=4).divide(parts)
    got, wanted = results(batch, exchange, layout, square()), expected(batch)
    for name, ours, whole in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), got, wanted, strict=False):
        if name == "dsinks":
            dist.all_reduce(ours)
        exact(ours, whole if name == "dsinks" else layout.shard(whole, dist.get_rank(), int(name == "lse")), name)


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

    stride = "must be an integer from 1 to the number of key heads, 4; got 5"
    refused(stride, PAIR, exchange_options={"heads_k_stride": 5})
    stride = r"heads_k_stride is for exchange='all_gather' or .*; leave it out for \('ring', 'ulysses'\)"
    refused(stride, ("ring", "ulysses"), exchange_options={"heads_k_stride": 1})
    refused("gives every rank a query head, and there are 1 for 2 ranks", PAIR, heads=1, kv_heads=1)
    refused("needs an exchange for each, such as exchange=.*; got 'ring'", "ring")
    refused("is for a mesh of two dimensions, and the group has one", PAIR, dist.group.WORLD)


CASES = {
    **{f"{keys}, {layout}": partial(agrees, Batch, (keys, "ulysses"), layout) for keys in KEYS for layout in LAYOUTS},
    **{
        f"{keys}, {name}": partial(agrees, make, (keys, "ulysses"), "balanced")
        for keys in KEYS
        for name, make in BATCHES.items()
    },
    **{
        f"{keys}, {name}": partial(agrees, make, (keys, "ulysses"), "zigzag")
        for keys in KEYS
        for name, make in (ALIBI | ({} if keys == "ring" else STRIDES)).items()
    },
    **{f"ulysses, {keys}": partial(agrees, BATCHES["all at once"], ("ulysses", keys), "balanced") for keys in KEYS},
    **{f"{keys}, divided": partial(agrees, Batch, (keys, "ulysses"), "documents", 2) for keys in KEYS},
    **{f"{keys}, bfloat16": partial(half_precision, (keys, "ulysses")) for keys in KEYS},
    **{f"{keys}, along {along}": partial(repeats, keys, along) for keys in KEYS for along in (keys, "ulysses")},
    **{f"auto, {layout}": partial(agrees, Batch, ("auto", "ulysses"), layout) for layout in ("documents", "stripe")},
    "mesh without names": on_a_mesh_without_names,
    "refused options": refuses_options,
}

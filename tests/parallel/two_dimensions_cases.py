"""Meshes of two dimensions: ranks divide heads along one, and keys travel along the other.

Results and gradients in float64 are within EXACT of one process, relative to the largest number of a tensor.
"""

from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

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
from tests.parallel.models import BATCHES as MODEL_BATCHES
from tests.parallel.models import LENGTHS, alone_on, gradients_of, loss_of, make_model, mean_over, state_of
from tests.parallel.models import packed as packed_batch
from tritonpack import BlockDiagonalMask, SequenceParallel, patch
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
    """`attend` equals one process. `parts` is how many ranks get runs of rows that the layout gives together."""
    batch, size = make_batch(), dist.get_world_size()
    layout = make_layout(layout_name, batch.mask, size // parts, chunk=4).divide(parts)
    got, wanted = results(batch, exchange, layout, square()), expected(batch)
    for name, ours, whole in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), got, wanted, strict=False):
        if name == "dsinks":
            dist.all_reduce(ours)
        exact(ours, whole if name == "dsinks" else layout.shard(whole, dist.get_rank(), int(name == "lse")), name)


def repeats(exchange, of_size_one):
    """With one rank along a dimension, the bits are those of the exchange along the other."""
    batch, size = BATCHES["all at once"](), dist.get_world_size()
    layout = make_layout("stripe", batch.mask, size)
    for pair in ((exchange, "ulysses"), ("ulysses", exchange)):
        shape = (1, size) if pair[0] == of_size_one else (size, 1)
        got = results(batch, pair, layout, mesh_of(*shape))
        wanted = results(batch, "ulysses" if of_size_one != "ulysses" else exchange, layout, None)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, wanted, strict=True))


def half_precision(exchange):
    low_precision(exchange, torch.bfloat16, group=square())


def shares(family="llama", batch="packed", **options):
    """A model whose batches all ranks share has the loss and the gradients of one process."""
    model, wanted = make_model(family), alone_on(family, batch)
    with SequenceParallel(model, square(), **options):
        loss = model(**MODEL_BATCHES[batch]()).loss
        loss.backward()
    gradients = mean_over(None, gradients_of(model), options.get("grad_reduce", "mean"))
    exact(loss.detach()[None], wanted.loss, "loss")
    assert gradients.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        exact(gradients[name], gradient, name)


def shards_gathers_and_sums(layout):
    """`shard`, `gather`, `total` and `gather_outputs` are of all ranks of the mesh."""
    model, batch = make_model(), packed_batch()
    labels = batch.pop("labels")
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    with SequenceParallel(model, square(), exchange=PAIR, layout=layout) as context:
        logits = model(**batch).logits
        assert logits.shape[1] <= -(-labels.shape[1] // dist.get_world_size()) + 4
        mine = context.shard(targets, fill=-100)
        loss = context.total(torch.nn.functional.cross_entropy(logits[0], mine[0], reduction="sum"))
        loss = loss / (targets != -100).sum()
        loss.backward()
        assert torch.equal(context.gather(mine), targets)
        gathered = context.gather(logits.detach())
    wanted = alone_on("llama", "packed")
    exact(loss.detach()[None], wanted.loss, "loss")
    for name, gradient in mean_over(None, gradients_of(model)).items():
        exact(gradient, wanted.gradients[name], name)
    with SequenceParallel(model, square(), exchange=PAIR, layout=layout, gather_outputs=True), torch.no_grad():
        exact(model(**batch).logits, gathered, "logits")


def in_groups_of_two(*shape):
    """Pairs of ranks share batches along a part of a mesh, whose process group is made when it is first used."""
    mesh = mesh_of(*shape)
    part = mesh["across", "within"]
    batches = [packed_batch(seed=seed) for seed in range(mesh["dp"].size())]
    model, reference = make_model(), make_model()
    patch(reference)
    for batch in batches:
        (loss_of(reference, **batch) / len(batches)).backward()
    trained = DistributedDataParallel(model)
    for _ in range(2):  # the second context uses the same group
        trained.zero_grad()
        with SequenceParallel(trained, part, exchange=PAIR) as context:
            assert context.state.ranks.size == 2
            loss_of(trained, **batches[mesh.get_local_rank("dp")]).backward()
    assert dist.get_process_group_ranks(context.state.ranks.group) == part.mesh.flatten().tolist()
    for (name, p), wanted in zip(model.named_parameters(), reference.parameters(), strict=True):
        exact(p.grad, wanted.grad, name)


def layout_divides_sets_of_ranks():
    """Ranks that divide heads get runs of the rows that the layout gives them together."""
    model, mask = make_model(), BlockDiagonalMask.from_seqlens(LENGTHS)
    wanted = make_layout("documents", mask, 2).divide(dist.get_world_size() // 2).rows
    for pair, order in ((PAIR, (0, 1, 2, 3)), (PAIR[::-1], (0, 2, 1, 3))):
        with SequenceParallel(model, square(), exchange=pair, layout="documents") as context:
            model(**packed_batch())
            for place, rank in enumerate(order[: dist.get_world_size()]):
                assert torch.equal(context.state.sharding.layout.rows[rank], wanted[place])


def refused(message, group, **options):
    """On entry, and by `attend`."""
    model, batch = make_model(), Batch()
    before = state_of(model)
    with pytest.raises(ValueError, match=message):
        SequenceParallel(model, group, **options).__enter__()
    assert state_of(model) == before
    with pytest.raises(ValueError, match=message):
        results(batch, options["exchange"], make_layout("stripe", batch.mask, dist.get_world_size()), group)


def refused_call(message, make_batch, exchange):
    batch = make_batch()
    with pytest.raises(ValueError, match=message):
        results(batch, exchange, make_layout("stripe", batch.mask, dist.get_world_size()), square())


def refusals():
    """Every rank raises the same error."""
    mesh, size = square(), dist.get_world_size()
    refused("needs an exchange for each, such as.*got 'ring'.*mesh of one dimension", mesh, exchange="ring")
    refused("is for a mesh of two dimensions, and the group has one", None, exchange=PAIR)
    for pair in (("ring", "ring"), ("ulysses", "ulysses"), ("p2p", "ulysses"), ("ring", "ulysses", "ring"), ()):
        refused("a pair: 'ulysses' for the dimension along which ranks divide heads.*got", mesh, exchange=pair)
    message = "DeviceMesh of 3 dimensions, .*'dp', 'across', 'within'.*pass one or two of them"
    refused(message, mesh_of(1, 2, size // 2), exchange=PAIR)
    refused(r"must ascend row by row; got \[\[0, 2\], \[1, 3\]\]", DeviceMesh("cpu", [[0, 2], [1, 3]]), exchange=PAIR)
    message = "needs names" if dist.get_rank() < 2 else "isn't in the mesh"
    refused(message, DeviceMesh("cpu", [[0], [1]]), exchange=PAIR)
    refused_call(
        "must be an integer from 1 to the number of key heads, 4; got 5",
        lambda: Batch(exchange_options={"heads_k_stride": 5}),
        PAIR,
    )
    message = r"heads_k_stride is for .*leave it out for \('ring', 'ulysses'\)"
    refused_call(message, STRIDES["stride 1"], ("ring", "ulysses"))
    refused_call("alibi_slopes need the distance of each key", ALIBI["alibi"], ("ring", "ulysses"))
    refused_call("gives every rank a query head, and there are 1 for 2 ranks", lambda: Batch(heads=1, kv_heads=1), PAIR)


def on_a_mesh_without_names():
    batch, size = Batch(), dist.get_world_size()
    layout = make_layout("stripe", batch.mask, size)
    got = results(batch, PAIR, layout, DeviceMesh("cpu", torch.arange(size).view(2, -1)))
    assert all(torch.equal(*pair) for pair in zip(got, results(batch, PAIR, layout, square()), strict=True))


CASES = {
    **{f"{keys}, {layout}": partial(agrees, Batch, (keys, "ulysses"), layout) for keys in KEYS for layout in LAYOUTS},
    **{
        f"{keys}, {name}": partial(agrees, make, (keys, "ulysses"), "balanced")
        for keys in KEYS
        for name, make in BATCHES.items()
    },
    **{
        f"{keys}, {name}": partial(agrees, make, (keys, "ulysses"), "zigzag")
        for keys in ("all_gather", "group_cast")
        for name, make in (ALIBI | STRIDES).items()
    },
    **{
        f"ulysses first, {keys}": partial(agrees, BATCHES["all at once"], ("ulysses", keys), "balanced")
        for keys in KEYS
    },
    **{f"sets of ranks, {keys}": partial(agrees, Batch, (keys, "ulysses"), "documents", 2) for keys in KEYS},
    **{f"bfloat16, {keys}": partial(half_precision, (keys, "ulysses")) for keys in KEYS},
    "mesh without names": on_a_mesh_without_names,
    **{
        f"model, {keys}, {layout}": partial(shares, exchange=(keys, "ulysses"), layout=layout)
        for keys in KEYS
        for layout in LAYOUTS
    },
    **{
        f"model, {keys}, {batch}": partial(shares, batch=batch, exchange=(keys, "ulysses"))
        for keys in KEYS
        for batch in MODEL_BATCHES
        if batch != "packed"
    },
    **{
        f"model, {keys}, {family}": partial(shares, family, exchange=(keys, "ulysses"))
        for keys in KEYS
        for family in ("mistral", "gemma2", "gpt_oss")
    },
    "model, ulysses first": partial(shares, exchange=PAIR[::-1], layout="documents"),
    "model, summed gradients": partial(shares, exchange=PAIR, grad_reduce="sum"),
    "shard, gather, total": partial(shards_gathers_and_sums, "documents"),
    "shard, gather, total, stripes": partial(shards_gathers_and_sums, "stripe"),
    "pairs along the second dimension": partial(in_groups_of_two, 2, 1, 2),
    "pairs along the first dimension": partial(in_groups_of_two, 2, 2, 1),
    "layout of sets of ranks": layout_divides_sets_of_ranks,
    "refusals": refusals,
}

# These need two ranks, along either dimension.
ON_TWO = {
    **{f"one set of ranks, {keys}": partial(repeats, keys, keys) for keys in KEYS},
    **{f"sets of one rank, {keys}": partial(repeats, keys, "ulysses") for keys in KEYS},
}
CASES |= ON_TWO

"""SequenceParallel on meshes of two dimensions: losses and gradients are within 3e-15 of one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from tests.parallel.attention_cases import LAYOUTS
from tests.parallel.models import (
    BATCHES,
    LENGTHS,
    Result,
    alone,
    alone_on,
    gradients_of,
    loss_of,
    make_model,
    mean_over,
    packed,
    state_of,
)
from tests.parallel.recurrent_cases import in_float64, require_equal, several_documents
from tests.parallel.recurrent_cases import make as make_recurrent
from tests.parallel.two_dimensions_cases import KEYS, PAIR, exact, mesh_of, square
from tritonpack import BlockDiagonalMask, SequenceParallel, patch
from tritonpack.parallel import make_layout


def agrees(family="llama", batch="packed", **options):
    model = make_model(family)
    with SequenceParallel(model, square(), **options):
        loss = model(**BATCHES[batch]()).loss
        loss.backward()
    same(loss, mean_over(None, gradients_of(model), options.get("grad_reduce", "mean")), alone_on(family, batch))


def agrees_on_recurrences(name):
    """Documents travel between nodes and within them."""
    model, other, batch = make_recurrent(name), make_recurrent(name), {**several_documents(), "use_cache": False}
    with in_float64():
        wanted = alone(other, loss_of, batch)
        with SequenceParallel(model, square(), exchange=PAIR, layout="documents"):
            loss = model(**batch).loss
            loss.backward()
        gradients = mean_over(None, gradients_of(model))
    require_equal(Result(loss.detach()[None], gradients), wanted)


def same(loss, gradients, wanted):
    exact(loss.detach()[None], wanted.loss, "loss")
    assert gradients.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        exact(gradients[name], gradient, name)


def shards_gathers_and_sums(layout):
    """`shard`, `gather`, `total` and `gather_outputs` are of all ranks of the mesh."""
    model, batch = make_model(), packed()
    labels = batch.pop("labels")
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    with SequenceParallel(model, square(), exchange=PAIR, layout=layout) as context:
        logits = model(**batch).logits
        assert logits.shape[1] < labels.shape[1] / 2
        mine = context.shard(targets, fill=-100)
        loss = context.total(torch.nn.functional.cross_entropy(logits[0], mine[0], reduction="sum"))
        loss = loss / (targets != -100).sum()
        loss.backward()
        assert torch.equal(context.gather(mine), targets)
        gathered = context.gather(logits.detach())
    same(loss, mean_over(None, gradients_of(model)), alone_on("llama", "packed"))
    with SequenceParallel(model, square(), exchange=PAIR, layout=layout, gather_outputs=True), torch.no_grad():
        exact(model(**batch).logits, gathered, "logits")


def in_pairs(*shape):
    """Pairs of ranks share batches along a part of a mesh, whose process group is made when it is first used."""
    mesh = mesh_of(*shape)
    part = mesh["across", "within"]
    batches = [packed(seed=seed) for seed in range(mesh["dp"].size())]
    model, reference = make_model(), make_model()
    patch(reference)
    for batch in batches:
        (loss_of(reference, **batch) / len(batches)).backward()
    trained, groups = DistributedDataParallel(model), set()
    for _ in range(2):
        trained.zero_grad()
        with SequenceParallel(trained, part, exchange=PAIR) as context:
            loss_of(trained, **batches[mesh.get_local_rank("dp")]).backward()
        groups.add(context.ranks.group)
    (group,) = groups
    assert dist.get_process_group_ranks(group) == part.mesh.flatten().tolist()
    for (name, p), wanted in zip(model.named_parameters(), reference.parameters(), strict=True):
        exact(p.grad, wanted.grad, name)


def layout_divides_sets_of_ranks():
    """Ranks that divide heads get runs of the rows that the layout gives them together."""
    model, mask = make_model(), BlockDiagonalMask.from_seqlens(LENGTHS)
    wanted = make_layout("documents", mask, 2).divide(2).rows
    for pair, order in ((PAIR, (0, 1, 2, 3)), (PAIR[::-1], (0, 2, 1, 3))):
        with SequenceParallel(model, square(), exchange=pair, layout="documents") as context:
            model(**packed())
            got = context.sharding.layout.rows
            assert [got[rank].tolist() for rank in order] == [rows.tolist() for rows in wanted]


def refused(message, group, exchange, wrap=lambda model: model):
    """On entry, on every rank."""
    model = make_model()
    before = state_of(model)
    with pytest.raises(ValueError, match=message):
        SequenceParallel(wrap(model), group, exchange=exchange).__enter__()
    assert state_of(model) == before


def refuses_meshes_and_pairs():
    mesh = square()
    refused("needs an exchange for each, such as.*got 'all_gather'.*mesh of one dimension", mesh, "all_gather")
    refused("is for a mesh of two dimensions, and the group has one", None, PAIR)
    for pair in (("ring", "ring"), ("ulysses", "ulysses"), ("p2p", "ulysses"), ("ring", "ulysses", "ring"), ()):
        refused("a pair: 'ulysses' for the dimension along which ranks divide heads.*got", mesh, pair)
    refused("DeviceMesh of 3 dimensions, .*'dp', 'across', 'within'.*pass one or two", mesh_of(1, 2, 2), PAIR)
    refused(r"must ascend row by row; got \[\[0, 2\], \[1, 3\]\]", DeviceMesh("cpu", [[0, 2], [1, 3]]), PAIR)
    unnamed = "needs names, such as" if dist.get_rank() < 2 else "isn't in the group"
    refused(unnamed, DeviceMesh("cpu", [[0], [1]]), PAIR)

    def over_a_dimension(model):
        return DistributedDataParallel(model, process_group=mesh["within"].get_group())

    refused("a batch is shared by the ranks .0, 1, 2, 3.", mesh, PAIR, over_a_dimension)


CASES = {
    **{f"{keys}, {one}": partial(agrees, exchange=(keys, "ulysses"), layout=one) for keys in KEYS for one in LAYOUTS},
    **{
        f"{keys}, {batch}": partial(agrees, batch=batch, exchange=(keys, "ulysses"))
        for keys in KEYS
        for batch in BATCHES
        if batch != "packed"
    },
    **{
        f"{keys}, {family}": partial(agrees, family, exchange=(keys, "ulysses"))
        for keys in KEYS
        for family in ("mistral", "gemma2", "gpt_oss")
    },
    **{name: partial(agrees_on_recurrences, name) for name in ("qwen3_next", "mamba2")},
    "ulysses, group_cast": partial(agrees, exchange=PAIR[::-1], layout="documents"),
    "summed gradients": partial(agrees, exchange=list(PAIR), grad_reduce="sum"),
    "shard, gather, total": partial(shards_gathers_and_sums, "documents"),
    "shard, gather, total of stripes": partial(shards_gathers_and_sums, "stripe"),
    "pairs along the second dimension": partial(in_pairs, 2, 1, 2),
    "pairs along the first dimension": partial(in_pairs, 2, 2, 1),
    "layout": layout_divides_sets_of_ranks,
    "refusals": refuses_meshes_and_pairs,
}

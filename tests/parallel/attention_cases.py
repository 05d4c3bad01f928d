"""`attend` on several ranks: results and gradients equal those of one process."""

from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.parallel.models import mesh_of
from tritonpack import AllGatherWithGrad, BlockDiagonalMask, varlen_attention
from tritonpack.parallel import attend, make_layout
from tritonpack.testing.cases import Case, make_inputs, parents_of
from tritonpack.testing.tolerance import OUTPUTS, check_outputs

KEYS = ("all_gather", "group_cast", "ring")
EXCHANGES = (*KEYS, "ulysses")
LAYOUTS = ("contiguous", "zigzag", "stripe", "documents")
LENGTHS = (3, 0, 29, 1, 11, 7)  # 51 tokens: neither 2 nor 4 divides them
EXACT = 3e-15  # of the largest number of a tensor


def packed(**options):
    return BlockDiagonalMask.from_seqlens(LENGTHS, **options)


def trees(**options):
    """A prompt with three completions, a document, and a tree whose branches branch; 53 tokens."""
    forest = [(-1, 9), (0, 7), (0, 1), (0, 12)], [(-1, 5)], [(-1, 4), (0, 3), (1, 6), (1, 2), (0, 4)]
    return BlockDiagonalMask.from_tree(parents_of(*forest), **options)


def padded():
    """Rows of 20 tokens with padding on the right, the left and both sides, and one row of padding."""
    tokens = torch.zeros(4, 20, dtype=torch.int64)
    tokens[0, 6:] = tokens[1, :13] = tokens[2, 2:17] = 1
    return BlockDiagonalMask.from_padding_mask(tokens)


@dataclass(frozen=True)
class Batch:
    """A whole batch, and the options of `attend`."""

    mask: BlockDiagonalMask = field(default_factory=packed)
    heads: int = 8
    kv_heads: int = 4
    options: dict = field(default_factory=dict)
    sinks: bool = False
    poisoned: bool = False


def tensors(batch):
    generator = torch.Generator().manual_seed(3)
    total = batch.mask.num_queries
    shapes = [(total, batch.heads, 8), (total, batch.kv_heads, 8), (total, batch.kv_heads, 6), (total, batch.heads, 6)]
    q, k, v, dout = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    sinks = torch.randn(batch.heads, generator=generator, dtype=torch.float64)
    if batch.poisoned:
        for x in (q, k, v, dout):
            x[batch.mask.key_start == batch.mask.key_stop] = float("nan")
    return q, k, v, dout, sinks if batch.sinks else None


def differentiate(call, q, k, v, dout, sinks):
    """out and the gradients of q, k, v, sinks."""
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v, sinks) if x is not None]
    out = call(*inputs[:3], sinks=inputs[3] if sinks is not None else None)
    return out.detach(), *torch.autograd.grad(out, inputs, dout)


def on_ranks(batch, exchange, layout, group=None):
    *whole, sinks = tensors(batch)
    call = partial(attend, mask=batch.mask, layout=layout, group=group, exchange=exchange, **batch.options)
    return differentiate(call, *(layout.shard(x, dist.get_rank()) for x in whole), sinks)


def agrees(make_batch, exchange, layout_name, parts=1):
    """Equals one process. `parts` is how many ranks get runs of the rows that the layout gives them together."""
    batch = make_batch()
    size, rank = dist.get_world_size(), dist.get_rank()
    layout = make_layout(layout_name, batch.mask, size // parts).divide(parts)
    got = on_ranks(batch, exchange, layout, None if isinstance(exchange, str) else mesh_of(2, size // 2))
    reference = partial(varlen_attention, mask=batch.mask, backend="reference", **batch.options)
    wanted = differentiate(reference, *tensors(batch))
    for name, ours, whole in zip(("out", "dq", "dk", "dv", "dsinks"), got, wanted, strict=False):
        if name == "dsinks":
            dist.all_reduce(ours)
        mine, scale = whole if name == "dsinks" else layout.shard(whole, rank), whole[whole.isfinite()].abs().max()
        assert torch.equal(ours.isfinite(), mine.isfinite()), name
        error = (ours - mine)[mine.isfinite()].abs().max() if mine.isfinite().any() else 0.0
        assert error <= EXACT * scale, f"{name}: {error:.1e} of {scale:.1e}"


def low_precision(exchange, dtype, backend="auto"):
    """Errors against float64 obey the tolerance rule for one process."""
    inputs = make_inputs(Case("packed", LENGTHS, heads=8, kv_heads=4, sinks=True), dtype)
    inputs = replace(inputs, dlse=torch.zeros_like(inputs.dlse))
    layout, group = make_layout("zigzag", inputs.mask, dist.get_world_size()), None
    if not isinstance(exchange, str):
        group = mesh_of(2, 2)
    call = partial(attend, mask=inputs.mask, layout=layout, group=group, exchange=exchange, backend=backend)
    mine = [layout.shard(x, dist.get_rank()) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]
    *outputs, dsinks = differentiate(call, *mine, inputs.sinks)
    dist.all_reduce(dsinks)
    names = [name for name in OUTPUTS if name != "lse"]
    assert {x.dtype for x in outputs} == {dtype}
    whole = [layout.unshard(AllGatherWithGrad.apply(output, None, 0)) for output in outputs]
    check_outputs(inputs, dict(zip(names, (*whole, dsinks), strict=True)))


def refuses():
    """An option, a tensor or a layout that doesn't fit; and pairs of exchanges without a mesh."""
    size, batch = dist.get_world_size(), Batch()
    layout = make_layout("documents", batch.mask, size)
    q, k, v = (layout.shard(x, dist.get_rank()) for x in tensors(batch)[:3])
    good = {"q": q, "k": k, "v": v, "mask": batch.mask, "layout": layout}
    one_head = {"q": q[:, :1], "k": k[:, :1], "v": v[:, :1]}
    mask = trees()
    zigzag = make_layout("zigzag", mask, size)
    of_trees = dict(zip("qkv", torch.zeros(3, zigzag.lengths[dist.get_rank()], 4, 8), strict=True))
    for message, wrong in (
        ("dropout_p must be 0.0 in sequence parallelism; got 0.1", {"dropout_p": 0.1}),
        ("exchange must be one of 'auto', 'all_gather', 'group_cast', 'ring', 'ulysses', .*'p2p'", {"exchange": "p2p"}),
        ("needs one exchange; got .* for one dimension", {"exchange": ("ring", "ulysses")}),
        (f"for {size + 1} ranks, and the group has {size}", {"layout": make_layout("stripe", batch.mask, size + 1)}),
        ("layout must be a Layout.*got str", {"layout": "zigzag"}),
        ("mask must be a tritonpack.BlockDiagonalMask.*got NoneType", {"mask": None}),
        ("51 rows as queries and keys; got 50", {"mask": BlockDiagonalMask.from_seqlens([50])}),
        (r"owns [12]\d of the layout's", {"q": torch.cat([q, q])}),
        ("same numbers of tokens and heads", {"v": v[1:]}),
        ("softcap must be", {"softcap": -1.0}),
        (f"gives every rank a query head, and there are 1 for {size}", {"exchange": "ulysses", **one_head}),
        ("mask of trees use the layout", {**of_trees, "mask": mask, "layout": zigzag, "exchange": "group_cast"}),
    ):
        with pytest.raises(ValueError, match=message):
            attend(**good | wrong)


def repeats_itself(exchange):
    """Gradients of rows that several ranks see are sums in a fixed order, so they are the same bits each time."""
    batch = Batch(BlockDiagonalMask.from_seqlens([51], causal=False), kv_heads=1)
    layout = make_layout("stripe", batch.mask, dist.get_world_size())
    runs = [on_ranks(batch, exchange, layout) for _ in range(3)]
    assert all(torch.equal(a, b) for again in runs[1:] for a, b in zip(runs[0], again, strict=True))


SLOPES = torch.tensor([0.5**n for n in range(1, 9)])
BATCHES = {
    "softcap": lambda: Batch(options={"softcap": 2.0, "scale": 0.7}),
    "sinks": lambda: Batch(sinks=True),
    "windows": lambda: Batch(packed(window=(5, 0))),
    "bidirectional": lambda: Batch(packed(causal=False)),
    "chunks": lambda: Batch(packed(chunk_size=8)),
    "padded, NaN in padding": lambda: Batch(padded(), sinks=True, poisoned=True),
    "one key head": lambda: Batch(kv_heads=1, sinks=True),
    "7 heads on 7 key heads": lambda: Batch(heads=7, kv_heads=7),
    "9 heads on 3 key heads": lambda: Batch(heads=9, kv_heads=3, sinks=True),
    "3 tokens": lambda: Batch(BlockDiagonalMask.from_seqlens([2, 1])),
    "all at once": lambda: Batch(packed(window=(9, 0)), options={"softcap": 3.0}, sinks=True, kv_heads=2),
    "alibi": lambda: Batch(options={"alibi_slopes": SLOPES}),
    "alibi per document": lambda: Batch(options={"alibi_slopes": torch.outer(torch.arange(6) + 1.0, SLOPES)}),
}
TREES = {
    "trees": lambda: Batch(trees(), sinks=True),
    "trees, windows": lambda: Batch(trees(window=(4, 0)), options={"softcap": 3.0}, sinks=True),
    "alibi, trees": lambda: Batch(trees(), options={"alibi_slopes": SLOPES}, sinks=True),
}

CASES = {}
for exchange in (*EXCHANGES, "auto", *((keys, "ulysses") for keys in KEYS)):
    name, simple = exchange if isinstance(exchange, str) else f"mesh, {exchange[0]}", isinstance(exchange, str)
    CASES |= {f"{name}, {layout}": partial(agrees, Batch, exchange, layout) for layout in LAYOUTS}
    CASES |= {f"{name}, {one}": partial(agrees, make, exchange, "documents") for one, make in BATCHES.items()}
    CASES[f"{name}, bfloat16"] = partial(low_precision, exchange, torch.bfloat16)
    if "group_cast" not in exchange:
        CASES |= {f"{name}, {one}": partial(agrees, make, exchange, "zigzag") for one, make in TREES.items()}
    if simple:
        CASES[f"{name}, float32"] = partial(low_precision, exchange, torch.float32)
        CASES[f"{name}, same bits"] = partial(repeats_itself, exchange)
    else:
        CASES[f"{name}, ulysses first"] = partial(agrees, BATCHES["all at once"], exchange[::-1], "documents")
        CASES[f"{name}, divided"] = partial(agrees, Batch, exchange, "documents", 2)
CASES["mesh, auto, trees"] = partial(agrees, TREES["trees"], ("auto", "ulysses"), "stripe")
CASES["refusals"] = refuses

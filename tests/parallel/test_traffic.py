"""How many bytes the exchanges send, and when, on one rank of a fake group of eight."""

from collections import Counter
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.lengths import fill
from tests.parallel.attention_cases import trees
from tritonpack import BlockDiagonalMask
from tritonpack.parallel import attend, comm, make_layout
from tritonpack.parallel.comm import Ranks
from tritonpack.parallel.exchanges import group_cast
from tritonpack.parallel.exchanges.call import Call
from tritonpack.parallel.exchanges.group_cast import make_plan, plan_of, send
from tritonpack.parallel.exchanges.ulysses import divide_heads
from tritonpack.parallel.layouts import LayoutName

RANKS, RANK = 8, 3
TOKENS, HEADS, HEAD_DIM, HEAD_DIM_V = 128, 16, 8, 4


@pytest.fixture
def events():
    """The order of events: "send" when a collective begins, "compute" when attention begins."""
    return []


@pytest.fixture
def received(monkeypatch, events):
    """Bytes that this rank receives from others, by collective."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    counts = Counter()
    done = SimpleNamespace(wait=lambda: None)

    def computing(*arguments, _forward=Call.forward):
        events.append("compute")
        return _forward(*arguments)

    def all_gather(target, source, **_):
        events.append("send")
        counts["all_gather"] += target.nbytes - source.nbytes
        return done

    def reduce_scatter(target, source, **_):
        counts["reduce_scatter"] += source.nbytes - target.nbytes
        return done

    def all_to_all(target, source, taken, given, **_):
        events.append("send")
        assert (target.numel(), source.numel()) == (sum(taken), sum(given))
        counts["all_to_all"] += (sum(taken) - taken[RANK]) * target.itemsize
        return done

    def batch(operations):
        events.append("send")
        counts["ring"] += sum(one.tensor.nbytes for one in operations if one.op is dist.irecv)
        return [done]

    monkeypatch.setattr(Call, "forward", computing)
    monkeypatch.setattr(comm, "_all_gather", all_gather)
    monkeypatch.setattr(comm, "_reduce_scatter", reduce_scatter)
    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    monkeypatch.setattr(dist, "batch_isend_irecv", batch)
    yield counts
    dist.destroy_process_group()


def bytes_received(exchange, lengths, heads, kv_heads, dtype):
    """Bytes of each rank in forward and in backward, by the formulas of docs/sequence-parallelism.md."""
    rows, b, wide = np.array(lengths), dtype.itemsize, max(dtype.itemsize, 4)
    width, total = kv_heads * (HEAD_DIM + HEAD_DIM_V), sum(lengths)
    if exchange == "all_gather":
        numbers = np.full(RANKS, (RANKS - 1) * max(lengths) * width)
        return numbers * b, numbers * (b + wide)
    if exchange == "ring":
        numbers = (total - rows) * width
        return numbers * b, numbers * b + total * width * wide
    shares = divide_heads(heads, kv_heads, RANKS)
    own, keys = (np.array([span.stop - span.start for span in side]) for side in shares)
    inputs = own * HEAD_DIM + keys * (HEAD_DIM + HEAD_DIM_V)
    forward = (total - rows) * inputs + rows * (heads - own) * HEAD_DIM_V
    backward = (total - rows) * own * HEAD_DIM_V + rows * (inputs.sum() - inputs)
    return forward * b, backward * b


@pytest.mark.parametrize("layout", ["balanced", "stripe", "zigzag"])
@pytest.mark.parametrize("tokens", [TOKENS, TOKENS + 11, RANKS - 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 2), (16, 8), (16, 16), (12, 4), (20, 10)])
def test_bytes_received_follow_the_formulas(received, heads, kv_heads, dtype, tokens, layout):
    """Also if rows or heads don't divide by ranks, if ranks share key heads, or if some ranks have no row."""
    mask = BlockDiagonalMask.from_seqlens([tokens - 5, 5])
    layout = make_layout(layout, mask, RANKS)
    for exchange in ("all_gather", "ring", "ulysses"):
        forward, backward = bytes_received(exchange, layout.lengths, heads, kv_heads, dtype)
        widths = ((heads, HEAD_DIM), (kv_heads, HEAD_DIM), (kv_heads, HEAD_DIM_V))
        rows = layout.lengths[RANK]
        q, k, v = (torch.zeros(rows, *width, dtype=dtype, requires_grad=True) for width in widths)
        received.clear()
        out = attend(q, k, v, mask, layout, exchange=exchange)
        assert received.total() == forward[RANK]
        received.clear()
        out.backward(torch.zeros_like(out))
        assert received.total() == backward[RANK]


GROUP_CAST_MASKS = {
    "causal": lambda: BlockDiagonalMask.from_seqlens([71, 1, 40, 16]),
    "windows": lambda: BlockDiagonalMask.from_seqlens([100, 28], window=(11, 0)),
    "bidirectional": lambda: BlockDiagonalMask.from_seqlens([100, 28], causal=False),
    "chunks": lambda: BlockDiagonalMask.from_seqlens([100, 28], chunk_size=24),
    "trees": lambda: trees(window=(6, 0)),
    "short documents": lambda: BlockDiagonalMask.from_seqlens([4] * 32),
}


@pytest.mark.parametrize("layout", get_args(LayoutName))
@pytest.mark.parametrize("make", GROUP_CAST_MASKS.values(), ids=GROUP_CAST_MASKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_group_cast_receives_the_keys_that_are_seen(received, make, layout, dtype):
    """Not one byte more: the keys that the dense mask shows to this rank's rows, and a gradient for each way back."""
    mask = make()
    layout = make_layout(layout, mask, RANKS, chunk=8)
    dense = mask.to_dense()
    mine = layout.rows[RANK]
    seen = dense[mine].any(0)
    seen[mine] = False
    shown = sum(int(dense[rows][:, mine].any(0).sum()) for rank, rows in enumerate(layout.rows) if rank != RANK)
    width, wide = 4 * (HEAD_DIM + HEAD_DIM_V), max(dtype.itemsize, 4)
    shapes = ((HEADS, HEAD_DIM), (4, HEAD_DIM), (4, HEAD_DIM_V))
    q, k, v = (torch.zeros(mine.shape[0], *shape, dtype=dtype, requires_grad=True) for shape in shapes)
    out = attend(q, k, v, mask, layout, exchange="group_cast")
    assert received.total() == int(seen.sum()) * width * dtype.itemsize
    received.clear()
    out.backward(torch.zeros_like(out))
    assert received.total() == int(seen.sum()) * width * dtype.itemsize + shown * width * wide


def test_group_cast_receives_few_bytes_for_a_million_tokens(received):
    """The bytes follow from the plan, which no attention is computed for."""
    lengths = fill(np.random.default_rng(0).lognormal(np.log(700), 1.0, 4096), 1 << 20)
    mask = BlockDiagonalMask.from_seqlens(lengths)
    layout = make_layout("documents", mask, RANKS)
    plan = plan_of(mask, layout, RANK)
    x = torch.zeros(layout.lengths[RANK], 1, dtype=torch.uint8)
    call = Call(Ranks(dist.group.WORLD, RANK, RANKS), layout, mask, None, "reference", 1)
    send(call, x)
    assert received.total() == sum(plan.received_counts) == layout.remote_keys(mask)[RANK] <= 917_504 // 10


def test_group_cast_plans_once_for_all_layers(received, monkeypatch):
    made = []
    monkeypatch.setattr(group_cast, "make_plan", lambda *given: made.append(given) or make_plan(*given))
    mask = BlockDiagonalMask.from_seqlens([TOKENS])
    layout = make_layout("documents", mask, RANKS)
    for _ in range(3):
        forward("group_cast", mask, layout)
    assert len(made) == 1


def test_group_cast_sends_nothing_if_documents_are_whole(events, received):
    mask = BlockDiagonalMask.from_seqlens([16] * RANKS)
    forward("group_cast", mask, make_layout("documents", mask, RANKS))
    assert events == ["compute"]


def forward(exchange, mask, layout, **options):
    q, k, v = (torch.zeros(layout.lengths[RANK], HEADS, HEAD_DIM) for _ in range(3))
    attend(q, k, v, mask, layout, exchange=exchange, **options)


@pytest.mark.parametrize("exchange", ["all_gather", "group_cast"])
def test_next_heads_travel_during_attention(received, events, exchange):
    mask = BlockDiagonalMask.from_seqlens([TOKENS])
    forward(exchange, mask, make_layout("balanced", mask, RANKS), heads_k_stride=6)
    assert events == ["send", "send", "compute", "send", "compute", "compute"]


def test_ring_sends_next_block_during_attention(received, events):
    """Blocks that this rank doesn't see are only passed on: in a causal document, those of the ranks after it."""
    mask = BlockDiagonalMask.from_seqlens([TOKENS])
    forward("ring", mask, make_layout("contiguous", mask, RANKS))
    assert events == ["send", "compute"] * (RANK + 1) + ["send"] * (RANKS - 2 - RANK)

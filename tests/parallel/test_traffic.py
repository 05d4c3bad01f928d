"""How many bytes the exchanges send, and when, on one rank of a fake group of eight."""

from typing import get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.lengths import fill
from tests.parallel.fake_collectives import RANK, RANKS, fake_collectives
from tritonpack import BlockDiagonalMask
from tritonpack.parallel import attend, make_layout
from tritonpack.parallel.comm import Ranks
from tritonpack.parallel.exchanges import keys
from tritonpack.parallel.exchanges.call import Call
from tritonpack.parallel.exchanges.ulysses import divide_heads
from tritonpack.parallel.layouts import LayoutName
from tritonpack.testing.cases import parents_of

TOKENS, HEADS, HEAD_DIM, HEAD_DIM_V = 2048, 16, 8, 4


@pytest.fixture
def traffic(monkeypatch):
    with fake_collectives(monkeypatch) as traffic:
        yield traffic


def bytes_received(exchange, lengths, heads, kv_heads, dtype):
    """Bytes of each rank in forward and in backward, by the formulas of docs/sequence-parallelism.md."""
    rows, b, wide = np.array(lengths), dtype.itemsize, max(dtype.itemsize, 4)
    width, total = kv_heads * (HEAD_DIM + HEAD_DIM_V), sum(lengths)
    if exchange == "all_gather":
        numbers = np.full(RANKS, (RANKS - 1) * max(lengths) * width)
        return numbers * b, numbers * (b + wide)
    if exchange == "ring":
        numbers = (total - rows) * width
        return numbers * b, numbers * b + (total - np.roll(rows, 1)) * width * wide
    shares = divide_heads(heads, kv_heads, RANKS)
    own, keys = (np.array([span.stop - span.start for span in side]) for side in shares)
    inputs = own * HEAD_DIM + keys * (HEAD_DIM + HEAD_DIM_V)
    forward = (total - rows) * inputs + rows * (heads - own) * HEAD_DIM_V
    backward = (total - rows) * own * HEAD_DIM_V + rows * (inputs.sum() - inputs)
    return forward * b, backward * b


@pytest.mark.fast(
    "16-2-dtype0-6-balanced",
    "16-8-dtype0-6-stripe",
    "16-8-dtype1-2059-stripe",
    "16-16-dtype0-2048-zigzag",
    "16-16-dtype1-2048-stripe",
    "12-4-dtype1-6-zigzag",
    "20-10-dtype0-2059-zigzag",
    "20-10-dtype1-2059-stripe",
)
@pytest.mark.parametrize("layout", ["balanced", "stripe", "zigzag"])
@pytest.mark.parametrize("tokens", [TOKENS, TOKENS + 11, RANKS - 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 2), (16, 8), (16, 16), (12, 4), (20, 10)])
def test_bytes_received_follow_the_formulas(traffic, heads, kv_heads, dtype, tokens, layout):
    """Also if rows or heads don't divide by ranks, if ranks share key heads, or if some ranks have no row."""
    mask = BlockDiagonalMask.from_seqlens([tokens - 5, 5])
    layout = make_layout(layout, mask, RANKS)
    for exchange in ("all_gather", "ring", "ulysses"):
        forward, backward = bytes_received(exchange, layout.lengths, heads, kv_heads, dtype)
        widths = ((heads, HEAD_DIM), (kv_heads, HEAD_DIM), (kv_heads, HEAD_DIM_V))
        rows = layout.lengths[RANK]
        q, k, v = (torch.zeros(rows, *width, dtype=dtype, requires_grad=True) for width in widths)
        traffic.forget()
        out = attend(q, k, v, mask, layout, exchange=exchange)
        assert traffic.received.total() == forward[RANK]
        traffic.forget()
        out.backward(torch.zeros_like(out))
        assert traffic.received.total() == backward[RANK]


FOREST = (
    [(-1, 400), (0, 280), (0, 40), (0, 480)],
    [(-1, 200)],
    [(-1, 160), (0, 120), (1, 240), (1, 80), (0, 160)],
)
GROUP_CAST_MASKS = {
    "causal": lambda: BlockDiagonalMask.from_seqlens([1136, 1, 640, 271]),
    "windows": lambda: BlockDiagonalMask.from_seqlens([1600, 448], window=(176, 0)),
    "bidirectional": lambda: BlockDiagonalMask.from_seqlens([1600, 448], causal=False),
    "chunks": lambda: BlockDiagonalMask.from_seqlens([1600, 448], chunk_size=384),
    "trees": lambda: BlockDiagonalMask.from_tree(parents_of(*FOREST), window=(96, 0)),
    "short documents": lambda: BlockDiagonalMask.from_seqlens([64] * 32),
}


@pytest.mark.fast(
    "dtype0-causal-zigzag",
    "dtype0-windows-balanced",
    "dtype0-bidirectional-balanced",
    "dtype0-short documents-contiguous",
    "dtype1-causal-contiguous",
    "dtype1-windows-zigzag",
    "dtype1-bidirectional-stripe",
    "dtype1-short documents-documents",
)
@pytest.mark.parametrize("layout", get_args(LayoutName))
@pytest.mark.parametrize("make", GROUP_CAST_MASKS.values(), ids=GROUP_CAST_MASKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_group_cast_receives_the_keys_that_are_seen(traffic, make, layout, dtype):
    """Not one byte more: the keys that the dense mask shows to this rank's rows, and a gradient for each way back."""
    mask = make()
    layout = make_layout(layout, mask, RANKS)
    dense = mask.to_dense()
    mine = layout.rows[RANK]
    seen = dense[mine].any(0)
    seen[mine] = False
    shown = sum(int(dense[rows][:, mine].any(0).sum()) for rank, rows in enumerate(layout.rows) if rank != RANK)
    width, wide = 4 * (HEAD_DIM + HEAD_DIM_V), max(dtype.itemsize, 4)
    shapes = ((HEADS, HEAD_DIM), (4, HEAD_DIM), (4, HEAD_DIM_V))
    q, k, v = (torch.zeros(mine.shape[0], *shape, dtype=dtype, requires_grad=True) for shape in shapes)
    out = attend(q, k, v, mask, layout, exchange="group_cast")
    assert traffic.received.total() == int(seen.sum()) * width * dtype.itemsize
    traffic.forget()
    out.backward(torch.zeros_like(out))
    assert traffic.received.total() == int(seen.sum()) * width * dtype.itemsize + shown * width * wide


def keys_into_nodes(dense, layout, gpus, *, group_cast):
    """Keys that nodes of so many ranks receive in forward, and gradients of keys in backward, at least."""
    ranks, longest = layout.ranks, max(layout.lengths)
    if not group_cast:  # each key into a node once; gradients summed within nodes before they leave
        return [(ranks - gpus) * longest] * (ranks // gpus), [(ranks - gpus) * longest] * (ranks // gpus)
    node = torch.empty(layout.num_rows, dtype=torch.int64)
    for rank, rows in enumerate(layout.rows):
        node[rows] = rank // gpus
    forward, backward = torch.zeros(ranks // gpus), torch.zeros(ranks // gpus)
    for rank, rows in enumerate(layout.rows):
        seen = node[dense[rows].any(0)]
        forward[rank // gpus] += (seen != rank // gpus).sum()
        backward += torch.bincount(seen[seen != rank // gpus], minlength=ranks // gpus)
    return forward.tolist(), backward.tolist()


def drawn_masks():
    """Documents, windows, bidirectional ones and trees, from many short ones to one long one."""
    rng = np.random.default_rng(0)
    for count in (1, 5, 60):
        lengths = np.diff(np.sort(rng.integers(0, 600, count - 1)), prepend=0, append=600)
        for options in ({}, {"window": (40, 0)}, {"causal": False}):
            yield BlockDiagonalMask.from_seqlens(lengths, **options)
    yield GROUP_CAST_MASKS["trees"]().restrict(torch.arange(800), torch.arange(800))


@pytest.mark.fast("contiguous", "stripe")
@pytest.mark.parametrize("name", get_args(LayoutName))
def test_auto_receives_no_more_than_all_gather(name):
    """Neither a rank nor a node, if nodes have equally many ranks; and each of the two exchanges is chosen."""
    chosen = set()
    for mask in drawn_masks():
        dense = mask.to_dense()
        for ranks in (2, 3, 8):
            layout = make_layout(name, mask, ranks)
            few = keys.few_keys(Call(Ranks(None, 0, ranks), layout, mask, None, "reference", 1))
            chosen.add(few)
            if not few:
                continue
            assert max(layout.remote_keys(mask)) <= (ranks - 1) * max(layout.lengths)
            for gpus in [n for n in range(1, ranks) if ranks % n == 0]:
                both = (keys_into_nodes(dense, layout, gpus, group_cast=cast) for cast in (True, False))
                for ours, theirs in zip(*both, strict=True):
                    assert all(a <= b for a, b in zip(ours, theirs, strict=True))
    assert chosen == {True, False}


@pytest.mark.parametrize(
    ("lengths", "collective"), [([64] * 32, None), ([200] * 10, "all_to_all"), ([TOKENS], "all_gather")]
)
def test_auto_sends_as_the_exchange_that_it_chooses(traffic, lengths, collective):
    mask = BlockDiagonalMask.from_seqlens(lengths)
    layout = make_layout("documents", mask, RANKS)
    q, k, v = (torch.zeros(layout.lengths[RANK], HEADS, HEAD_DIM, requires_grad=True) for _ in range(3))
    attend(q, k, v, mask, layout).sum().backward()
    assert traffic.received.keys() - {"reduce_scatter"} == ({collective} if collective else set())


def test_group_cast_receives_few_bytes_for_a_million_tokens(traffic):
    """The bytes follow from the parts, for which no attention is computed."""
    lengths = fill(np.random.default_rng(0).lognormal(np.log(700), 1.0, 4096), 1 << 20)
    mask = BlockDiagonalMask.from_seqlens(lengths)
    layout = make_layout("documents", mask, RANKS)
    call = Call(Ranks(dist.group.WORLD, RANK, RANKS), layout, mask, None, "reference", 1)
    k, v = torch.zeros(layout.lengths[RANK], 1, 1, dtype=torch.uint8), torch.zeros(layout.lengths[RANK], 1, 0)
    parts = keys.divide("group_cast", call, 4)
    for part in parts:
        part.send(k, v.byte(), call.ranks)
    received = sum(sum(part.received_counts) for part in parts)
    assert len(parts) == 4
    assert traffic.received.total() == received == layout.remote_keys(mask)[RANK] <= 917_504 // 10


def test_group_cast_plans_once_for_all_layers(traffic, monkeypatch):
    made = []
    make = keys.cast_parts
    monkeypatch.setattr(keys, "cast_parts", lambda *given: made.append(given) or make(*given))
    mask = BlockDiagonalMask.from_seqlens([TOKENS])
    layout = make_layout("documents", mask, RANKS)
    q, k, v = (torch.zeros(layout.lengths[RANK], HEADS, HEAD_DIM, requires_grad=True) for _ in range(3))
    for _ in range(3):
        attend(q, k, v, mask, layout, exchange="group_cast").sum().backward()
    assert len(made) == 1

"""How many bytes the exchanges send, and when, on one rank of a fake group of eight. Nothing is sent."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.lengths import fill
from tritonpack import AllGatherWithGrad, BlockDiagonalMask
from tritonpack.parallel import Layout, attend, comm, make_layout
from tritonpack.parallel.comm import Ranks
from tritonpack.parallel.dimensions import dimensions_of
from tritonpack.parallel.exchanges import keys
from tritonpack.parallel.exchanges.call import Call
from tritonpack.parallel.exchanges.ulysses import divide_heads
from tritonpack.parallel.layouts import LayoutName

RANKS, RANK = 8, 3
TOKENS, HEADS, HEAD_DIM, HEAD_DIM_V = 2048, 16, 8, 4
KEYS = ("all_gather", "group_cast", "ring")


@dataclass
class Traffic:
    """What a rank sends and computes.

    Attributes:
        received: bytes that come from other ranks, by collective.
        of_group: the same bytes, by the name of the group.
        events: (what, number) in their order. "launch" and "wait" have the number of the collective, "compute" is a
            call of attention, forward or backward, with the number of visible pairs.
    """

    received: Counter = field(default_factory=Counter)
    of_group: Counter = field(default_factory=Counter)
    events: list[tuple[str, int]] = field(default_factory=list)

    @property
    def launches(self) -> int:
        return sum(what == "launch" for what, _ in self.events)

    def forget(self) -> None:
        self.received.clear()
        self.of_group.clear()
        self.events.clear()

    def launch(self, collective, group, received):
        """Record a collective; the result has its `wait`."""
        number = self.launches
        self.received[collective] += received
        self.of_group[group.group_name] += received
        self.events.append(("launch", number))
        return SimpleNamespace(wait=lambda *_, **__: self.events.append(("wait", number)))

    def exposed(self) -> list[int]:
        """The collectives between whose launch and wait no pair of a query and a key is computed."""
        found = []
        for number in range(self.launches):
            first, last = self.events.index(("launch", number)), self.events.index(("wait", number))
            if not any(what == "compute" and pairs for what, pairs in self.events[first:last]):
                found.append(number)
        return found


@pytest.fixture
def traffic(monkeypatch):
    """Collectives, and attention of a part, whose results are memory that nobody has written."""
    traffic = Traffic()

    def all_to_all(target, source, taken, given, group, **_):
        assert (target.shape[0], source.shape[0]) == (sum(taken), sum(given))
        row = target.itemsize * target.shape[1:].numel()
        return traffic.launch("all_to_all", group, (sum(taken) - taken[dist.get_rank(group)]) * row)

    def batch(operations):
        received = sum(one.tensor.nbytes for one in operations if one.op is dist.irecv)
        return [traffic.launch("ring", operations[0].group, received)]

    def compute(mask):
        traffic.events.append(("compute", int((mask.key_stop - mask.key_start).sum())))

    def forward(_, q, k, v, mask, *heads):
        compute(mask)
        return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(
            q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32)
        )

    def backward(_, dout, q, k, v, out, lse, mask, *heads):
        compute(mask)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    for name, fake in {
        "_all_gather": lambda x, y, group, **_: traffic.launch("all_gather", group, x.nbytes - y.nbytes),
        "_reduce_scatter": lambda x, y, group, **_: traffic.launch("reduce_scatter", group, y.nbytes - x.nbytes),
    }.items():
        monkeypatch.setattr(comm, name, fake)
    monkeypatch.setattr(Call, "forward", forward)
    monkeypatch.setattr(Call, "backward", backward)
    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    monkeypatch.setattr(dist, "batch_isend_irecv", batch)
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    yield traffic
    dist.destroy_process_group()


def run(traffic, mask, layout, exchange, heads, kv_heads, dtype=torch.float32, group=None):
    """Yields after forward, and again after backward, with the traffic of each alone."""
    shapes = ((heads, HEAD_DIM), (kv_heads, HEAD_DIM), (kv_heads, HEAD_DIM_V))
    q, k, v = (torch.zeros(layout.lengths[RANK], *one, dtype=dtype, requires_grad=True) for one in shapes)
    traffic.forget()
    out = attend(q, k, v, mask, layout, group, exchange=exchange)
    yield "forward"
    traffic.forget()
    out.backward(torch.zeros_like(out))
    yield "backward"


def bytes_of_heads(lengths, place, heads, kv_heads, dtype):
    """Forward and backward, along the dimension that divides heads among ranks with rows of these lengths."""
    rows, others, b = lengths[place], sum(lengths) - lengths[place], dtype.itemsize
    shares = divide_heads(heads, kv_heads, len(lengths))
    own, used = (np.array([one.stop - one.start for one in side]) for side in shares)
    inputs = own * HEAD_DIM + used * (HEAD_DIM + HEAD_DIM_V)
    forward = others * inputs[place] + rows * (heads - own[place]) * HEAD_DIM_V
    backward = others * own[place] * HEAD_DIM_V + rows * (inputs.sum() - inputs[place])
    return forward * b, backward * b


def bytes_of_keys(exchange, mask, layout, place, kv_heads, dtype):
    """Forward and backward, along the dimension in which `kv_heads` travel between ranks with the rows of a layout."""
    b, wide, width, lengths = dtype.itemsize, max(dtype.itemsize, 4), kv_heads * (HEAD_DIM + HEAD_DIM_V), layout.lengths
    if exchange == "all_gather":
        there = back = (len(lengths) - 1) * max(lengths)
    elif exchange == "ring":
        there, back = sum(lengths) - lengths[place], sum(lengths) - lengths[place - 1]
    else:  # the keys that the dense mask shows to the rows, and a gradient for each way back
        dense, mine = mask.to_dense(), layout.rows[place]
        seen = dense[mine].any(0)
        seen[mine] = False
        there = int(seen.sum())
        back = sum(int(dense[rows][:, mine].any(0).sum()) for rank, rows in enumerate(layout.rows) if rank != place)
    return there * width * b, there * width * b + back * width * wide


def of(lengths, **options):
    return BlockDiagonalMask.from_seqlens(lengths, **options)


MASKS = {
    "causal": of([1136, 1, 640, 271]),
    "windows": of([1600, 448], window=(176, 0)),
    "bidirectional": of([1600, 448], causal=False),
    "chunks": of([1600, 448], chunk_size=384),
    "short documents": of([64] * 32),
}


def check_bytes(traffic, exchange, mask, layout, heads, kv_heads, shape=None, along=1):
    """What a rank receives along each dimension equals the bound of the sets, and not one byte more.

    `shape` is that of a mesh, of which ranks along the dimension `along` divide heads; None for one dimension.
    """
    dtype = torch.bfloat16 if heads == 16 else torch.float64
    layout, pair, group = make_layout(layout, mask, RANKS), exchange, None
    names = [dist.group.WORLD.group_name] * 2
    ranks = np.arange(RANKS)[None] if exchange == "ulysses" else np.arange(RANKS)[:, None]
    if shape is not None:
        group = init_device_mesh("cpu", shape, mesh_dim_names=("first", "second"))
        names = [group.get_group(dimension).group_name for dimension in (along, 1 - along)]
        ranks = np.moveaxis(np.arange(RANKS).reshape(shape), along, -1)
        pair = (exchange, "ulysses") if along else ("ulysses", exchange)
    ((place, own),) = np.argwhere(ranks == RANK)
    sets = Layout(tuple(torch.cat([layout.rows[one] for one in some]).sort().values for some in ranks))
    used = divide_heads(heads, kv_heads, ranks.shape[1])[1][own]
    of_heads = bytes_of_heads([layout.lengths[one] for one in ranks[place]], own, heads, kv_heads, dtype)
    of_keys = bytes_of_keys(exchange, mask, sets, place, used.stop - used.start, dtype)
    for number, _ in enumerate(run(traffic, mask, layout, pair, heads, kv_heads, dtype, group)):
        expected = Counter()
        for name, both in zip(names, (of_heads, of_keys), strict=True):
            expected[name] += both[number]
        assert +traffic.of_group == +expected


@pytest.mark.parametrize("tokens", [TOKENS + 11, RANKS - 2])
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 2), (16, 16), (12, 4), (20, 10)])
@pytest.mark.parametrize("exchange", [*KEYS, "ulysses"])
def test_bytes_received(traffic, exchange, heads, kv_heads, tokens):
    """Also if rows or heads don't divide by ranks, if ranks share key heads, or if some ranks have no row."""
    check_bytes(traffic, exchange, of([tokens - 5, 5]), "zigzag" if heads == 12 else "stripe", heads, kv_heads)


@pytest.mark.parametrize("layout", get_args(LayoutName))
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_group_cast_receives_the_keys_that_are_seen(traffic, mask, layout):
    check_bytes(traffic, "group_cast", mask, layout, HEADS, 4)


@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 2), (16, 8), (13, 13)])
@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (1, 8), (8, 1)])  # nothing travels along a dimension of one rank
@pytest.mark.parametrize("along", [0, 1])
def test_bytes_along_each_dimension(traffic, along, shape, heads, kv_heads):
    for exchange in KEYS:
        check_bytes(traffic, exchange, of([89, 50], window=(40, 0)), "zigzag", heads, kv_heads, shape, along)


@pytest.mark.parametrize(
    ("lengths", "collective"), [([64] * 32, None), ([200] * 10, "all_to_all"), ([TOKENS], "all_gather")]
)
def test_auto_sends_as_the_exchange_that_it_chooses(traffic, lengths, collective):
    mask = of(lengths)
    for _ in run(traffic, mask, make_layout("documents", mask, RANKS), "auto", HEADS, HEADS):
        assert traffic.received.keys() - {"reduce_scatter"} == ({collective} if collective else set())


def test_group_cast_plans_once_for_all_layers(traffic, monkeypatch):
    """And receives few bytes for a million tokens."""
    mask = of(fill(np.random.default_rng(0).lognormal(np.log(700), 1.0, 4096), 1 << 20))
    made, make = [], keys.CastKeys.of
    monkeypatch.setattr(keys.CastKeys, "of", lambda *given: made.append(make(*given)) or made[-1])
    layout = make_layout("documents", mask, RANKS)
    for _ in range(3):
        next(run(traffic, mask, layout, "group_cast", 1, 1, torch.bfloat16))
    (part,) = made
    received = sum(part.received_counts)
    assert received == layout.remote_keys(mask)[RANK] <= 917_504 // 10
    assert traffic.received.total() == received * (HEAD_DIM + HEAD_DIM_V) * 2


OVERLAP = {  # exchange, layout, heads, key heads, launches, exposed; in forward and in backward
    "all_gather": ("all_gather", "documents", 16, 8, (4, 8), ([], [])),
    "all_gather, one key head": ("all_gather", "contiguous", 16, 1, (1, 2), ([], [])),
    "group_cast": ("group_cast", "documents", 16, 8, (4, 8), ([], [])),
    "ring": ("ring", "zigzag", 16, 8, (7, 14), ([], [])),
    # Blocks of later ranks, which no query of this one sees, and their gradients are only passed on.
    "ring, contiguous": ("ring", "contiguous", 16, 8, (7, 14), ([4, 5, 6], [6, 7, 8, 9, 10, 11, 12])),
}


@pytest.mark.parametrize("case", OVERLAP.values(), ids=OVERLAP)
def test_attention_is_computed_between_launch_and_wait(traffic, case):
    """A rank holds the keys of one step beside those that travel, and the gradients of one step beside those."""
    exchange, layout, heads, kv_heads, launches, exposed = case
    mask = of([TOKENS])
    for number, _ in enumerate(run(traffic, mask, make_layout(layout, mask, RANKS), exchange, heads, kv_heads)):
        assert traffic.launches == launches[number]
        for one in range(traffic.launches):  # each is waited for once, after its launch
            assert [what for what, n in traffic.events if n == one and what != "compute"] == ["launch", "wait"]
        assert traffic.exposed() == exposed[number]
        travelling = np.cumsum([{"launch": 1, "wait": -1}.get(what, 0) for what, _ in traffic.events])
        assert exchange == "ring" or travelling.max() <= 2


def test_without_a_group():
    with pytest.raises(ValueError, match=r"no process group; call torch.distributed.init_process_group"):
        AllGatherWithGrad()


@pytest.mark.parametrize("name", get_args(LayoutName))
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2), st.sets(st.integers(1, 31), max_size=4))
def test_every_rank_of_a_mesh_gets_rows(name, first, second, more, cuts):
    """Of batches with two rows for each rank, the shortest that SequenceParallel shares. Sets own runs together."""
    tokens = 2 * first * second + more
    mask = of([b - a for a, b in pairwise([0, *sorted(cut for cut in cuts if cut < tokens), tokens])])
    ranks = Ranks(None, 0, first * second, (Ranks(None, 0, first), Ranks(None, 0, second)))
    for pair in (("ring", "ulysses"), ("ulysses", "ring")):
        dimensions, numbers = dimensions_of(ranks, pair), np.arange(first * second).reshape(first, second)
        assert np.array_equal(dimensions.owners, numbers if pair[1] == "ulysses" else numbers.T)
        layout = dimensions.make_layout(name, [mask])
        assert min(layout.lengths) > 0
        assert max(layout.lengths) - min(layout.lengths) <= 2
        whole = make_layout(name, mask, len(dimensions.owners)).rows
        for owners, rows in zip(dimensions.owners, whole, strict=True):  # sets own the rows of a layout for sets
            assert torch.cat([layout.rows[rank] for rank in owners]).tolist() == rows.tolist()

"""Attention is computed while keys, values and gradients travel: a trace of launches and waits on one rank of eight.

A collective is exposed if no pair of a query and a key is computed between its launch and its wait.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.parallel.fake_collectives import RANK, RANKS, fake_collectives
from tritonpack import BlockDiagonalMask
from tritonpack.parallel import attend, make_layout

TOKENS = 4096


@dataclass(frozen=True)
class Case:
    """One call of `attend`.

    Attributes:
        launches: how many collectives there are in forward and in backward.
        exposed: which of them are exposed, in forward and in backward; -1 is the last.
    """

    exchange: str
    heads: int
    kv_heads: int
    launches: tuple[int, int]
    exposed: tuple[list[int], list[int]] = ([], [])
    layout: str = "balanced"
    options: dict[str, Any] = field(default_factory=dict)
    mask: dict[str, Any] = field(default_factory=dict)


CASES = {
    "all_gather": Case("all_gather", 16, 8, (4, 8)),
    "all_gather, two key heads": Case("all_gather", 16, 2, (4, 8)),
    "all_gather, contiguous": Case("all_gather", 16, 8, (4, 8), layout="contiguous"),
    "all_gather, one key head": Case("all_gather", 16, 1, (4, 8)),
    "all_gather, 6 heads per step": Case("all_gather", 16, 16, (3, 6), options={"heads_k_stride": 6}),
    "all_gather, all heads in a step": Case("all_gather", 16, 4, (4, 8), options={"heads_k_stride": 4}),
    "all_gather, windows": Case("all_gather", 16, 8, (4, 8), mask={"window": (1000, 0)}),
    "all_gather, alibi": Case("all_gather", 16, 8, (4, 8), options={"alibi_slopes": torch.ones(16)}),
    "group_cast": Case("group_cast", 16, 8, (4, 8)),
    "group_cast, documents": Case("group_cast", 16, 8, (4, 8), layout="documents"),
    "group_cast, one key head": Case("group_cast", 16, 1, (4, 8)),
    "group_cast, alibi": Case("group_cast", 16, 8, (4, 8), options={"alibi_slopes": torch.ones(16)}),
    "group_cast, alibi, one key head": Case("group_cast", 16, 1, (4, 8), options={"alibi_slopes": torch.ones(16)}),
    "ring": Case("ring", 16, 8, (7, 14)),
    "ring, one key head": Case("ring", 16, 1, (7, 14)),
    "ring, zigzag": Case("ring", 16, 8, (7, 14), layout="zigzag"),
    "ring, stripe": Case("ring", 16, 8, (7, 14), layout="stripe"),
    # Blocks of later ranks, which no query of this one sees, and their gradients are only passed on.
    "ring, contiguous": Case("ring", 16, 8, (7, 14), ([4, 5, 6], [6, 7, 8, 9, 10, 11, 12]), layout="contiguous"),
    "ulysses, four heads per rank": Case("ulysses", 32, 8, (8, 8)),
    "ulysses, two heads per rank": Case("ulysses", 16, 8, (4, 4)),
    "ulysses, one key head": Case("ulysses", 32, 1, (8, 8)),
    "ulysses, heads that ranks can't divide": Case("ulysses", 20, 10, (4, 4)),
    # One head can't be divided.
    "ulysses, one head per rank": Case("ulysses", 8, 8, (2, 2)),
}


@pytest.fixture
def traffic(monkeypatch):
    with fake_collectives(monkeypatch) as traffic:
        yield traffic


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_is_computed_between_launch_and_wait(traffic, case):
    mask = BlockDiagonalMask.from_seqlens([TOKENS], **case.mask)
    layout = make_layout(case.layout, mask, RANKS)
    shapes = ((case.heads, 8), (case.kv_heads, 8), (case.kv_heads, 4))
    q, k, v = (torch.zeros(layout.lengths[RANK], *shape, requires_grad=True) for shape in shapes)
    out = attend(q, k, v, mask, layout, exchange=case.exchange, **case.options)
    check(traffic, case.launches[0], case.exposed[0])
    traffic.forget()
    out.backward(torch.zeros_like(out))
    check(traffic, case.launches[1], case.exposed[1])


def check(traffic, launches, exposed):
    assert traffic.launches == launches
    for number in range(launches):  # each is waited for once, after its launch
        assert [what for what, n in traffic.events if n == number and what != "compute"] == ["launch", "wait"]
    assert traffic.exposed() == sorted(number % launches for number in exposed)


@pytest.mark.parametrize("exchange", ["all_gather", "group_cast"])
@pytest.mark.parametrize("kv_heads", [1, 8])
def test_two_messages_travel_at_a_time(traffic, exchange, kv_heads):
    """A rank holds the keys of one step beside those that travel, and the gradients of one step beside those."""
    mask = BlockDiagonalMask.from_seqlens([TOKENS])
    layout = make_layout("balanced", mask, RANKS)
    q, k, v = (torch.zeros(layout.lengths[RANK], n, 8, requires_grad=True) for n in (8, kv_heads, kv_heads))
    out = attend(q, k, v, mask, layout, exchange=exchange)
    assert [what for what, _ in traffic.events] == [
        "launch", "compute", *["wait", "launch", "compute"] * 3, "wait", "compute",
    ]  # fmt: skip
    traffic.forget()
    out.backward(torch.zeros_like(out))
    travelling = 0
    for what, _ in traffic.events:
        travelling += {"launch": 1, "wait": -1}.get(what, 0)
        assert travelling <= 2


def test_whole_documents_need_one_call_of_attention(traffic):
    mask = BlockDiagonalMask.from_seqlens([256] * RANKS)
    layout = make_layout("documents", mask, RANKS)
    q, k, v = (torch.zeros(layout.lengths[RANK], 8, 8, requires_grad=True) for _ in range(3))
    attend(q, k, v, mask, layout, exchange="group_cast").sum().backward()
    assert [what for what, _ in traffic.events] == ["compute", "compute"]


@pytest.mark.parametrize(
    ("layout", "lengths", "least", "most"),
    [("balanced", [TOKENS], 0.9 / RANKS, 1.2 / RANKS), ("documents", [50] * 80 + [96], 0.9, 1.0)],
)
def test_own_keys_are_computed_while_the_first_keys_travel(traffic, layout, lengths, least, most):
    mask = BlockDiagonalMask.from_seqlens(lengths)
    layout = make_layout(layout, mask, RANKS)
    q, k, v = (torch.zeros(layout.lengths[RANK], n, 8, requires_grad=True) for n in (8, 1, 1))
    out = attend(q, k, v, mask, layout, exchange="group_cast")
    pairs = [number for what, number in traffic.events if what == "compute"]
    assert least <= pairs[0] / sum(pairs) <= most
    traffic.forget()
    out.backward(torch.zeros_like(out))
    again = [number for what, number in traffic.events if what == "compute"]
    assert again[0] + again[-1] == pairs[0]
    assert again[1:-1] == pairs[1:]


@pytest.mark.parametrize("exchange", ["all_gather", "group_cast", "ring"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (4, 4), (8, 1)])
def test_nothing_is_exposed_on_two_dimensions(traffic, exchange, heads, kv_heads):
    """Within a node as with "ulysses", across nodes as with the other exchange."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("across", "within"))
    mask = BlockDiagonalMask.from_seqlens([TOKENS])
    layout = make_layout("balanced", mask, 2).divide(4)
    shapes = ((heads, 8), (kv_heads, 8), (kv_heads, 4))
    q, k, v = (torch.zeros(layout.lengths[RANK], *shape, requires_grad=True) for shape in shapes)
    out = attend(q, k, v, mask, layout, mesh, exchange=(exchange, "ulysses"))
    assert traffic.launches
    assert traffic.exposed() == []
    traffic.forget()
    out.backward(torch.zeros_like(out))
    assert traffic.launches
    assert traffic.exposed() == []


def test_ulysses_exposes_one_message_if_no_document_is_cut(traffic):
    """Own tokens see no key of others, so nothing is left while the last outputs travel, or the first gradients."""
    mask = BlockDiagonalMask.from_seqlens([256] * RANKS)
    layout = make_layout("contiguous", mask, RANKS)
    q, k, v = (torch.zeros(256, 16, 8, requires_grad=True) for _ in range(3))
    out = attend(q, k, v, mask, layout, exchange="ulysses")
    assert (traffic.launches, traffic.exposed()) == (4, [3])
    traffic.forget()
    out.backward(torch.zeros_like(out))
    assert (traffic.launches, traffic.exposed()) == (4, [0])


@pytest.mark.parametrize("heads", [8, 16])
def test_ulysses_computes_each_pair_once(traffic, heads):
    """Own rows with own keys first, with those of others last; in backward the other way round."""
    mask = BlockDiagonalMask.from_seqlens([TOKENS])
    layout = make_layout("contiguous", mask, RANKS)
    own = TOKENS // RANKS
    q, k, v = (torch.zeros(own, heads, 8, requires_grad=True) for _ in range(3))
    out = attend(q, k, v, mask, layout, exchange="ulysses")
    pairs = {"own": own * (own + 1) // 2, "near": own * own * RANK}
    pairs["others"] = TOKENS * (TOKENS + 1) // 2 - pairs["own"] - pairs["near"]
    chunks = heads // RANKS
    assert [n for what, n in traffic.events if what == "compute"] == [
        pairs["own"], *[pairs["others"], pairs["near"]] * chunks,
    ]  # fmt: skip
    traffic.forget()
    out.backward(torch.zeros_like(out))
    assert [n for what, n in traffic.events if what == "compute"] == [
        *[pairs["near"], pairs["others"]] * chunks, pairs["own"],
    ]  # fmt: skip

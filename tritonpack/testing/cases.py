"""Attention cases, small and named: odd lengths, empty documents, slack, windows, trees, grouped heads, sinks, ..."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from tritonpack.checks import Window
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.masks.tree import ROOT, SLACK


@dataclass(frozen=True)
class Case:
    """One attention problem.

    Attributes:
        name: the name of its feature, for test ids.
        seqlens, seqlens_k: tokens per document or tree; None on the key side means the same lengths.
        slack: rows past the last document, on both sides.
        heads, kv_heads, head_dim, head_dim_v: the shape of q, k and v; None means that v has q's head dimension.
        causal, window: as `BlockDiagonalMask.from_cu_seqlens` takes them.
        scale, softcap, dropout_p: as `varlen_attention` takes them.
        sinks, alibi: whether attention has sinks, and ALiBi slopes per head or per document and head.
        parents: of each token of the trees, as `BlockDiagonalMask.from_tree` takes them; None for documents.
    """

    name: str
    seqlens: tuple[int, ...]
    seqlens_k: tuple[int, ...] | None = None
    slack: int = 0
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    causal: bool = True
    window: Window = (-1, -1)
    head_dim_v: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    alibi: Literal["heads", "documents"] | None = None
    dropout_p: float = 0.0
    parents: tuple[int, ...] | None = None
    scale: float | None = None

    def __str__(self) -> str:
        return self.name

    def mask(self, device: torch.device | str = "cpu") -> BlockDiagonalMask:
        if self.parents is not None:
            parents = torch.tensor(self.parents + (SLACK,) * self.slack, dtype=torch.int32, device=device)
            return BlockDiagonalMask.from_tree(parents, window=self.window)
        sides = self.seqlens, self.seqlens_k or self.seqlens
        offsets = (torch.tensor([0, *lengths], device="cpu").cumsum(0).to(device, torch.int32) for lengths in sides)
        total_q, total_k = (sum(lengths) + self.slack for lengths in sides)
        return BlockDiagonalMask.from_cu_seqlens(
            *offsets, causal=self.causal, window=self.window, total_q=total_q, total_k=total_k
        )


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case.

    Attributes:
        q, k, v: (T_q, H, D), (T_k, H_kv, D), (T_k, H_kv, D_v).
        dout, dlse: the gradients of out (T_q, H, D_v) and of lse (H, T_q).
        mask: which keys each query sees.
        sinks: (H,), or None.
        keywords: further arguments of `varlen_attention`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    mask: BlockDiagonalMask
    sinks: Tensor | None = None
    keywords: dict[str, Any] = field(default_factory=dict)


Nodes = Sequence[tuple[int, int]]  # (number of the parent node or -1, tokens), each node after its parent


def parents_of(*trees: Nodes) -> tuple[int, ...]:
    """The parent of each token of trees, given by their nodes in depth-first order.

    >>> parents_of([(-1, 2), (0, 2), (0, 1)], [(-1, 1)])  # a prompt of 2 tokens with 2 completions; another root
    (-1, 0, 1, 2, 1, -1)
    """
    parents: list[int] = []
    for nodes in trees:
        last_tokens = [ROOT]  # of nodes, one later than their numbers, so that -1 + 1 is the root's
        for parent, tokens in nodes:
            first = len(parents)
            parents += [last_tokens[parent + 1], *range(first, first + tokens - 1)][:tokens]
            last_tokens.append(len(parents) - 1)
    return tuple(parents)


def tree_case(name: str, *trees: Nodes, **fields: Any) -> Case:
    """A case of trees, given by their nodes in depth-first order."""
    seqlens = tuple(sum(tokens for _, tokens in nodes) for nodes in trees)
    return Case(name, seqlens, parents=parents_of(*trees), **fields)


ODD = (1, 63, 0, 111, 64, 65)

GROUP = [(-1, 40), (0, 33), (0, 1), (0, 20)]  # a prompt and its completions
TURNS = [(-1, 20), (0, 33), (1, 9), (1, 20), (0, 7), (4, 5), (4, 18)]  # branches of branches
BUSH = [(-1, 3), *((0, 1 + n % 5) for n in range(16))]
TREES = (
    tree_case("tree", GROUP),
    tree_case("tree-forest", [(-1, 90)], TURNS, [(-1, 1)], GROUP, slack=19),
    tree_case("tree-bushes", BUSH, BUSH, [(-1, 1), *((n, 1) for n in range(9))]),
    tree_case("tree-window-sinks", TURNS, window=(30, 0), sinks=True, kv_heads=1),
    tree_case("tree-alibi", TURNS, GROUP, alibi="documents"),
    tree_case("tree-dropout", TURNS, dropout_p=0.2, softcap=5.0),
    tree_case("tree-group-of-three", GROUP, heads=6),
    tree_case("tree-head-dim-96-16", GROUP, head_dim=96, head_dim_v=16, heads=2, kv_heads=1),
    tree_case("tree-head-dim-512", TURNS, head_dim=512, heads=2, kv_heads=1),
    tree_case("tree-everything", TURNS, BUSH, softcap=5.0, sinks=True, alibi="heads", dropout_p=0.1, window=(25, 0)),
)


def _wide(head_dim: int, seqlens: tuple[int, ...], head_dim_v: int | None = None) -> Case:
    name = f"head-dim-{head_dim}" + (f"-{head_dim_v}" if head_dim_v else "")
    return Case(name, seqlens, head_dim=head_dim, head_dim_v=head_dim_v, heads=2, kv_heads=1)


CASES = (
    Case("causal", ODD),
    Case("bidirectional", ODD, causal=False),
    Case("slack", (5, 0, 70), slack=23),
    Case("one-token-documents", (1,) * 40),
    Case("tiny-documents", (3, 7, 2, 20, 1, 5, 9, 33, 4) * 2),
    Case("one-document", (200,)),
    Case("multi-head", (0, 50, 81), kv_heads=4),
    Case("multi-query", (0, 50, 81), kv_heads=1),
    Case("group-of-three", (0, 50, 81), heads=6),
    Case("window-left-16", (0, 130, 20), window=(16, 0)),
    Case("window-self", (0, 70, 20), window=(0, 0)),
    Case("window-both", (0, 130, 20), window=(9, 4), causal=False),
    Case("window-right-open", (0, 100, 20), window=(5, -1), causal=False),
    Case("cross", (0, 40, 30, 64), (10, 70, 0, 64)),
    Case("cross-bidirectional", (7, 40, 30), (0, 70, 90), causal=False),
    Case("cross-more-queries", (90, 12), (40, 12)),
    Case("cross-window-slack", (33, 50), (60, 20), window=(12, 3), causal=False, slack=9),
    *(Case(f"head-dim-{d}", (0, 40, 33), head_dim=d) for d in (16, 20)),
    Case("head-dim-64", (0, 90, 40), head_dim=64),
    *(_wide(d, (0, 40, 33)) for d in (80, 96, 111, 160, 224, 320)),
    *(_wide(d, (0, 70, 33)) for d in (128, 256, 512)),
    *(_wide(d, (0, 40, 33), d_v) for d, d_v in ((192, 128), (512, 64), (64, 512))),
    *(Case(f"head-dim-{d}-{d_v}", (0, 40, 33), head_dim=d, head_dim_v=d_v) for d, d_v in ((24, 12), (16, 80))),
    Case("nothing-visible", (0, 0), slack=20),
    Case("nothing-visible-sinks", (0, 0), slack=20, sinks=True),
    Case("softcap", (0, 70, 33, 1), softcap=1.5),
    Case("softcap-window", (0, 70, 33), softcap=30.0, window=(9, 4), causal=False),
    Case("sinks", ODD, sinks=True, slack=7),
    Case("sinks-window", (0, 70, 33), sinks=True, window=(16, 0), kv_heads=4),
    Case("sinks-cross", (90, 12, 5), (40, 0, 8), sinks=True),
    Case("alibi", (0, 70, 33, 1), alibi="heads"),
    Case("alibi-documents", (9, 0, 70, 33, 1), alibi="documents", slack=5),
    Case("alibi-cross", (33, 0, 90), (60, 5, 40), alibi="documents", causal=False),
    Case("alibi-window-slack", (0, 70, 33), alibi="heads", window=(20, 20), causal=False, slack=7),
    Case("dropout", (0, 70, 33, 1), dropout_p=0.3, slack=7),
    Case("dropout-bidirectional", (0, 70, 33), dropout_p=0.17, causal=False, kv_heads=4),
    Case("everything", (30, 0, 64, 1), softcap=5.0, sinks=True, alibi="documents", dropout_p=0.1, window=(40, 0),
         head_dim_v=48),
    *TREES,
)  # fmt: skip


def make_inputs(
    case: Case, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", *, seed: int = 0,
    slack_value: float = 0.0,
) -> Inputs:  # fmt: skip
    """Return random inputs for a case, the same for every dtype up to rounding.

    Args:
        case: the problem.
        dtype, device: of q, k, v and dout. dlse is float32, or float64 if they are float64.
        seed: of the random numbers.
        slack_value: in rows outside every document; with NaN, a value that they reach becomes NaN.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    total_q, total_k = sum(case.seqlens) + case.slack, sum(case.seqlens_k or case.seqlens) + case.slack
    head_dim_v, wide = case.head_dim_v or case.head_dim, torch.promote_types(dtype, torch.float32)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

    q = draw(total_q, case.heads, case.head_dim)
    k, v = (draw(total_k, case.kv_heads, width) for width in (case.head_dim, head_dim_v))
    dout, dlse = draw(total_q, case.heads, head_dim_v), draw(case.heads, total_q)
    for rows in (q, k, v, dout, dlse.T):
        rows[rows.shape[0] - case.slack :] = slack_value
    q, k, v, dout = (x.to(device=device, dtype=dtype) for x in (q, k, v, dout))
    sinks = draw(case.heads).to(device=device, dtype=wide) if case.sinks else None
    seed = seed + 2**40 if case.dropout_p else 0
    options = {"scale": case.scale, "softcap": case.softcap, "dropout_p": case.dropout_p, "dropout_seed": seed}
    keywords: dict[str, Any] = {name: value for name, value in options.items() if value}
    if case.alibi:
        shape = (case.heads,) if case.alibi == "heads" else (len(case.seqlens), case.heads)
        keywords["alibi_slopes"] = draw(*shape).abs().div(8).to(device=device, dtype=torch.float32)
    return Inputs(q, k, v, dout, dlse.to(device=device, dtype=wide), case.mask(device), sinks, keywords)

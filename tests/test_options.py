"""ALiBi's slopes in the precision of the inputs, and distances of some rows and some keys."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.masks.random_masks import distances
from tritonpack import BlockDiagonalMask, varlen_attention
from tritonpack.testing import CASES, check_backend, make_inputs

LENGTHS = [40, 0, 90, 7]
HEADS = 3


def by_hand(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention with ALiBi, document by document, in the precision of the inputs."""
    outs, lses = [], []
    for number, (queries, keys, values) in enumerate(zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True)):
        places = torch.arange(len(queries), dtype=q.dtype)
        slope = slopes[number] if slopes.ndim == 2 else slopes
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / math.sqrt(q.shape[2])
        scores = scores - slope.to(q.dtype)[:, None, None] * (places[:, None] - places).abs()
        scores = scores.masked_fill(places > places[:, None], -math.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.parametrize("backend", ["blocked", "reference"])
@pytest.mark.parametrize("of", ["heads", "documents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_alibi_in_float64_precision(backend: Any, of: str, dtype: torch.dtype) -> None:
    """The slopes aren't powers of two, so their products with distances need more than 24 bits."""
    slopes = torch.rand(*([len(LENGTHS)] if of == "documents" else []), HEADS, dtype=dtype) + 0.1
    q, k, v = torch.randn(3, sum(LENGTHS), HEADS, 16, dtype=torch.float64, requires_grad=True).unbind()
    mask = BlockDiagonalMask.from_seqlens(LENGTHS)
    found = varlen_attention(q, k, v, mask, alibi_slopes=slopes, return_lse=True, backend=backend)
    expected = by_hand(q, k, v, slopes)
    weights = [torch.randn_like(x) for x in expected]
    pairs = [(*found, *torch.autograd.grad(found, (q, k, v), weights, retain_graph=True))]
    pairs.append((*expected, *torch.autograd.grad(expected, (q, k, v), weights)))
    for ours, right in zip(*pairs, strict=True):
        assert (ours - right).abs().max() <= 1e3 * torch.finfo(torch.float64).eps * right.abs().max()


@pytest.mark.parametrize("backend", ["blocked", "reference", pytest.param("triton", marks=pytest.mark.interpreter)])
@pytest.mark.parametrize("name", ["alibi-documents", "alibi-cross", "tree-alibi"])
def test_alibi_of_some_rows_and_some_keys(name: str, backend: Any) -> None:
    """A restricted mask, and a part of it, count distances in the whole batch."""
    inputs = make_inputs(next(case for case in CASES if case.name == name))
    draw = torch.Generator().manual_seed(0)
    rows, keys = (
        torch.rand(size, generator=draw).argsort()[: 2 * size // 3].sort().values
        for size in (inputs.mask.num_queries, inputs.mask.num_keys)
    )
    mask = inputs.mask.restrict(rows).restrict(None, keys)
    expected = distances(inputs.mask)[rows][:, keys]
    assert torch.equal(distances(mask), expected)
    assert torch.equal(distances(mask.restrict(None, torch.arange(5, 40))), expected[:, 5:40])
    part = replace(
        inputs, q=inputs.q[rows], k=inputs.k[keys], v=inputs.v[keys], dout=inputs.dout[rows], dlse=inputs.dlse[:, rows],
        mask=mask,
    )  # fmt: skip
    check_backend(part, backend)

"""Exchange by all-to-all (Ulysses): each rank computes some heads over all rows of the batch, or of its set of ranks.

Rank r of R computes the heads from H r / R to H (r + 1) / R with the mask of the whole batch, so the layout doesn't
change its work. It receives the key heads that these heads use. If several ranks use a key head, each gets a copy, and
its gradients are summed. If H isn't a multiple of R, some ranks compute one head more than others.

Source: Jacobs et al., DeepSpeed Ulysses (arXiv:2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tritonpack.options import AttentionOptions
from tritonpack.parallel.comm import Arrival, Ranks, all_to_all, wide
from tritonpack.parallel.exchanges.call import of_heads
from tritonpack.parallel.layouts import Layout

Spans = tuple[slice, ...]  # for each rank the heads that it computes, or the key heads that these use


def divide_heads(heads: int, kv_heads: int, ranks: int) -> tuple[Spans, Spans]:
    """For each rank its query heads, at least one, and the key heads that they use."""
    group = heads // kv_heads
    own = tuple(slice(heads * rank // ranks, heads * (rank + 1) // ranks) for rank in range(ranks))
    return own, tuple(slice(span.start // group, (span.stop - 1) // group + 1) for span in own)


def attend_to_heads(
    attention: Callable[[Tensor, Tensor, Tensor, AttentionOptions], Tensor], ranks: Ranks, layout: Layout, q: Tensor,
    k: Tensor, v: Tensor, options: AttentionOptions,
) -> Tensor:  # fmt: skip
    """out (n, H, D_v) of the own rows by ranks that divide heads, differentiable.

    Args:
        attention: (q, k, v, options) -> out, of all rows and some heads.
        ranks: the ranks that divide heads.
        layout: which of their rows each of them owns.
        q, k, v: of the own rows.
        options: of all heads.
    """
    queries, keys = divide_heads(q.shape[1], k.shape[1], ranks.size)
    group, own, first = q.shape[1] // k.shape[1], queries[ranks.rank], keys[ranks.rank].start
    q, k, v = _Trade.apply(ranks, layout, (queries, keys, keys), True, q, k, v)
    if k.shape[1] > 1 and (own.start % group or own.stop % group):  # each query head gets a key head of its own
        places = torch.arange(own.start, own.stop, device=k.device) // group - first
        k, v = k[:, places], v[:, places]
    return _Trade.apply(ranks, layout, (queries,), False, attention(q, k, v, of_heads(options, own)))[0]


def to_heads(ranks: Ranks, layout: Layout, spans: Spans, x: Tensor) -> Arrival:
    """Start to trade (own rows, all heads, D) for (all rows, own heads, D)."""
    own, dim = spans[ranks.rank], x.shape[2]
    pieces = [x[:, span].flatten() for span in spans]
    received = [rows * (own.stop - own.start) * dim for rows in layout.lengths]
    coming = all_to_all(torch.cat(pieces), list(map(len, pieces)), received, ranks)
    return lambda: layout.unshard(coming().view(layout.num_rows, own.stop - own.start, dim))


def to_rows(ranks: Ranks, layout: Layout, spans: Spans, x: Tensor) -> Arrival:
    """Start to trade (all rows, own heads, D) for (own rows, all heads, D). Copies of a head are summed in order of
    ranks."""
    rows, (_, heads, dim) = layout.lengths[ranks.rank], x.shape
    sent = [n * heads * dim for n in layout.lengths]
    received = [rows * (span.stop - span.start) * dim for span in spans]
    coming = all_to_all(x.index_select(0, torch.cat(layout.rows)).flatten(), sent, received, ranks)

    def arrive() -> Tensor:
        total = x.new_zeros(rows, spans[-1].stop, dim, dtype=wide(x.dtype))
        for span, part in zip(spans, coming().split(received), strict=True):
            total[:, span] += part.view(rows, span.stop - span.start, dim)
        return total.to(x.dtype)

    return arrive


class _Trade(torch.autograd.Function):
    """(ranks, layout, the spans of each tensor, there, *tensors) -> the tensors `there`, of own heads, or back, of own
    rows. Gradients take the opposite direction."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        ctx.arguments = given[:4]
        return _trade(*given)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ranks, layout, spans, there = ctx.arguments
        return None, None, None, None, *_trade(ranks, layout, spans, not there, *gradients)


def _trade(ranks: Ranks, layout: Layout, spans: tuple[Spans, ...], there: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    start = to_heads if there else to_rows
    coming = [start(ranks, layout, *one) for one in zip(spans, tensors, strict=True)]
    return tuple(arrive() for arrive in coming)

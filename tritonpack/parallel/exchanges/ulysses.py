"""Exchange by all-to-all (Ulysses): each rank computes some heads over all rows of the batch, or of its set of ranks.

Rank r of R computes the heads from H r / R to H (r + 1) / R with the mask of the whole batch, so the layout doesn't
change its work. It receives the key heads that these heads use. If several ranks use a key head, each gets a copy, and
its gradients are summed. If H isn't a multiple of R, some ranks compute one head more than others.

Source: Jacobs et al., DeepSpeed Ulysses (arXiv:2309.14509).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tritonpack.options import AttentionOptions
from tritonpack.parallel.comm import Ranks, all_to_all, wide
from tritonpack.parallel.exchanges.call import of_heads
from tritonpack.parallel.layouts import Layout

Spans = tuple[slice, ...]  # for each rank the heads that it computes, or the key heads that these use


def divide_heads(heads: int, kv_heads: int, ranks: int) -> tuple[Spans, Spans]:
    """For each rank its query heads, at least one, and the key heads that they use."""
    group = heads // kv_heads
    own = tuple(slice(heads * rank // ranks, heads * (rank + 1) // ranks) for rank in range(ranks))
    return own, tuple(slice(span.start // group, (span.stop - 1) // group + 1) for span in own)


def has_unlike_groups(heads: int, kv_heads: int, ranks: int) -> bool:
    """Whether a rank has unlike numbers of query heads for its key heads."""
    group = heads // kv_heads
    spans = zip(*divide_heads(heads, kv_heads, ranks), strict=True)
    return any(used.stop - used.start > 1 and (own.start % group or own.stop % group) for own, used in spans)


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
    trade = Trade(ranks, layout)
    group, own, first = q.shape[1] // k.shape[1], queries[ranks.rank], keys[ranks.rank].start
    copies = has_unlike_groups(q.shape[1], k.shape[1], ranks.size)
    q, k, v = _ToHeads.apply(trade, (queries, keys, keys), q, k, v)
    if copies:  # so that each query head has a key head of its own
        places = torch.arange(own.start, own.stop, device=k.device) // group - first
        k, v = k[:, places], v[:, places]
    return _ToRows.apply(trade, queries, attention(q, k, v, of_heads(options, own)))


class Trade:
    """Trades rows for heads: ranks send rows of the heads that others compute, and get all rows of their own heads.

    Attributes:
        ranks: the ranks that divide heads.
        layout: which of their rows each of them owns.
    """

    def __init__(self, ranks: Ranks, layout: Layout) -> None:
        self.ranks, self.layout = ranks, layout

    def to_heads(self, tensors: Sequence[Tensor], spans: Sequence[Spans]) -> list[Tensor]:
        """From (own rows, all heads, D) to (all rows, own heads, D), for each tensor and the spans of its heads."""
        rank = self.ranks.rank
        pieces = [[x[:, heads[r]] for x, heads in zip(tensors, spans, strict=True)] for r in range(self.ranks.size)]
        widths = [(x.shape[1], x.shape[2]) for x in pieces[rank]]
        found = self._exchange(pieces, [[(rows, *width) for width in widths] for rows in self.layout.lengths])
        return [self.layout.unshard(torch.cat(parts)) for parts in zip(*found, strict=True)]

    def to_rows(self, tensors: Sequence[Tensor], spans: Sequence[Spans]) -> list[Tensor]:
        """From (all rows, own heads, D) to (own rows, all heads, D). Copies of a head are summed in order of ranks."""
        rows, every = self.layout.lengths[self.ranks.rank], torch.cat(self.layout.rows)
        laid = [x.index_select(0, every).split(self.layout.lengths) for x in tensors]
        pieces = [list(parts) for parts in zip(*laid, strict=True)]
        shapes = [
            [(rows, heads[r].stop - heads[r].start, x.shape[2]) for x, heads in zip(tensors, spans, strict=True)]
            for r in range(self.ranks.size)
        ]
        sums = [
            x.new_zeros(rows, heads[-1].stop, x.shape[2], dtype=wide(x.dtype))
            for x, heads in zip(tensors, spans, strict=True)
        ]
        for r, parts in enumerate(self._exchange(pieces, shapes)):
            for total, part, heads in zip(sums, parts, spans, strict=True):
                total[:, heads[r]] += part
        return [total.to(x.dtype) for total, x in zip(sums, tensors, strict=True)]

    def _exchange(self, pieces: list[list[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]) -> list[list[Tensor]]:
        """Send the tensors pieces[r] to rank r, and receive tensors of shapes[r] from it. The own ones stay here."""
        rank = self.ranks.rank
        own, pieces = pieces[rank], [[] if r == rank else some for r, some in enumerate(pieces)]
        counts = [[] if r == rank else [math.prod(shape) for shape in some] for r, some in enumerate(shapes)]
        message = torch.cat([own[0].new_empty(0), *(x.flatten() for some in pieces for x in some)])
        sent = [sum(x.numel() for x in some) for some in pieces]
        received = all_to_all(message, sent, [sum(some) for some in counts], self.ranks)()
        flat = iter(received.split([n for some in counts for n in some]))
        return [own if r == rank else [next(flat).view(shape) for shape in some] for r, some in enumerate(shapes)]


class _ToHeads(torch.autograd.Function):
    """(trade, spans, *tensors) -> `trade.to_heads(tensors, spans)`."""

    @staticmethod
    def forward(ctx: Any, trade: Trade, spans: Sequence[Spans], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.arguments = trade, spans
        return tuple(trade.to_heads(tensors, spans))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        trade, spans = ctx.arguments
        return None, None, *trade.to_rows(gradients, spans)


class _ToRows(torch.autograd.Function):
    """(trade, spans, x) -> `trade.to_rows` of one tensor."""

    @staticmethod
    def forward(ctx: Any, trade: Trade, spans: Spans, x: Tensor) -> Tensor:
        ctx.arguments = trade, spans
        return trade.to_rows([x], [spans])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        trade, spans = ctx.arguments
        return None, None, *trade.to_heads(gradients, [spans])

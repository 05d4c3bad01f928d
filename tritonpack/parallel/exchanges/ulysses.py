"""Exchange by all-to-all (Ulysses): each rank computes some heads over all rows of the batch.

Rank r of R computes the heads from H r / R to H (r + 1) / R with the mask of the whole batch, so the layout doesn't
change its work. It receives the key heads that these heads use. If several ranks use a key head, each gets a copy, and
its gradients are summed. If H isn't a multiple of R, some ranks compute one head more than others.

Source: Jacobs et al., DeepSpeed Ulysses (arXiv:2309.14509).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tritonpack.ops import run_attention
from tritonpack.parallel.comm import all_to_all, wide
from tritonpack.parallel.exchanges.call import Call, of_heads

Spans = list[slice]  # the heads of each rank


def ulysses(
    call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, want_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """out (n, H, D_v) of this rank's n rows, and lse (H, n) if `want_lse`."""
    group = q.shape[1] // k.shape[1]
    heads, keys = divide_heads(q.shape[1], k.shape[1], call.ranks.size)
    mine, my_keys = heads[call.ranks.rank], keys[call.ranks.rank]
    qs, ks, vs = Trade.apply(call, True, [heads, keys, keys], q, k, v)
    outs, lses = [], []
    for part in _uniform(mine, group):
        at = slice(part.start - mine.start, part.stop - mine.start)
        at_keys = slice(part.start // group - my_keys.start, (part.stop - 1) // group + 1 - my_keys.start)
        options = of_heads(call.options, part, sinks)
        out, part_lse = run_attention(qs[:, at], ks[:, at_keys], vs[:, at_keys], call.mask, options, call.backend)
        outs.append(out)
        lses.append(part_lse)
    if not want_lse:
        return Trade.apply(call, False, [heads], torch.cat(outs, 1))[0], None
    out, lse = Trade.apply(call, False, [heads, heads], torch.cat(outs, 1), torch.cat(lses).T[..., None])
    return out, lse[..., 0].T


def divide_heads(heads: int, kv_heads: int, ranks: int) -> tuple[Spans, Spans]:
    """For each rank its query heads, at least one, and the key heads that they use."""
    group = heads // kv_heads
    own = [slice(heads * rank // ranks, heads * (rank + 1) // ranks) for rank in range(ranks)]
    return own, [slice(span.start // group, (span.stop - 1) // group + 1) for span in own]


def _uniform(heads: slice, group: int) -> Spans:
    """The heads as runs, each with equally many query heads per key head: whole groups, and the pieces at both ends."""
    first, last = -(-heads.start // group) * group, heads.stop // group * group
    if first > last:  # all within one group
        return [heads]
    runs = [slice(heads.start, first), slice(first, last), slice(last, heads.stop)]
    return [run for run in runs if run.start < run.stop]


class Trade(torch.autograd.Function):
    """(call, to_heads, spans, *tensors): this rank's rows of all heads to all rows of its heads, or the way back.

    spans[i][r] are the heads of tensor i that rank r computes. Tensors of one dtype travel in one message.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, to_heads: bool, spans: list[Spans], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.arguments = call, to_heads, spans
        return _trade(call, to_heads, spans, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        call, to_heads, spans = ctx.arguments
        return None, None, None, *_trade(call, not to_heads, spans, gradients)


def _trade(call: Call, to_heads: bool, spans: list[Spans], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if len({x.dtype for x in tensors}) > 1:
        return tuple(_trade(call, to_heads, [span], [x])[0] for x, span in zip(tensors, spans, strict=True))
    return (_rows_to_heads if to_heads else _heads_to_rows)(call, tensors, spans)


def _rows_to_heads(call: Call, tensors: Sequence[Tensor], spans: list[Spans]) -> tuple[Tensor, ...]:
    """(own rows, all heads, D) of each tensor to (all rows, own heads, D)."""
    rank, size = call.ranks.rank, call.ranks.size
    pieces = [[x[:, span[r]] for x, span in zip(tensors, spans, strict=True)] for r in range(size)]
    widths = [(span[rank].stop - span[rank].start, x.shape[2]) for x, span in zip(tensors, spans, strict=True)]
    received = _exchange(call, pieces, [[(rows, *width) for width in widths] for rows in call.layout.lengths])
    wholes = (torch.cat(parts) for parts in zip(*received, strict=True))
    return tuple(whole if call.layout.in_order else call.layout.unshard(whole) for whole in wholes)


def _heads_to_rows(call: Call, tensors: Sequence[Tensor], spans: list[Spans]) -> tuple[Tensor, ...]:
    """(all rows, own heads, D) of each tensor to (own rows, all heads, D); copies of a head are summed."""
    rows, size = call.layout.lengths[call.ranks.rank], call.ranks.size
    pieces = [[call.layout.shard(x, r) for x in tensors] for r in range(size)]
    shapes = [
        [(rows, span[r].stop - span[r].start, x.shape[2]) for x, span in zip(tensors, spans, strict=True)]
        for r in range(size)
    ]
    received = _exchange(call, pieces, shapes)
    results = []
    for x, span, parts in zip(tensors, spans, zip(*received, strict=True), strict=True):
        if sum(part.shape[1] for part in parts) == span[-1].stop:  # each head has one owner
            results.append(torch.cat(parts, 1))
            continue
        total = x.new_zeros(rows, span[-1].stop, x.shape[2], dtype=wide(x.dtype))
        for heads, part in zip(span, parts, strict=True):
            total[:, heads] += part
        results.append(total.to(x.dtype))
    return tuple(results)


def _exchange(
    call: Call, pieces: list[list[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
) -> list[list[Tensor]]:
    """Send the tensors pieces[r] to rank r, and receive tensors of shapes[r] from it, in one message each."""
    sent = [sum(x.numel() for x in piece) for piece in pieces]
    counts = [[math.prod(shape) for shape in some] for some in shapes]
    message = torch.cat([x.flatten() for piece in pieces for x in piece])
    result = all_to_all(message, sent, [sum(count) for count in counts], call.ranks)()
    flat = iter(result.split([n for count in counts for n in count]))
    return [[next(flat).view(shape) for shape in some] for some in shapes]

"""Exchange by all-to-all (Ulysses): each rank trades its rows of all heads for all rows of its heads, and back.

The r-th of R ranks computes heads [H r / R, H (r + 1) / R) over the whole batch, with the batch's own mask, so the
layout doesn't matter to the work. It gets the key heads that those heads use; where several ranks use one, each gets
a copy and the gradients are summed. Heads needn't divide by ranks: some ranks then compute one more than others.

Bytes that a rank receives, with T rows and b bytes per number, where heads divide: (R - 1) / R T / R b times
H (D + D_v) + n (D + D_v), n being the key heads, or R if that is more; backward the same.

Source: Jacobs et al., DeepSpeed Ulysses (arXiv:2309.14509).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tritonpack.ops import run_attention
from tritonpack.parallel.call import Call, of_heads
from tritonpack.parallel.comm import all_to_all, wide

Spans = list[slice]


def ulysses(
    call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, want_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """out (n, H, D_v) of this rank's n rows, and their log-sum-exp (H, n) if it is asked for."""
    group = q.shape[1] // k.shape[1]
    heads, keys = divide_heads(q.shape[1], k.shape[1], call.ranks.size)
    mine, my_keys = heads[call.ranks.rank], keys[call.ranks.rank]
    qs, ks, vs = _ToHeads.apply(call, heads, keys, q, k, v)
    outs, lses = [], []
    for part in _uniform(mine, group):
        at = slice(part.start - mine.start, part.stop - mine.start)
        at_keys = slice(part.start // group - my_keys.start, (part.stop - 1) // group + 1 - my_keys.start)
        options = of_heads(call.options, part, sinks)
        out, part_lse = run_attention(qs[:, at], ks[:, at_keys], vs[:, at_keys], call.mask, options, call.backend)
        outs.append(out)
        lses.append(part_lse)
    if not want_lse:
        return _ToRows.apply(call, heads, torch.cat(outs, 1))[0], None
    out, lse = _ToRows.apply(call, heads, torch.cat(outs, 1), torch.cat(lses).T[..., None])
    return out, lse[..., 0].T


def divide_heads(heads: int, kv_heads: int, ranks: int) -> tuple[Spans, Spans]:
    """For each rank its query heads, and the key heads that they use; each rank has a query head at least."""
    group = heads // kv_heads
    own = [slice(heads * rank // ranks, heads * (rank + 1) // ranks) for rank in range(ranks)]
    return own, [slice(span.start // group, (span.stop - 1) // group + 1) for span in own]


def _uniform(heads: slice, group: int) -> Spans:
    """Heads in runs that use each of their key heads equally often: whole groups, and the pieces at both ends."""
    first, last = -(-heads.start // group) * group, heads.stop // group * group
    if first > last:  # all within one group
        return [heads]
    runs = [slice(heads.start, first), slice(first, last), slice(last, heads.stop)]
    return [run for run in runs if run.start < run.stop]


class _ToHeads(torch.autograd.Function):
    """This rank's rows of q, k and v to all rows of its heads."""

    @staticmethod
    def forward(ctx: Any, call: Call, heads: Spans, keys: Spans, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        ctx.arguments, ctx.shapes = (call, heads, keys), (q.shape, k.shape, v.shape)
        return _rows_to_heads(call, [q, k, v], [heads, keys, keys])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        call, heads, keys = ctx.arguments
        return None, None, None, *_heads_to_rows(call, list(gradients), [heads, keys, keys], ctx.shapes)


class _ToRows(torch.autograd.Function):
    """All rows of this rank's heads to its rows of all heads, tensor by tensor in the same order on every rank."""

    @staticmethod
    def forward(ctx: Any, call: Call, heads: Spans, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.arguments = call, heads
        rows = call.lengths[call.ranks.rank]
        shapes = [torch.Size([rows, heads[-1].stop, x.shape[2]]) for x in tensors]
        return tuple(_heads_to_rows(call, [x], [heads], [shape])[0] for x, shape in zip(tensors, shapes, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        call, heads = ctx.arguments
        return None, None, *(_rows_to_heads(call, [x], [heads])[0] for x in gradients)


def _rows_to_heads(call: Call, tensors: list[Tensor], spans: list[Spans]) -> tuple[Tensor, ...]:
    """From (own rows, all heads, D) each to (all rows, own heads, D); spans[i][r] are tensor i's heads for rank r."""
    rank, size = call.ranks.rank, call.ranks.size
    pieces = [[x[:, span[r]] for x, span in zip(tensors, spans, strict=True)] for r in range(size)]
    shapes = [
        [(rows, span[rank].stop - span[rank].start, x.shape[2]) for x, span in zip(tensors, spans, strict=True)]
        for rows in call.lengths
    ]
    received = _trade(call, pieces, shapes)
    wholes = (torch.cat(parts) for parts in zip(*received, strict=True))
    return tuple(whole if call.layout.in_order else call.layout.unshard(whole) for whole in wholes)


def _heads_to_rows(
    call: Call, tensors: list[Tensor], spans: list[Spans], shapes: list[torch.Size]
) -> tuple[Tensor, ...]:
    """The way back, to tensors of `shapes`; what several ranks have of a head is summed, in float32 or wider."""
    rank, size = call.ranks.rank, call.ranks.size
    pieces = [[call.layout.shard(x, r) for x in tensors] for r in range(size)]
    parts = [
        [
            (call.lengths[rank], span[r].stop - span[r].start, shape[2])
            for span, shape in zip(spans, shapes, strict=True)
        ]
        for r in range(size)
    ]
    received = _trade(call, pieces, parts)
    results = []
    for x, span, shape, one in zip(tensors, spans, shapes, zip(*received, strict=True), strict=True):
        if sum(s.stop - s.start for s in span) == shape[1]:
            results.append(torch.cat(one, 1))
            continue
        total = x.new_zeros(shape, dtype=wide(x.dtype))
        for heads, part in zip(span, one, strict=True):
            total[:, heads] += part
        results.append(total.to(x.dtype))
    return tuple(results)


def _trade(call: Call, pieces: list[list[Tensor]], shapes: list[list[tuple[int, int, int]]]) -> list[list[Tensor]]:
    """pieces[r] to rank r; from each rank r, tensors of shapes[r]. All in one message per pair of ranks."""
    sent = [sum(x.numel() for x in piece) for piece in pieces]
    counts = [[a * b * c for a, b, c in shape] for shape in shapes]
    message = torch.cat([x.flatten() for piece in pieces for x in piece])
    result = all_to_all(message, sent, [sum(count) for count in counts], call.ranks)
    flat = iter(result.split([n for count in counts for n in count]))
    return [[next(flat).view(one) for one in shape] for shape in shapes]

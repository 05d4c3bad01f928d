"""Exchange by all-gather: every rank gets the keys and values of all, a few key heads at a time.

While one step's heads are computed, the next step's keys travel; in backward they travel again, so that no rank ever
holds all heads of all keys, and their gradients go home by reduce-scatter, in float32 for half precision.

Bytes that a rank receives, with T rows, R ranks, n key heads of dimensions D and D_v, and b bytes per number: forward
(R - 1) / R T n (D + D_v) b, backward the same plus (R - 1) / R T n (D + D_v) max(b, 4); shards of unequal length count
as the longest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tritonpack.parallel.comm import fill_up, gather, scatter_sum, wide
from tritonpack.parallel.exchanges.call import Call


class AllGather(torch.autograd.Function):
    """(call, stride, q, k, v, sinks) -> out (n, H, D_v), lse (H, n) of this rank's n rows; stride in key heads."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, stride: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        mask, group = call.rows_mask(), q.shape[1] // k.shape[1]
        outs, lses = [], []
        for keys, (ks, vs) in _visiting(call, stride, k, v):
            heads = slice(keys.start * group, keys.stop * group)
            out, lse = call.forward(q[:, heads], ks, vs, mask, heads, sinks)
            outs.append(out)
            lses.append(lse)
        out, lse = torch.cat(outs, 1), torch.cat(lses)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.call, ctx.stride = call, stride
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        call, mask, group = ctx.call, ctx.call.rows_mask(), q.shape[1] // k.shape[1]
        dout, dlse = gradients
        dout = torch.zeros_like(out) if dout is None else dout
        dqs: list[Tensor] = []
        dsinks: list[Tensor] = []
        home: list[tuple[Tensor, Any]] = []
        for keys, (ks, vs) in _visiting(call, ctx.stride, k, v):
            heads = slice(keys.start * group, keys.stop * group)
            dq, dk, dv, dsink = call.backward(
                dout[:, heads], None if dlse is None else dlse[heads], q[:, heads], ks, vs, out[:, heads], lse[heads],
                mask, heads, sinks,
            )  # fmt: skip
            dqs.append(dq)
            dsinks.append(dsink)
            if home:
                home[-1][1].wait()  # so that no more than two steps' gradients are in memory
            home.append(scatter_sum(_fill(_join(dk, dv).to(wide(dk.dtype)), call), call.ranks))
        home[-1][1].wait()
        parts = [_split(total[: k.shape[0]].to(k.dtype), k, v) for total, _ in home]
        dk, dv = (torch.cat(steps, 1) for steps in zip(*parts, strict=True))
        return None, None, torch.cat(dqs, 1), dk, dv, None if sinks is None else torch.cat(dsinks)


def _visiting(call: Call, stride: int, k: Tensor, v: Tensor) -> Iterator[tuple[slice, tuple[Tensor, Tensor]]]:
    """For each step its key heads, and the whole batch's k and v of these heads; one step ahead of the caller."""
    steps = [slice(first, min(first + stride, k.shape[1])) for first in range(0, k.shape[1], stride)]

    def send(heads: slice) -> tuple[Tensor, Any]:
        mine = _join(k[:, heads], v[:, heads])
        return gather(fill_up(mine, 0, max(call.lengths)), call.ranks)

    coming = send(steps[0])
    for number, heads in enumerate(steps):
        gathered, handle = coming
        handle.wait()
        if number + 1 < len(steps):
            coming = send(steps[number + 1])
        everything = gathered.flatten(0, 1)
        if not call.layout.fills_in_order:
            everything = everything.index_select(0, call.layout.slots)
        yield heads, _split(everything, k, v)


def _join(k: Tensor, v: Tensor) -> Tensor:
    """k (T, n, D) and v (T, n, D_v) as one (T, n (D + D_v)), so that they travel together."""
    return torch.cat([k.flatten(1), v.flatten(1)], 1)


def _split(joined: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What `_join` made of some heads of k and v, as (T, heads, D) and (T, heads, D_v)."""
    heads = joined.shape[1] // (k.shape[2] + v.shape[2])
    ks, vs = joined.split([heads * k.shape[2], heads * v.shape[2]], 1)
    return ks.unflatten(1, (heads, k.shape[2])), vs.unflatten(1, (heads, v.shape[2]))


def _fill(gradients: Tensor, call: Call) -> Tensor:
    """Gradients of the whole batch's rows as (ranks, longest shard, ...), zeros where shards are shorter."""
    shape = (call.ranks.size, max(call.lengths), *gradients.shape[1:])
    if call.layout.fills_in_order:
        return gradients.view(shape)
    filled = gradients.new_zeros(shape)
    filled.flatten(0, 1).index_copy_(0, call.layout.slots, gradients)
    return filled

"""Exchange by all-gather: every rank receives the keys and values of all ranks, a few key heads at a time.

While one step's heads are computed, the keys of the next step travel. In backward they travel again, so that no rank
ever holds all heads of all keys. Gradients return by reduce-scatter, in float32 for half precision. Shards are padded
to the length of the longest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tritonpack.parallel.comm import Arrival, gather, pad_to, scatter_sum, wide
from tritonpack.parallel.exchanges.call import Call, join, split


class AllGather(torch.autograd.Function):
    """(call, stride, q, k, v, sinks) -> out (n, H, D_v), lse (H, n) of this rank's n rows; stride in key heads."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, stride: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for heads, ks, vs in _steps(call, stride, q, k, v):
            out, lse = call.forward(q[:, heads], ks, vs, call.rows_mask(), heads, sinks)
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
        call, (dout, dlse) = ctx.call, gradients
        dout = torch.zeros_like(out) if dout is None else dout
        dqs: list[Tensor] = []
        dsinks: list[Tensor] = []
        sums: list[Arrival] = []
        for heads, ks, vs in _steps(call, ctx.stride, q, k, v):
            dq, dk, dv, dsink = call.backward(
                dout[:, heads], None if dlse is None else dlse[heads], q[:, heads], ks, vs, out[:, heads], lse[heads],
                call.rows_mask(), heads, sinks,
            )  # fmt: skip
            dqs.append(dq)
            dsinks.append(dsink)
            if sums:
                sums[-1]()  # so that gradients of at most two steps are in memory
            sums.append(scatter_sum(_padded_shards(join(dk, dv).to(wide(dk.dtype)), call), call.ranks))
        parts = [split(total()[: k.shape[0]].to(k.dtype), k, v) for total in sums]
        dk, dv = (torch.cat(steps, 1) for steps in zip(*parts, strict=True))
        return None, None, torch.cat(dqs, 1), dk, dv, None if sinks is None else torch.cat(dsinks)


def _steps(call: Call, stride: int, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """For each step its query heads, and the k and v of the whole batch for them. The next step travels meanwhile."""
    steps = [slice(first, min(first + stride, k.shape[1])) for first in range(0, k.shape[1], stride)]
    group = q.shape[1] // k.shape[1]

    def send(keys: slice) -> Arrival:
        return gather(pad_to(join(k[:, keys], v[:, keys]), 0, max(call.lengths)), call.ranks)

    coming = send(steps[0])
    for number, keys in enumerate(steps):
        rows = coming().flatten(0, 1)
        if number + 1 < len(steps):
            coming = send(steps[number + 1])
        if not call.layout.fills_in_order:
            rows = rows.index_select(0, call.layout.slots)
        yield slice(keys.start * group, keys.stop * group), *split(rows, k, v)


def _padded_shards(gradients: Tensor, call: Call) -> Tensor:
    """Gradients of the whole batch's rows as (ranks, longest shard, ...), with zeros at the end of shorter shards."""
    shape = (call.ranks.size, max(call.lengths), *gradients.shape[1:])
    if call.layout.fills_in_order:
        return gradients.view(shape)
    padded = gradients.new_zeros(shape)
    padded.flatten(0, 1).index_copy_(0, call.layout.slots, gradients)
    return padded

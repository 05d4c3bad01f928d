"""Exchange by all-gather: every rank receives the keys and values of all ranks, a few key heads at a time.

The keys of the next step travel while the heads of one step are computed. They travel again in backward, so that no
rank holds all heads of all keys. A reduce-scatter returns their gradients, in float32 for half precision. Shards are
padded to the length of the longest.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tritonpack.parallel.comm import Arrival, gather, pad_to, scatter_sum, wide
from tritonpack.parallel.exchanges.call import Call, Gradients, join, split


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """out (n, H, D_v) and lse (H, n) of this rank's n rows."""
    parts = [
        call.forward(q[:, heads], ks, vs, call.rows_mask(), heads, sinks) for heads, ks, vs in _steps(call, q, k, v)
    ]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 1), torch.cat(lses)


def backward(
    call: Call, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor,
    lse: Tensor,
) -> Gradients:  # fmt: skip
    """dq, dk, dv of this rank's rows, and its part of dsinks."""
    dqs: list[Tensor] = []
    dsinks: list[Tensor] = []
    sums: list[Arrival] = []
    for heads, ks, vs in _steps(call, q, k, v):
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
    return torch.cat(dqs, 1), dk, dv, None if sinks is None else torch.cat(dsinks)


def _steps(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """For each step its query heads, and their keys and values of the whole batch."""
    steps = [slice(first, min(first + call.stride, k.shape[1])) for first in range(0, k.shape[1], call.stride)]
    group = q.shape[1] // k.shape[1]

    def send(keys: slice) -> Arrival:
        return gather(pad_to(join(k[:, keys], v[:, keys]), 0, max(call.layout.lengths)), call.ranks)

    coming = send(steps[0])
    for number, keys in enumerate(steps):
        rows = coming().flatten(0, 1)
        if number + 1 < len(steps):
            coming = send(steps[number + 1])
        if call.layout.slots is not None:
            rows = rows.index_select(0, call.layout.slots)
        yield slice(keys.start * group, keys.stop * group), *split(rows, k, v)


def _padded_shards(gradients: Tensor, call: Call) -> Tensor:
    """Gradients of the whole batch's rows as (ranks, longest shard, ...), with zeros at the end of shorter shards."""
    size, longest, slots = call.ranks.size, max(call.layout.lengths), call.layout.slots
    if slots is not None:
        gradients = gradients.new_zeros(size * longest, *gradients.shape[1:]).index_copy_(0, slots, gradients)
    return gradients.unflatten(0, (size, longest))

"""Exchanges in steps of key heads: the keys of the next step travel while the heads of one step are computed.

A rank attends to its own keys while the first message travels, and merges the results. In backward it computes one half
of its own keys while the first keys travel to it, and the other half while the last gradients travel back. Keys and
values travel again in backward, so that no rank holds all heads of all keys that it receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from tritonpack.parallel.comm import wide
from tritonpack.parallel.exchanges.call import ALL_HEADS, Call, merge, merge_sinks
from tritonpack.parallel.exchanges.keys import Part, other_keys, own_halves, own_keys

STEPS = 4  # of heads, at most


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """out (n, H, D_v) and lse (H, n) of this rank's n rows."""
    own, others, steps = own_keys(call), other_keys(call), _steps(k)
    order: list[tuple[slice, Part]] = [(ALL_HEADS, own)]
    if others is not None:
        order += [(step, others) for step in steps]
    keys = _travel(call, k, v, order)
    out, lse = call.forward(q, *next(keys), own.mask)
    for step in steps if others is not None or sinks is not None else []:
        heads = _queries(step, q, k)
        total, total_lse = out[:, heads].to(lse.dtype), lse[heads]
        if others is not None:
            total, total_lse = merge(total, total_lse, *call.forward(q[:, heads], *next(keys), others.mask, heads))
        if sinks is not None:
            total, total_lse = merge_sinks(total, total_lse, sinks[heads])
        out[:, heads], lse[heads] = total, total_lse
    return out, lse


def backward(
    call: Call, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of this rank's rows."""
    others = other_keys(call)
    order: list[tuple[slice, Part]] = [(ALL_HEADS, own_keys(call))]
    if others is not None:
        first, last = own_halves(call)
        order = [(ALL_HEADS, first), *((step, others) for step in _steps(k)), (ALL_HEADS, last)]
    dq, dk, dv = (torch.zeros_like(x, dtype=wide(x.dtype)) for x in (q, k, v))
    add: Callable[[], None] | None = None
    for (step, part), (ks, vs) in zip(order, _travel(call, k, v, order), strict=True):
        heads = _queries(step, q, k)
        dq_part, dk_part, dv_part = call.backward(
            dout[:, heads], q[:, heads], ks, vs, out[:, heads], lse[heads], part.mask, heads
        )
        dq[:, heads] += dq_part
        if add is not None:
            add()  # so that gradients of at most two steps are in memory
        add = partial(part.give_back(dk_part, dv_part, call.ranks), dk[:, step], dv[:, step])
    if add is not None:
        add()
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _steps(k: Tensor) -> list[slice]:
    """The key heads of each step."""
    heads, stride = k.shape[1], -(-k.shape[1] // STEPS)
    return list(map(slice, range(0, heads, stride), range(stride, heads + stride, stride)))


def _travel(call: Call, k: Tensor, v: Tensor, order: Sequence[tuple[slice, Part]]) -> Iterator[tuple[Tensor, Tensor]]:
    """The keys and values of each part, of some heads. The next ones travel meanwhile."""
    (heads, part), *rest = order
    coming = part.send(k[:, heads], v[:, heads], call.ranks)
    for heads, part in rest:
        keys = coming()
        coming = part.send(k[:, heads], v[:, heads], call.ranks)
        yield keys
    yield coming()


def _queries(keys: slice, q: Tensor, k: Tensor) -> slice:
    """The query heads that use some key heads."""
    group, (first, stop, _) = q.shape[1] // k.shape[1], keys.indices(k.shape[1])
    return slice(first * group, stop * group)

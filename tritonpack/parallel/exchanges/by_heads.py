"""Exchanges in steps of key heads: the keys of the next step travel while the heads of one step are computed.

A rank has its own keys before anything arrives. So it attends to them while the first message travels, and merges the
results (merge.py). If there are fewer steps of heads than `STEPS`, the keys of each step travel in several parts. In
backward a rank computes one half of its own keys while the first keys travel to it, and the other half while the last
gradients travel back. Keys and values travel again in backward, so that no rank holds all heads of all keys that it
receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from tritonpack.parallel.comm import wide
from tritonpack.parallel.exchanges.call import ALL_HEADS, Call
from tritonpack.parallel.exchanges.keys import Part, divide, own_halves, own_keys
from tritonpack.parallel.exchanges.merge import merge, merge_sinks

STEPS = 4  # of heads and parts of keys together


@dataclass(frozen=True)
class ByHeads:
    """The exchange "all_gather", "group_cast" or "auto"."""

    name: str

    def forward(self, call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """out (n, H, D_v) and lse (H, n) of this rank's n rows."""
        steps, parts = self._divide(call, k)
        own = own_keys(call)
        keys = _travel(call, k, v, [(ALL_HEADS, own), *product(steps, parts)])
        out, lse = call.forward(q, *next(keys), own.mask)
        for step in steps if parts or sinks is not None else []:
            heads = _queries(step, q, k)
            total, total_lse = out[:, heads].to(lse.dtype), lse[heads]
            for part in parts:
                total, total_lse = merge(total, total_lse, *call.forward(q[:, heads], *next(keys), part.mask, heads))
            if sinks is not None:
                total, total_lse = merge_sinks(total, total_lse, sinks[heads])
            out[:, heads], lse[heads] = total, total_lse
        return out, lse

    def backward(
        self, call: Call, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this rank's rows."""
        steps, parts = self._divide(call, k)
        own: Sequence[Part] = own_halves(call) if parts else [own_keys(call)]
        order = [*product([ALL_HEADS], own[:1]), *product(steps, parts), *product([ALL_HEADS], own[1:])]
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

    def _divide(self, call: Call, k: Tensor) -> tuple[list[slice], Sequence[Part]]:
        """The key heads of each step, and the parts of the keys that travel in it."""
        heads = k.shape[1]
        stride = -(-heads // STEPS)
        steps = [slice(first, min(first + stride, heads)) for first in range(0, heads, stride)]
        return steps, divide(self.name, call, max(STEPS // len(steps), 1))


def _travel(call: Call, k: Tensor, v: Tensor, order: Sequence[tuple[slice, Part]]) -> Iterator[tuple[Tensor, Tensor]]:
    """The keys and values of each part, of some heads. The next ones travel meanwhile."""
    coming = [part.send(k[:, heads], v[:, heads], call.ranks) for heads, part in order[:1]]
    for heads, part in order[1:]:
        keys = coming.pop()()
        coming.append(part.send(k[:, heads], v[:, heads], call.ranks))
        yield keys
    yield coming.pop()()


def _queries(keys: slice, q: Tensor, k: Tensor) -> slice:
    """The query heads that use some key heads."""
    group, (first, stop, _) = q.shape[1] // k.shape[1], keys.indices(k.shape[1])
    return slice(first * group, stop * group)
